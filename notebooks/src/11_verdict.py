# %% [markdown]
# # Reach a verdict
#
# Which hypotheses are left, what would change our mind, and what is the next decisive test?
#
# **You will do**: read every recorded run of the incident, let the diagnosis rank twenty fault classes and five
# lookalikes, enter each result into the ledger, and write the text that a maintainer needs.
#
# **You will learn**: why a verdict names what it did not measure, and what "strong evidence" from outside can not prove.
#
# **You need**: nothing for the recorded incident. With a live target the notebook measures a small battery first.

# %% [markdown]
# ## Start

# %%
import json
import os

from needlework import analysis, probes, workbook

start = workbook.start("Reach a verdict")

# %% tags=["parameters"]
incident = "context-loss"  # a folder under data/incidents
target = "recorded"  # every recorded run; or lab:combined,pd:healthy, lab:combined,pd:F13, a=http://…,b=http://…
lengths = (1024, 3584, 4608, 6144)  # prompt tokens, for a live target
depths = (0.1, 0.6, 0.75, 0.9)
seed = 0

# %%
bundle = workbook.incident(incident)
settings = bundle.settings.get("incident", {})
symptom = settings.get("symptom", "not recorded")
print(symptom)

# %% [markdown]
# ## Gather the trials
#
# One row a request, whichever instrument sent it. Runs are joined by the identity of the trial, so a trial that two runs
# share counts once.

# %%
target = os.environ.get("NEEDLEWORK_TARGET") or target
if target == "recorded":
    tables = {name: analysis.load_trials(bundle.run(name)) for name in bundle.run_names}
else:
    with workbook.open_target(target, incident=bundle) as opened:
        measured = probes.compare_arms(
            opened.arms, lengths=lengths, depths=depths, repeats=1, cache=("cold", "warm"), seed=seed
        )
    tables = {"live": measured.trials}
trials = analysis.concat(tables.values())
assert len(trials), "no run is recorded for this incident; set the target to a live one"

# %%
overview = trials.assign(hit=analysis.hits(trials)).groupby(["run", "probe", "arm", "cache"], dropna=False)["hit"]
rows = overview.agg(trials="size", measured="count", hits="sum").reset_index()
workbook.tables.table(rows, "What was measured")

# %% [markdown]
# A trial that measured nothing (cut by a budget, lost on the way) is in the first count and not in the second. It is never a
# miss.
#
# ## Guess first
#
# Before the next cell: which class would you name, and which two could you not tell apart from outside? Write both down.
#
# ## Ask the diagnosis
#
# Each class of fault says how often a feature is there when it is the cause (`analysis.SIGNATURES`). A feature that the
# table can not show counts neither way. Lookalikes (truncation, batch rounding, the harness, a vacuous detector, the
# checkpoint) stand in the same ranking.

# %%
geometry = {"topk": 512, "ratio": 4, "window": 128, "page": 64, "chunk": 2048}  # as deployed, see 01_collect_evidence
diagnosis = analysis.diagnose(trials, {"config": geometry})
diagnosis

# %%
ranking = diagnosis.table().head(5)[["code", "title", "posterior", "for", "against"]]
workbook.tables.table(ranking, "The five most likely causes, with what speaks for and against each")

# %% [markdown]
# The shares add to one over the classes on the list. A cause that nobody has described yet is not on the list, so a share is
# no probability of being right: it says how the listed classes compare.

# %%
shares = [ranked.posterior for ranked in diagnosis.ranked]
assert abs(sum(shares) - 1) < 1e-9 and diagnosis.verdict in {"healthy", "named", "two causes", "not proven"}
assert len(diagnosis.ranked) == 26

# %% [markdown]
# ## Add what was seen inside
#
# The incident's bundle holds page dumps of one request from both sides of the transfer. Each names its buffer and digests its
# content. A side buffer that differs while the main one is equal separates two causes that look alike from outside: guess
# which two.

# %%
digests = {}
for sent in sorted(bundle.pages.glob("prefill-*.json")) if target == "recorded" else []:
    received = sent.with_name(sent.name.replace("prefill", "decode", 1))
    digests[sent.stem.removeprefix("prefill-")] = (
        json.loads(sent.read_text())["digest"] == json.loads(received.read_text())["digest"]
    )
print(", ".join(f"{name}: {'equal' if same else 'differs'}" for name, same in digests.items()) or "no dumps here")

# %%
outside = diagnosis
diagnosis = analysis.diagnose(trials, {"config": geometry, "digests": digests})
diagnosis

# %%
before, after = outside.ranked[0], diagnosis.ranked[0]
print(f"from outside: {before}; with the inside: {after}")
assert not digests or before.code == after.code or "differs" in str(after.supporting), "inside and outside disagree"

# %% [markdown]
# ## Keep the ledger
#
# The ledger holds what was believed before, what each run says, and which run clears whom. The kernels and page checks of
# the other notebooks enter here by their result; this notebook enters what the trials alone can clear.

# %%
book = analysis.Ledger(incident, symptom=symptom, deployment={"config": geometry, "version": settings.get("engine")})
suspects = {"F01": 0.1, "F04": 0.1, "F05": 0.15, "F09": 0.15, "F13": 0.15, "F14": 0.15}
for code, prior in suspects.items():
    book = book.suspect(code, analysis.BY_CODE[code].title, prior)

# %% [markdown]
# A class is cleared by a run only when the run *could* have shown it: the feature that the class brings nine times in ten
# was looked for, and is not there.

# %%
for code in suspects:
    for name, feature in diagnosis.features.items():
        if feature.presence == 0 and analysis.BY_CODE[code].odds(name) >= 0.85 and code not in diagnosis.causes:
            book = book.record("all runs", name.replace("_", " "), feature.text, exonerates=[code])
book = book.conclude(diagnosis)
book

# %%
workbook.tables.table(book.exonerated(), "Cleared, and by what")

# %% [markdown]
# ## The next decisive test
#
# A good test is one on which the remaining hypotheses disagree. Its expected outcome is written down before it is run.

# %%
for test in diagnosis.next_tests[:3]:
    print("-", test)

# %% [markdown]
# ## Hand it on
#
# Maintainers ask first for version, exact command, effective configuration, what one flag at a time changes, and a script. The
# text below has a place for each; what is not recorded says so. Addresses and keys are taken out.

# %%
text = book.issue_text()
print(text[:700])
assert all(part in text for part in ("**Version.**", "**Exact command.**", "**One flag at a time.**", "**Script.**"))

# %% [markdown]
# ## What we found

# %%
causes = [r for r in diagnosis.ranked if r.code in diagnosis.causes]
workbook.summary(
    symptom=symptom,
    verdict=str(diagnosis).split("\n", 1)[0],
    evidence=[e.text for r in causes for e in r.supporting[:4]] or ["no feature of any class stands out"],
    confidence=diagnosis.confidence,
    next_step=str(diagnosis.next_tests[0]),
)

# %% [markdown]
# The verdict is computed from the runs above, with its numbers. From outside it ranks causes and does not prove one: proof is a
# page that differs across the transfer, or a flag that heals, and those are the tests it names.
#
# ## What would change our mind
#
# * A run in the list of what was not measured that shows one of its features.
# * A/A pairs that differ: then the difference between arms must exceed that noise first.
# * An inside finding that contradicts the outside one: buffers that all arrive whole, while the split arm still misses.

# %%
print("\n".join(diagnosis.missing) or "every instrument was used")
