# %% [markdown]
# # Read the pages of a KV cache
#
# What is in a KV page, and did it survive the journey from prefill to decode?
#
# **You will do**: derive the address of one key by hand, walk through a page, break one on purpose, then compare what prefill
# sent with what decode received.
#
# **You will learn**: how 64 keys lie in 8,448 bytes, which marks a public writer leaves in them, and what a lost page looks like
# to the token that needs it.
#
# **You need**: nothing. Your own dumps work as well: the last section says how to take them.

# %% [markdown]
# ## Start

# %%
import pandas as pd
import torch
from needlework import pages, workbook
from needlework.workbook import page_figures

start = workbook.start("Read the pages of a KV cache")

# %% tags=["parameters"]
incident = "context-loss"  # a folder under data/incidents; its pages/ folder is compared below
slot = 5  # the entry that is followed by hand
seed = 0

# %% [markdown]
# ## A page, byte by byte
#
# An indexer page holds 64 keys of 128 fp8 numbers, and one float32 scale for each key. The shape that code prints for it,
# [pages, 64, 1, 132], suggests 64 rows of 132 bytes. Guess: where does the scale of slot 5 lie?

# %%
layout = pages.LAYOUTS["dsa-index-fp8"]
fig = page_figures.page_plan(layout, slot=slot)
workbook.figures.show(
    fig,
    alt="A page drawn as 66 rows of 128 bytes: 64 rows of codes, one row a key, then two rows of scales; "
    "the codes of slot 5 fill row 5, its scale is four bytes far away in row 64.",
)

# %% [markdown]
# One row of the drawing is one key, and all scales sit together at the end. The printed shape is a fiction: whoever moves 132 bytes
# in a row takes four bytes of the next key along and leaves the scale behind.

# %%
layout

# %% [markdown]
# ## The addresses of the incident
#
# The incident's kernel reads values through a byte view and scales through a float32 view of the same buffer:
#
# $$\text{value} = \text{page} \cdot 8448 + \text{slot} \cdot 128 + d \qquad
# \text{scale} = \text{page} \cdot 2112 + 2048 + \text{slot} \;\;(\text{in floats})$$
#
# Both follow from the table above, in which P is the number of entries in a page. Check them on a page of random keys,
# with nothing but slices.

# %%
generator = torch.Generator().manual_seed(seed)
keys = torch.nn.functional.normalize(torch.randn(4 * 64, 128, generator=generator)) * 128**0.5
pool = layout.encode({"values": keys.view(4, 64, 128)})
flat, page = pool.flatten(), 2
codes = flat[page * 8448 + slot * 128 :][:128].view(torch.float8_e4m3fn).float()
scale = flat.view(torch.float32)[page * 2112 + 2048 + slot]
error = (codes * scale - keys[page * 64 + slot]).abs().max()

# %%
assert layout.page_bytes(64) == 8448 == 64 * 128 + 64 * 4
assert 8448 // 4 == 2112 and layout["scales"].start(64) // 4 == 2048
assert torch.equal(codes * scale, layout.decode(pool)["values"][page, slot])
assert float(error) <= float(keys[page * 64 + slot].abs().max()) / 16
assert float(codes.abs().max()) == 448.0

# %% [markdown]
# The slices give the key that was stored, to within half a step of fp8's three mantissa bits: the incident's arithmetic is
# right. And the largest code is 448, the largest number of the format. That is the mark of the writer: **every** written key
# reaches it, so a key that does not is suspect even when nobody knows what it should hold.

# %% [markdown]
# ## Walk through it
#
# On the left each entry's bytes, on the right its scale; the table gives one field of one slot in hex and as numbers.

# %%
page_figures.PageExplorer(pages.Dump(pool, layout.name, role="synthetic", pool="index keys"), slot=slot)

# %% [markdown]
# ## All layouts
#
# The same record, with other numbers, describes every public layout. Each one derives its page size, its addresses and its rounding
# from one place.

# %%
rows = [
    (each.name, each.meaning, each.token_bytes, each.page_bytes(64), "yes" if each.align > 1 else "no")
    for each in pages.LAYOUTS.values()
]
columns = ["layout", "holds", "bytes an entry", "bytes a page of 64", "padded"]
workbook.tables.table(pd.DataFrame(rows, columns=columns), "KV page layouts in public serving code")

# %%
v4 = pages.LAYOUTS["v4-mla-fp8"]
assert [v4.page_bytes(n) for n in (2, 64, 256)] == [1728, 37440, 149760]
workbook.figures.show(
    page_figures.page_plan(v4, slot=slot, width=576),
    alt="A DeepSeek-V4 page drawn as 65 rows of 576 bytes: 64 rows of 448 codes and 128 bytes of rope, then one row "
    "with the scales of all entries, a pad byte after every seven, and padding at the end; slot 5 is outlined.",
)

# %% [markdown]
# ## Bytes without a label
#
# Guess: can 8,448 bytes say by themselves what they are? The fit is the share of scale groups that obey the layout's writer, less
# what random bytes reach.

# %%
found = pages.identify(pool[:1])
noise = pages.identify(torch.randint(0, 256, (8448,), dtype=torch.uint8, generator=generator))
assert found["layout"][:2].tolist() == ["dsa-index-fp8", "dsa-index-fp8-fnuz"]
assert noise["layout"][0] == "none of these"
workbook.tables.table(
    found.head(4)[["layout", "page_tokens", "fit", "sentence"]],
    "What one unlabelled page could be",
    formats={"fit": "{:.2f}"},
)

# %% [markdown]
# Almost. The runner-up is the same layout in AMD's FNUZ codes: its writer leaves the same marks, so only the card settles
# between those two. Random bytes are refused: *none of these*.

# %% [markdown]
# ## Break a page, and see whether it is noticed
#
# Four classic accidents, one on each page: a key that was never written, a scale block shifted by three slots, a copy that stopped
# halfway, rows of 132 bytes written into a page that keeps its scales at the end.

# %%
damaged = pool.clone()
layout["codes"].view(damaged, 64)[0, 9] = 0
layout["scales"].view(damaged, 64)[0, 9] = 0
scales = layout["scales"].view(damaged, 64)[1]
scales.copy_(scales.clone().roll(3, 0))
damaged[2, 8448 // 2 :] = 0
fields = layout.decode(pool[3:])
damaged[3] = torch.cat([fields["codes"][0], fields["scales"][0].view(torch.uint8)], -1).flatten()
findings = pages.diagnose(damaged, layout)
workbook.tables.table(findings[["name", "page", "sentence"]], "Four planted accidents")

# %%
assert pages.diagnose(pool, layout).empty
assert findings["name"].tolist() == ["never-written", "scale-shifted", "half-page", "row-format"]

# %% [markdown]
# All four are named, at their place, and the healthy pool gives no finding. A page of *another request* would look healthy here:
# bytes alone cannot tell whose they are. That takes a comparison.

# %% [markdown]
# ## What prefill sent, and what decode received
#
# The incident's dumps hold the pages of one request on both sides, in the order of its tokens. Guess before you run the cell: which
# of the two pools arrives whole, the compressed keys that attention reads (`c4_kv`, one entry for four tokens), or the indexer
# keys that decide what it reads (`c4_index`)?

# %%
bundle = workbook.incident(incident)
dumps = [dump for path in sorted(bundle.pages.glob("*.bin")) for dump in pages.read(path)]
sent = [dump for dump in dumps if dump.role == "prefill"]
received = [dump for dump in dumps if dump.role == "decode"]
known = all(dump.layout is not None for dump in sent + received)
wanted = "what follows compares a request's pages, prefill's against decode's, in a layout that `pages.guess` knows"
workbook.need(sent and len(sent) == len(received) and known, f"{wanted}; incident {incident} holds none")
workbook.tables.table(pd.DataFrame({"dump": [str(dump) for dump in dumps]}), "Dumps of the incident")

# %%
lost = pages.compare_dumps(sent, received)
per_pool = lost.groupby(["pool", "layer", "name"])["token_first"].agg(pages="size", first_token="min").reset_index()
workbook.tables.table(per_pool, "What a reader of the decode side loses")

# %%
workbook.figures.show(
    page_figures.journey(sent, lost, title="One request across the transfer: its pages in the order of the tokens"),
    alt="Rows of squares, one row a buffer and one square a page, in the order of the tokens; not as they were sent: "
    + (
        ", ".join(
            f"{r.pages} pages of {r.pool}.{r.layer} from token {r.first_token:,.0f} on" for r in per_pool.itertuples()
        )
        or "none"
    ),
)

# %%
if incident == "context-loss":
    assert set(lost["name"]) == {"missing"} and set(lost["pool"]) == {"c4_index"}
    assert lost["token_first"].min() == 2048 and (lost.groupby("layer").size() == 13).all()
    assert {dump.pool for dump in sent} == {"c4_index", "c4_kv"}

# %% [markdown]
# In the incident `context-loss` every page of the compressed keys arrived. Of the indexer keys only the first 2,048 tokens did; 13 pages in each layer hold zeros.
# Decode *has* the old context, but its indexer scores it against nothing, so it is not selected. From outside this is a model that
# says there is no prior context.

# %% [markdown]
# ## Walk through the received pages

# %%
edge = int(lost["page"].min()) if len(lost) else 1
worst = next(dump for dump in received if len(lost) == 0 or dump.pool == lost["pool"].iloc[0])
page_figures.PageExplorer(worst, slot=slot, field="scales", start=edge, stills=[0, edge - 1, edge, len(worst.raw) - 1])

# %% [markdown]
# There page 7 is full, page 8 is empty, codes and scales alike: neither rounding nor a wrong scale nor a wrong layout does that.
# The reading holds only if prefill's own pages are healthy:

# %%
kept = [pages.diagnose(dump.raw, dump.record, dump.page_tokens, live=dump.live) for dump in sent]
print(f"{sum(map(len, kept))} findings in prefill's own pages")

# %% tags=["remove-cell"]
assert pages.compare_dumps(sent, sent).empty
if incident == "context-loss":
    assert all(table.empty for table in kept)
    assert edge == 8 and bool(worst.raw[7].any()) and not bool(worst.raw[8].any())

# %% [markdown]
# ## Take your own dumps
#
# SGLang 0.5.23, in the scheduler process: `pool = scheduler.tp_worker.model_runner.token_to_kv_pool`, then
# `pool.get_index_k_with_scale_buffer(layer)` for indexer keys and `pool.get_extra_key_buffer(layer)` for compressed ones; page ids
# are `req_to_token[request, :length:256] // 256`. vLLM, in one process: `static_forward_context[layer_name].kv_cache` and the
# scheduler's `get_block_ids(request_id)`. Save with `pages.write_dump`, read with
# `needlework pages compare prefill.bin decode.bin`. The details, with sources, are in the documentation of `needlework.pages.dumps`.
#
# ## What we found
#
# * A page is 8,448 bytes, 2,112 floats, scales from float 2,048 on; the incident's addresses are right.
# * Prefill's pages are healthy, and the compressed keys arrive whole.
# * The indexer keys past token 2,048 do not arrive: 13 pages in each layer are zeros on the decode side.
#
# ## What would change our mind
#
# A dump of decode taken *after* it had copied those pages, or an engine that recomputes indexer keys on arrival: then the zeros
# would be early, not lost. Dumps of a combined server with the same zeros would move the fault into the writer.
#
# ## Next
#
# [06_indexer_logits](06_indexer_logits.ipynb): does the scoring kernel match the reference at every length?
