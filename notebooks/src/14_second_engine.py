# %% [markdown]
# # Read the incident's own engine
#
# SGLang with DeepSeek's sparse attention on one GPU: does the pair answer as one server does, and does every pool of
# DeepSeek-V4 arrive whole?
#
# **You will do**: replay recorded requests to one server and to a prefill/decode pair, and decode the pages of both sides:
# index and latents of DeepSeek-V3.2, then those of DeepSeek-V4: window, c4 and c128 (one entry for 4 or 128 tokens), index
# and states.
#
# **You will learn**: how far two engines that share nothing but the weights agree, and what a complete transfer looks like.
#
# **You need**: nothing. Recorded on one H200 with `tools/record_sglang.py`, which also runs on your GPU.

# %% [markdown]
# ## Start

# %%
import json

import numpy as np
import pandas as pd
import torch
from needlework import analysis, pages, workbook
from needlework.kernels import reference
from needlework.workbook import engine_figures

start = workbook.start("Read the incident's own engine")

# %% tags=["parameters"]
incident = "sglang-dsv32"  # a folder under data/incidents
budget = 2048  # index_topk of the recorded model

# %%
bundle = workbook.incident(incident)
wanted = "this notebook reads SGLang's own pages, as sglang-dsv32 or tools/record_sglang.py recorded them"
workbook.need(bundle.has("evidence/v4-digests.json"), f"{wanted}; incident {bundle.name} holds none")

# %% [markdown]
# ## Does an answer depend on its context?
#
# Weights and prompts are those of [12_real_engine](12_real_engine.ipynb). Again one early token was changed, then the whole
# first page. The distance is the largest difference among the likeliest tokens' log-probabilities at the first step. Guess:
# is the smallest effect above zero at 32,000 tokens?

# %%
power = analysis.load_trials(bundle.run("power"))
effect = analysis.distances(power[power["edit"] != ""], power[power["edit"] == ""], by="target_tokens")
shown = effect.pivot_table(index="target_tokens", columns="edit", values="first_step")
shown = shown.rename(columns={"token": "one token changed", "page": "first page changed"})
workbook.tables.table(
    shown.reset_index(), "First-step distance in nats, by prompt length", formats=dict.fromkeys(shown, "{:.2f}")
)

# %%
assert effect["first_step"].min() > 0.2, "an early change does not show at some length"

# %% [markdown]
# More than 0.2 nats at every length: a comparison of answers has power here.
#
# ## The pair against one server
#
# Unlike vLLM's, SGLang's decode server starts from prefill's first token and computes no token of the prompt again. Guess:
# how far apart are pair and single server at the ten lengths of up to 2,048 tokens?

# %%
trials = analysis.load_trials(bundle.run("equality"))
cold = {arm: trials[(trials["arm"] == arm) & (trials["send"] == 0)] for arm in ("combined", "pd")}
again = [analysis.distances(trials[(trials["probe"] == "aa") & (trials["arm"] == arm)], cold[arm]) for arm in cold]
tables = {
    "same arm asked twice": pd.concat(again),
    "pair against one server": analysis.distances(cold["pd"], cold["combined"]),
}

# %%
workbook.figures.show(
    engine_figures.first_step_distances(tables, budget=budget, title="SGLang: repeats, pair and single server"),
    alt="First-step distance against prompt length: repeats of one arm and the pair against the single server both lie at "
    "exactly zero up to 2,048 tokens and scatter up to about one nat beyond.",
)

# %%
parts = {
    (name, low): t[(t["target_tokens"] <= budget) == low]["first_step"]
    for name, t in tables.items()
    for low in (True, False)
}
assert all((values == 0).all() if low else (values > 0).all() for (_, low), values in parts.items())
counted = [
    (name, "up to" if low else "beyond", len(v), f"{v.min():.2f} to {v.max():.2f}") for (name, low), v in parts.items()
]
shown = pd.DataFrame(counted, columns=["compared", "the budget", "pairs", "first step, nats"])
workbook.tables.table(shown, "How far apart, up to the budget and beyond")

# %% [markdown]
# Zero, to the last digit, at all ten lengths, and so are the 20 repeats. Beyond 2,048 tokens nothing is equal, neither pair
# and single server nor an arm and itself: as in vLLM, the noise begins where entries must be selected. It belongs to sparse
# selection, not to one engine.
#
# That was the first step of an answer. Guess what the other seven do at 2,047 and 2,048 tokens.

# %%
whole = tables["pair against one server"].set_index("target_tokens")["worst_step"]
fits = whole.index + 8 <= budget  # the prompt and its answer of eight tokens
assert (whole[fits] == 0).all() and fits.sum() == 8 and whole[[budget - 1, budget]].between(0.05, 0.1).all()
shown = whole[whole.index <= budget].rename("worst step, nats").reset_index()
workbook.tables.table(
    shown, "Pair against one server: the worst of eight steps", formats={"worst step, nats": "{:.2f}"}
)

# %% [markdown]
# There the answer itself passes the budget, and the noise begins with the first token that has to select.
#
# ## Cold and warm, proved
#
# Each prompt was sent cold, at once again, and cold once more. Guess how many of 32,000 tokens are cached the second time.

# %%
warm, rest = trials[trials["send"] == 1], trials[trials["send"] != 1]
assert (rest["cached_tokens"] == 0).all()
assert (warm["cached_tokens"] == (warm["target_tokens"] - 1) // 64 * 64).all()
print(f"{int(warm['cached_tokens'].max()):,} of {int(warm['target_tokens'].max()):,} tokens")

# %% [markdown]
# All whole pages of 64 tokens before the last token, in both arms; of the pair it is prefill's count.
#
# ## The pages on both sides
#
# One prompt of 600 tokens: three index pools and one pool of latents, as prefill sent them and as decode held them at the end.


# %%
def side(pattern: str) -> list[pages.Dump]:
    return [pages.read(path)[0] for path in sorted(bundle.pages.glob(pattern))]


sent, received = side("prefill-*-none.bin"), side("decode-*-none.bin")
assert len(sent) == 4 and pages.compare_dumps(sent, received).empty
guesses = {f"{d.pool}.{d.layer}": pages.identify(d.raw.flatten()).iloc[0]["layout"] for d in received}
told = pd.DataFrame({"pool and layer": list(guesses), "recognised as": list(guesses.values())})
workbook.tables.table(told, "Unlabelled pools on the decode side")

# %% [markdown]
# Complete, and recognised without a label. SGLang's index scales are plain float32 where vLLM's are powers of two: two
# layouts of the same size. In one more request, two of the index pages in prefill's list were exchanged on purpose.

# %%
found = pages.compare_dumps([d for d in sent if d.pool == "index"], side("decode-*-index-swap.bin"))
assert set(found["name"]) == {"permuted"} and sorted(found["page"].unique()) == [2, 5] and found["layer"].nunique() == 3
columns = ["layer", "page", "name", "token_first", "token_last"]
workbook.tables.table(found[columns], "What the pages say of the exchange")

# %% [markdown]
# Found in all three layers, at the two pages. Are the bytes read as the engine reads them? One decode step at 2,201 tokens
# was captured: if they are, the reference gives the engine's own scores from its pages.

# %%
with np.load(bundle.evidence / "step.npz", allow_pickle=False) as kept:
    step = {name: torch.from_numpy(np.atleast_1d(kept[name])) for name in kept.files}
length, table = step["length"].int(), torch.arange(len(step["pages"]), dtype=torch.int32)[None]
query = step["q"].view(torch.float8_e4m3fn).float()

# %%
ours = reference.indexer_logits(query, step["weights"], step["pages"], table, length)[0, : int(length)]
error = float((ours - step["logits"]).norm() / step["logits"].norm())
assert int(length) == 2201 and error < 2e-4
print(f"relative difference {error:.1e}")

# %% [markdown]
# They agree to within 2 parts in 10,000.
#
# ## The kernels of that process

# %%
checks = json.loads((bundle.evidence / "kernel_checks.json").read_text())
failed = [case["case"] for check in checks for case in check["cases"] if case["status"] == "FAIL"]
assert [check["passed"] for check in checks] == [True, False] and len(failed) == 2
print(*(check["says"].split(". Not covered")[0] for check in checks), sep="\n")

# %% [markdown]
# Scores agree in all 23 cases that the kernel accepts. FlashMLA's sparse decode differs in two cases made for extremes, the
# same two as in vLLM's process.
#
# ## Every pool of DeepSeek-V4
#
# A tiny DeepSeek-V4 on the same engine and transfer: four layers (window, c4, c128, c4; c4 and c128 compress 4 and 128 tokens
# into one entry). The prompt has 1,100 tokens, so its last group of 128 and its last page of 256 are incomplete. Guess how
# many entries its c128 pool holds.


# %%
def judged(there: pages.Dump, here: pages.Dump) -> tuple:
    """What the decode side's bytes are taken for, and how many findings they and the comparison give."""
    alone = pages.diagnose(there.raw, there.layout, there.page_tokens, live=there.live)
    kind = pages.identify(there.raw.flatten()).iloc[0]["layout"]
    findings = len(alone) + len(pages.compare_dumps([here], [there]))
    return there.pool, kind, there.page_tokens, there.raw.shape[1], there.entries, findings


# %%
both = zip(side("v4/decode-*.bin"), side("v4/prefill-*.bin"), strict=True)
names = ["pool", "recognised_as", "entries_a_page", "page_bytes", "live_entries", "findings"]
v4 = pd.DataFrame([judged(there, here) for there, here in both], columns=names)
workbook.tables.table(v4, "DeepSeek-V4's pools on the decode side")

# %%
assert set(v4["pool"]) == {"window", "c4", "c128", "index"} and v4["findings"].sum() == 0
assert v4.set_index("pool")["live_entries"].to_dict() == {"c128": 8, "c4": 275, "index": 275, "window": 332}

# %% [markdown]
# Eight entries for 1,024 tokens; the other 76 tokens are held in the compressor's state, which a pair must move as well. The
# states hold plain numbers, so only their digests are compared, as are all layers of all pools, for this prompt and for a
# second one of 3,000 tokens.

# %%
digests = json.loads((bundle.evidence / "v4-digests.json").read_text())
same = {
    f"{request} {pool}": one["prefill"] == one["decode"]
    for request, pools in digests.items()
    for pool, one in pools.items()
}
assert all(same.values()) and len(same) == 28 and sum("state" in name for name in same) == 10
print(f"{sum(same.values())} of {len(same)}")

# %% [markdown]
# ## What we found

# %%
print(
    f"SGLang's pair equals its single server exactly while prompt and answer fit {budget:,} tokens; beyond, no arm equals "
    "even itself. "
    f"Its pages arrive whole: {len(sent)} pools of DeepSeek-V3.2 compared entry by entry, and of DeepSeek-V4, whose pools were "
    f"compared by digest, {sum(same.values())} of {len(same)}."
)

# %% [markdown]
# ## What would change our mind
#
# * A trained model, which gives little attention to keys at the edge of the budget: the noise beyond it would shrink.
# * Answers of the V4 pair by length, which were not recorded: of its prompts of 1,100 and 3,000 tokens one token each was
#   compared, and was equal; at 129 tokens the single server (random weights) died of an illegal instruction.
# * Pages of several requests under load: each dump here is of one request on an idle server.
#
# ## Next
#
# This is the last notebook. To ask your own deployment: *Point it at your own deployment* in the README. To ask an engine with
# known answers: `docs/checkpoint.md`.
