# %% [markdown]
# # Reproduce the symptom
#
# Can we make it forget? Follow-up turns, an interruption, and coherent text that remembers nothing.
#
# **You will do**: tell a fact in one turn and ask for it in a later one, interrupt a request, and measure how coherent the
# text is while recall fails.
#
# **You will learn**: why a coherence check passes on a deployment that forgets, and why asking again may hide the failure.
#
# **You need**: nothing for the default target.

# %% [markdown]
# ## Start

# %%
import contextlib

import pandas as pd
from needlework import analysis, probes, workbook

start = workbook.start("Reproduce the symptom")

# %% tags=["parameters"]
incident = "context-loss"  # a folder under data/incidents
target = "lab"  # lab, lab:combined,pd:healthy, vllm, http://…, a=http://…,b=http://…, or recorded:<run>
short, long, depth = 1024, 6144, 0.6  # first turns of two sizes in tokens, and the fact's place in them
repeats = 1
run = ""  # folder for the journal: a run that was stopped goes on from it
seed = 0

# %%
bundle = workbook.incident(incident)
session = contextlib.ExitStack()
opened = session.enter_context(workbook.open_target(target, incident=bundle))
opened

# %% [markdown]
# The report of the incident says: *single turns read well; a follow-up on a long conversation is answered as if nothing
# had been said.* The arm that users talked to is the last one of the target.

# %%
arm = list(opened.arms)[-1]
endpoint = opened.arms[arm]
print(f"examined arm: {arm}")

# %% [markdown]
# ## Tell, talk, ask
#
# Three shapes of conversation: a fact, then the question (`tell_ask`); the same with small talk in between
# (`tell_talk_ask`); and the shape of the incident, where a long piece of work is interrupted and the next message is
# "To a file." (`interrupted`). Each is played twice: turn by turn, as a chat does (`continue`), and as one cold request
# with the same messages (`resend`), as an agent does after its cache was evicted.
#
# Guess: will a short first turn be remembered? A long one? In both forms?

# %%
options = {"arm": arm, "depth": depth, "repeats": repeats, "seed": seed}
talks = {n: probes.turns(endpoint, run or None, length=n, **options) for n in (short, long)}
for n, talk in talks.items():
    print(f"first turn of {n:,} tokens. {talk}")

# %%
by_shape = pd.concat([talk.table.assign(first_turn=n) for n, talk in talks.items()])
columns = ["first_turn", "shape", "mode", "hits", "measured", "low", "high", "cached_tokens"]
workbook.tables.table(
    by_shape[columns], "Follow-up questions: hits with their 95 % interval", formats={"low": "{:.2f}", "high": "{:.2f}"}
)

# %% [markdown]
# Read the rows in pairs. `continue` and `resend` are the same messages; what differs is `cached_tokens`. Where one form
# is answered and the other is not, the model can read the text, and the loss depends on how the cache was filled.

# %%
counts = by_shape.groupby(["first_turn", "mode"])[["hits", "measured"]].sum()
fig = workbook.figures.heat_map(
    (counts["hits"] / counts["measured"]).unstack("mode"), value="remembered", limits=(0, 1), fmt="{:.2f}"
)
workbook.figures.show(
    fig,
    alt="Share of follow-up questions that were answered, by size of the first turn and by form: "
    + ", ".join(f"{n:,} tokens, {mode}: {int(r.hits)} of {int(r.measured)}" for (n, mode), r in counts.iterrows()),
)

# %% [markdown]
# ## The interruption itself
#
# Is it the interruption that breaks the session? Requests are dropped during prefill and during decoding; then a bystander
# that ran beside each, the same prompt again, and a fresh prompt are graded. They have 2,048 tokens:
# where this arm answers such prompts without an interruption, a miss is the interruption's doing.

# %%
interrupted = probes.abort(
    endpoint, run or None, stages=("prefill", "decode"), rounds=1, length=2048, arm=arm, seed=seed
)
interrupted

# %% [markdown]
# What do two of two allow?

# %%
allowed = 1 - analysis.wilson(2, 2).low
assert round(allowed, 2) == 0.66
print(f"2 of 2 found is compatible with harm in up to {100 * allowed:.0f} % of the interruptions")

# %% [markdown]
# So two rounds clear nothing. The table above tells more: `tell_ask` has no interruption, and where it loses the same fact
# the interruption is not needed for the loss. To exclude that one interruption in six does harm takes twenty rounds
# (`rounds=20`).

# %% [markdown]
# ## Coherent text proves no recall
#
# A common health check is coherence: the ratio of a text's size to its compressed size. A loop compresses well (ratio above
# four), prose does not. Now the same notes serve both: the model writes free text about them, and is asked
# for the fact.

# %%
check = probes.coherence(endpoint, run or None, lengths=(short, long), repeats=2, depth=depth, arm=arm, seed=seed)
workbook.tables.table(
    check.table,
    "Coherence beside recall on the same notes",
    formats=dict.fromkeys(("gzip_ratio", "low", "high"), "{:.2f}"),
)

# %%
loops, texts = int(check.table["loops"].sum()), int(check.table["texts"].sum())
assert 0 <= loops <= texts <= 4
print(f"{loops} of {texts} texts are loops. {check}")

# %% [markdown]
# Coherence is a statement about the last few words; recall is one about
# the whole prompt. The first says nothing about the second.

# %% [markdown]
# ## A real engine, healthy
#
# What do the same questions say where nothing is lost? They were put to vLLM with DeepSeek-V3.2's sparse attention on one
# H200, one server and a prefill/decode pair, with the checkpoint whose right answers are known
# ([13_known_answers](13_known_answers.ipynb)); first turns of 1,024 and of 16,384 tokens. The trials are read back, nothing
# is sent. Guess: how many of 48 follow-ups are lost, and how many of 40 interruptions leave harm behind?

# %%
real = probes.Recorded(workbook.root() / "data/checkpoint/vllm/runs/02_reproduce_symptom")
told = {
    (one, n): probes.turns(real, length=n, depth=0.6, repeats=2, arm=one).table
    for one in ("combined", "pd") for n in (1024, 16384)
}  # fmt: skip
kept = pd.concat(told, names=["arm", "first_turn"]).groupby(["arm", "first_turn", "mode"])
kept = kept.agg(remembered=("hits", "sum"), asked=("measured", "sum"), cached_tokens=("cached_tokens", "max"))
workbook.tables.table(kept.reset_index(), "vLLM on an H200: follow-ups remembered, continued and re-sent")

# %%
dropped = {
    one: probes.abort(real, stages=("prefill", "decode"), rounds=10, length=16384, depth=0.6, arm=one)
    for one in ("combined", "router")  # the pair through vllm-router, which passes a broken connection on
}
texts = [probes.coherence(real, lengths=(1024, 16384), repeats=2, depth=0.6, arm=one) for one in ("combined", "pd")]
print(*(f"{one}: {result}" for one, result in dropped.items()), sep="\n")

# %%
assert kept["remembered"].sum() == kept["asked"].sum() == 48
assert kept.xs("resend", level="mode")["cached_tokens"].eq(0).all(), "a re-sent conversation was not cold"
assert kept.xs("continue", level="mode")["cached_tokens"].tolist() == [1024, 16384] * 2
for result in dropped.values():
    rows = result.table[result.table["role"] != "calm"]
    assert (result.details["aborted"], rows["hits"].sum(), rows["measured"].sum()) == (20, 60, 60)
    assert result.details["stuck"] == 0 and not result.details["dishonest"]
assert round(1 - analysis.wilson(20, 20).low, 2) == 0.16 and all(one.verdict == "healthy" for one in texts)

# %% [markdown]
# None and none. All 48 are remembered, warm and cold, and after 20 interruptions of each arm all 60 bystanders, fresh
# prompts and repeats are answered; 20 of 20 still allow harm in up to 16 % of interruptions. So neither a long prompt, nor
# a split, nor a dropped request has to lose anything: a deployment that does has something to explain.

# %% [markdown]
# ## What we found

# %%
failed = {n: talk.table[(talk.table["hits"] == 0) & (talk.table["measured"] > 0)] for n, talk in talks.items()}
lost = {n: rows for n, rows in failed.items() if len(rows)}
stray = sum(int((talk.table["measured"] - talk.table["hits"]).sum()) for talk in talks.values())
if short in lost:
    verdict = f"{arm} forgets even a first turn of {short:,} tokens: look at the harness and the chat template first."
elif lost:
    modes = sorted({mode for rows in lost.values() for mode in rows["mode"]})
    verdict = (
        f"Reproduced on {arm}: with a first turn of {', '.join(f'{n:,}' for n in lost)} tokens the fact is lost when the "
        f"messages are {' and '.join({'continue': 'continued', 'resend': 're-sent cold'}[m] for m in modes)}."
    )
elif stray or not all(talk.table["measured"].sum() for talk in talks.values()):
    verdict = f"Not proven: {stray} follow-ups were missed on {arm}, and no shape is lost throughout."
else:
    word = "" if loops or interrupted.verdict == "finding" else "Healthy: "
    verdict = f"{word}{arm} remembers the first turn at both lengths and in both forms."
if interrupted.verdict == "finding":
    verdict += f" The interruption does harm of its own: {interrupted}"
if loops:
    verdict += f" {loops} of {texts} texts are loops as well: look at what the cache holds."
print(verdict)

# %%
session.close()
assert (
    verdict.startswith("Healthy") == (not stray and not loops and interrupted.verdict != "finding")
    or not by_shape["measured"].all()
)

# %% [markdown]
# ## What would change our mind
#
# * A short first turn that is forgotten as well: then length is not the matter, and the chat template is the first suspect.
# * Bystanders or follow-ups that fail after an interruption: then the lifetime of pages is.
# * Loops in the text: then numbers in the cache are broken, which is another class of fault.
#
# ## Next
#
# [03_recall_vs_length](03_recall_vs_length.ipynb): where does recall fall, and how sharply?
