# %% [markdown]
# # Hold sparse decode against one plain softmax
#
# Does sparse decode, split and merged, match the reference?
#
# **You will do**: read an entry by hand, check the decode kernels over holes, sinks, two caches and two layouts, and split a softmax.
#
# **You will learn**: the three conventions of log-sum-exp that public kernels use, and what a hole in the index list can do.
#
# **You need**: nothing. Without a GPU the Triton kernels run in the interpreter.

# %% [markdown]
# ## Start

# %%
import pandas as pd
import torch
from needlework import workbook
from needlework.kernels import candidates, check, needles, reference, verdicts
from needlework.kernels.check.cases import DecodeCase
from needlework.pages import LAYOUTS
from needlework.workbook import kernel_figures

start = workbook.start("Hold sparse decode against one plain softmax")

# %% tags=["parameters"]
candidate = "triton"  # a name, or "path/to/your_kernel.py:function"
merger = "triton"
sweep_tokens = [1024, 4096, 16384, 65536, 262144]

# %% [markdown]
# ## The formula
#
# Over the selected entries $j$; each $k_j$ is read once and serves as key and as value:
#
# $$\ell = \ln \sum_j e^{\,\sigma\, q \cdot k_j}, \qquad o = \frac{1}{1 + e^{\,b - \ell}} \sum_j e^{\,\sigma\, q \cdot k_j - \ell}\; k_j$$
#
# $b$ is the head's *sink*: it takes weight and gives nothing. $\ell$ is the log-sum-exp, here with the natural logarithm and
# without the sink.

# %%
workbook.source(reference.sparse_mla_decode)

# %% [markdown]
# ## The addresses
#
# A page of 64 V4 entries: 576 data bytes an entry (448 fp8 numbers, 64 bf16 numbers), and *after all of them* 8 scale bytes an entry. The public tensor shape
# says 584 bytes an entry. Guess where the scales of entry 9 start, and where the shape would look for them.

# %%
layout = LAYOUTS["v4-mla-fp8"]
scales_at = 64 * 576 + 9 * 8
shape_says = 9 * 584 + 576
workbook.tables.table(
    pd.DataFrame(layout.byte_map(64)[-4:], columns=["field", "first byte", "end"]), "The end of the page"
)

# %%
assert int(layout["scales"].address(64)[9, 0]) == scales_at == 36_936 and shape_says == 5_832
assert layout.page_bytes(64) == 37_440

# %% [markdown]
# Byte 36,936, not 5,832: no 584 bytes of one entry lie together. Now one entry by hand, tile by tile:

# %%
value = torch.randn(1, 512, generator=torch.Generator().manual_seed(2))
pool = torch.full((2, 37_440), 0xFF, dtype=torch.uint8)
layout.scatter(pool, torch.tensor([64 + 9]), value)
page = pool[1]
codes = page[9 * 576 : 9 * 576 + 448].view(torch.float8_e4m3fn).float()
steps = 2.0 ** (page[scales_at : scales_at + 7].float() - 127)
by_hand = (codes.reshape(7, 64) * steps[:, None]).flatten()
assert torch.equal(by_hand, layout.gather(pool, torch.tensor([64 + 9]))[0, :448])
assert float((by_hand - value[0, :448]).abs().max()) < 0.15

# %% [markdown]
# ## The check
#
# Every byte outside the selected entries holds NaN, page 0 included. Guess what a kernel returns that reads a hole ($-1$) as page 0 and multiplies it by a
# weight of zero.

# %%
result = check(candidate, "sparse_mla_decode", size="small", device="cpu")
shown = result.table[["case", "status", "norm_error", "worst"]]
workbook.tables.table(shown, f"{result.candidate} against the reference", formats={"norm_error": workbook.tables.power})

# %%
assert result.passed, str(result)
assert set(result.table["status"]) <= {"ok", "refused"}

# %% [markdown]
# No case fails; a layout that a kernel does not claim to read may be refused, and is listed as such. (The answer: NaN in every channel, because
# $0 \cdot \mathrm{NaN}$ is NaN.)

# %% [markdown]
# ### Every other kernel
#
# `sglang-sm120-triton` is the very file the incident's kernels were copied from. Where it is installed it runs here in the interpreter, on few heads.

# %%
few = [DecodeCase("random", 1, heads=4, keys=64, batch=1), DecodeCase("holes", 2, heads=4, keys=64, batch=2, holes=0.4),
       DecodeCase("sink", 3, heads=4, keys=64, batch=1, sink="random"),
       DecodeCase("two caches", 4, heads=4, keys=64, batch=1, extra_keys=64, sink="random")]  # fmt: skip
workbook.tables.table(verdicts("sparse_mla_decode", few, skip=[candidate]), "Other decode kernels")

# %% [markdown]
# ## Split and merge
#
# A long index list is cut into parts, each part gets its own softmax, and the parts are merged by their log-sum-exp. The result must not depend on
# the number of parts. Below: the same entries in 1 to 64 parts, merged by the kernel, against one softmax in float64.

# %%
laid = needles.lay_out(needles.plant(8192, seed=3))
picked = reference.select_topk(laid.scores(), laid.length, 512, laid.table)
whole, level = reference.sparse_mla_decode(laid.ask, laid.latent_pool, picked, softmax_scale=40.0, dtype=torch.float64)
merge = candidates.load(merger).functions["merge_partials"]
rows = []
for parts in (1, 2, 3, 8, 33, 64):
    outs, lses = reference.sparse_mla_partials(laid.ask, laid.latent_pool, picked, parts, softmax_scale=40.0)
    out, lse = merge(outs, lses)
    rows.append((parts, float((out - whole).norm() / whole.norm()), float((lse - level).abs().max())))
split = pd.DataFrame(rows, columns=["parts", "output, norm error", "log-sum-exp, largest error"])
workbook.tables.table(split, "Parts do not matter", formats=dict.fromkeys(split.columns[1:], "{:.1e}"))

# %%
assert split.iloc[:, 1:].max().max() < 1e-4
merged = check(merger, "merge_partials", size="small", device="cpu")
assert merged.passed, str(merged)

# %% [markdown]
# ### Three conventions of one number
#
# Merging works only if both sides mean the same log-sum-exp. FlashMLA leaves the sink out and marks an empty row with $+\infty$; the sm_120 Triton file counts the
# sink in and marks it with $-\infty$; the torch fallback leaves it out and marks it with $-\infty$. What does a mix-up cost? Two parts, one of them reported with its sink:

# %%
outs, lses = reference.sparse_mla_partials(laid.ask, laid.latent_pool, picked, 2, softmax_scale=40.0)
sink = torch.full((4,), float(level.mean()))
mixed = torch.stack((torch.logaddexp(lses[0], sink), lses[1]))
wrong, _ = reference.merge_partials(outs, mixed)
cost = float((wrong - whole).norm() / whole.norm())
in_log2, _ = reference.merge_partials(outs, lses * 1.4426950408889634)
cost_log2 = float((in_log2 - whole).norm() / whole.norm())
costs = {"sink inside one part": cost, "base 2 read as natural": cost_log2}
mixups = pd.DataFrame({"mix-up": list(costs), "output error": [f"{100 * c:.0f} %" for c in costs.values()]})
workbook.tables.table(mixups, "What a mix-up of conventions costs")

# %%
assert cost > 0.02 and cost_log2 > 0.02

# %% [markdown]
# Neither crashes, neither gives NaN, and both shift every output by more than two percent.

# %% [markdown]
# ## A kernel that is broken on purpose
#
# This one reads a hole as slot 0 and gives it weight zero *afterwards*.


# %%
def hole_times_zero(q, pool, indices, **more):
    out, lse = reference.sparse_mla_decode(q, pool, indices, **more)
    page = LAYOUTS[more.get("layout", "v4-mla-fp8")].gather(pool, indices.clamp_min(0), more.get("page_tokens", 64))
    nothing = torch.where((indices >= 0)[..., None], 0.0, 0.0 * page[..., :512]).sum(1)
    return out + nothing[:, None], lse


caught = check(hole_times_zero, "sparse_mla_decode", size="small", device="cpu")
workbook.tables.table(caught.failures[["case", "detail"]], "Where 0 times NaN is seen")

# %%
assert caught.passed is False
assert caught.failures["case"].str.contains("holes").any()

# %% [markdown]
# With finite garbage in page 0 this kernel is right to the last bit, so a test on random pages passes it. In a deployment it fails when the reserved page happens to
# hold a NaN: after a dummy run, at one pool size, on one restart.

# %% [markdown]
# ## From 1,024 to 262,144 tokens
#
# The reference, through pages, over the whole range: the needle's entry is selected and its value read back. Guess whether a
# longer text makes the *decode* step harder.

# %%
rows = []
for tokens in sweep_tokens:
    found = [
        needles.look_up(needles.plant(tokens, strength=1.0, depth=d, seed=s)) for s, d in ((1, 0.1), (2, 0.5), (3, 0.9))
    ]
    rows.append(
        (tokens, tokens // 4, max(f.rank for f in found), sum(f.kept for f in found), sum(f.right for f in found))
    )
reach = pd.DataFrame(rows, columns=["tokens", "entries", "worst rank", "kept of 3", "answered of 3"])
workbook.tables.table(reach, "A strong needle, looked up through pages")

# %%
assert (reach["answered of 3"] == reach["kept of 3"]).all()
assert (reach["worst rank"] <= 512).all() and (reach["answered of 3"] == 3).all()

# %% [markdown]
# It does not: decode always reads at most 512 entries. Only selection sees the length.

# %% [markdown]
# ## What was recorded on a GPU
#
# Three tables: the times, the check, and one kernel taken apart. In the first, *ours/this* below 1 means that our twin is
# faster, *bar* is the ratio that was aimed at, and *of copy* the bandwidth as a share of what a plain copy reaches. B counts
# rows, K the entries that each reads.
#
# In the second, vLLM's kernel for Intel cards (`vllm-sparse-mla`) fails where a row has no entry at all: it divides zero by
# zero, where the reference and FlashMLA return zeros. A kernel may be launched in one way for few rows and in another for
# many, so a check of few rows says nothing about many. On this card our twin switches between 16 and 17 rows of V4 pages and
# keeps its wide blocks for V3.2 pages; its full check has rows on both sides, up to 64, also under graph replay and on a
# second stream. The twin refuses V4.1 pages, FlashMLA refuses those and 16 heads; both agree in every other case.
#
# The third asks why our twin takes 1.67 times as long as FlashMLA at 64 rows of V3.2 pages (1.70 when this table was
# recorded). One part at a time was left out or written differently. No part alone costs more than 12 percent: our twin reads,
# converts and multiplies in turn, in the one program that fits on a multiprocessor, where FlashMLA lets groups of warps do
# them at the same time. Of the rewrites in Triton that give the right answer, none was faster by even one percent.

# %%
gpu, setting = kernel_figures.recorded_gpu("sparse_mla_decode")
print(setting)
kernel_figures.gpu_table(gpu) if len(gpu) else None

# %%
checked = kernel_figures.recorded_checks("sparse_mla_decode")
said = checked[checked["size"] == "full"].set_index("candidate")["verdict"]
assert said["triton"] == "triton agrees with the reference of sparse_mla_decode in 45 cases, 1 refused"
assert said["flash_mla"] == "flash_mla agrees with the reference of sparse_mla_decode in 44 cases, 2 refused"
workbook.tables.table(checked, "Recorded: the same check on a GPU, graph replay and a second stream included")

# %%
changed = kernel_figures.recorded_ablation("v32")
first = changed[changed["change"] == "as it is"].set_index("run")["median_us"]
share = changed["median_us"] / changed["run"].map(first)
assert changed.loc[changed["change"] == "as it is", "over_flash_mla"].round(2).eq(1.7).all()
assert share.min() > 0.88 and share[changed["output"] == "right"].min() > 0.99
assert gpu.set_index(["shape", "kernel"]).loc[("v32 B64 K2048", "flash_mla"), "ours_over_this"] == 1.67
workbook.tables.table(changed, "Recorded: V3.2 decode, 64 rows of 2,048 entries, one change at a time",
                      formats={"median_us": "{:.1f}", "over_flash_mla": "{:.2f}"})  # fmt: skip

# %% [markdown]
# ## What this check cannot see

# %%
open_topics = result.coverage[~result.coverage["covered"]][["topic", "how"]]
workbook.tables.table(open_topics, "Not covered by the run above")

# %%
assert open_topics["topic"].str.contains("what the engine hands the kernel").any()

# %% [markdown]
# ## What we found
#
# * Decode agrees with one plain softmax over holes, sinks, limits, two caches and two layouts, in any number of parts.
# * A mix-up of log-sum-exp conventions costs more than two percent of the output in silence.
# * Decode does not see the length of the text: a strong needle is answered up to 262,144 tokens.
#
# ## What would change our mind
#
# A failing row for the deployed file, above all under graph replay with other lengths, which needs the card.
#
# ## Next
#
# [09_precision](09_precision.ipynb): do bf16 mHC, routed scaling and fp8 scales cost recall?
