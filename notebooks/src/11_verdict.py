# %% [markdown]
# # Reach a verdict
#
# Which hypotheses are left, what would change our mind, and what is the next decisive test?
#
# **You will do**: read every recorded run of the incident, let the diagnosis rank twenty fault classes and five
# lookalikes, enter each result into the ledger, and write the text that a maintainer needs.
#
# **You will learn**: why a verdict names what it did not measure, and what "strong evidence" from outside cannot prove.
#
# **You need**: nothing for the recorded incident. With a live target the verdict first asks prompts of its own.

# %% [markdown]
# ## Start

# %%
import os
import re

import pandas as pd
from needlework import analysis, probes, workbook

start = workbook.start("Reach a verdict")

# %% tags=["parameters"]
incident = "context-loss"  # a folder under data/incidents
target = "recorded"  # every recorded run; or lab:combined,pd:healthy, http://…, a=http://…,b=http://…
requests = 160  # at most, to a live target, beside what other notebooks of this run have measured
window = 8192  # longest prompt in tokens, for a live target; 0: as long as it states, within `tokens`
tokens = 1_000_000  # prompt tokens that a live target may be sent in all
constants = {}  # what the deployment does not tell of itself, such as {"topk": 512, "ratio": 4}
ledger_file = ""  # keep the ledger here, such as data/incidents/NAME/ledger.json
seed = 0

# %%
bundle = workbook.incident(incident)
target = os.environ.get("NEEDLEWORK_TARGET") or target
live = target != "recorded"
symptom = bundle.settings.get("incident", {}).get("symptom", "not recorded")
symptom = "not recorded: this deployment was measured, nobody reported on it" if live else symptom
print(symptom)

# %% [markdown]
# ## Gather the trials
#
# One row a request, whichever instrument sent it: of the incident every recorded run, of a live target what the other
# notebooks of this run have measured on it. Runs are joined by the identity of the trial, so a trial that two runs share
# counts once, and nothing is asked twice.

# %%
folders = workbook.measured() if live else [bundle.run(name) for name in bundle.run_names]
known = analysis.concat([analysis.load_trials(folder) for folder in folders])
print(f"{len(known)} trials are known" + (f", of {', '.join(f.stem for f in folders)}" if folders else ""))

# %% [markdown]
# One arm alone can show that something is lost and where; only two tell whether the split has a part in it. On a live target
# the verdict now asks for itself: a screen at random over all lengths, places and states, then the prompts that tell most,
# and last, fresh prompts whose answers were foretold. `needlework diagnose combined=http://…,pd=http://… --run FOLDER` does
# the same without notebooks.

# %%
stated = workbook.deployed(bundle)
journals = [] if live else [probes.Recorded(folder).journal for folder in folders]
foretold = [record for journal in journals for record in journal.records]
if live:
    with workbook.open_target(target, incident=bundle) as opened:
        stated = workbook.deployed(bundle, opened)
        found = probes.investigate(
            opened.arms, requests=requests, window=window or None, tokens=tokens, known=known, seed=seed,
            stated={**stated.config, **constants},
        )  # fmt: skip
    known, foretold = found.trials, found.records
    longest = int(found.trials["prompt_tokens"].max())
    limit = stated.config.get("context_limit")
    print(*(f"- {why}" for why in found.plan), f"{found.ended[:1].upper()}{found.ended[1:]}.", sep="\n")
    print(f"longest prompt: {longest:,} tokens; stated window: {f'{limit:,}' if limit else 'none'}")

# %%
workbook.need(len(known), "no run is recorded for this incident; set the target to a live one")
planted = [] if live else bundle.settings.get("recorded", {}).get("faults", [])
workbook.need(
    not planted, f"the runs of {bundle.name} hold planted faults ({', '.join(planted)}) and answers of random weights: "
    "they calibrate instruments and are no case to judge; notebooks 12 to 14 read them"
)  # fmt: skip
trials = known
overview = trials.assign(hit=analysis.hits(trials)).groupby(["run", "probe", "arm", "cache"], dropna=False)["hit"]
rows = overview.agg(trials="size", measured="count", hits="sum").reset_index()
workbook.tables.table(rows, "What was measured")

# %%
workbook.trials(trials, "All trials")

# %% [markdown]
# A trial that measured nothing (cut by a budget, lost on the way) is in the first count and not in the second. It is never a
# miss. Of every four `control` rows one asks for a fact that was never given: there a refusal is right, and is no hit.
#
# ## What is deployed
#
# An edge means something only beside the constants of *this* deployment. They are read from what it says of itself, or
# from what was collected; what nobody told stays *not known*, and can be set in the parameters.

# %%
geometry = {**stated.config, **constants}
workbook.tables.table(stated.table(), "What the deployment says of itself")

# %% [markdown]
#
# ## Guess first
#
# Before the next cell: which class would you name, and which two could you not tell apart from outside? Write both down.
#
# ## Ask the diagnosis
#
# A *law* says which requests are lost: those above a length, those whose value lies beyond a token, every second prefill
# pass, warm ones, one arm's. Inside the law's set requests are lost at an unknown rate, outside it only by lapses. How well
# each law explains all trials has a closed form (`docs/verdict.md` follows one with a pencil). A class of fault is then as
# likely as the laws by which it loses. Lookalikes (truncation, batch rounding, the harness, a vacuous detector, the
# checkpoint) are ranked with the faults.

# %%
diagnosis = analysis.diagnose(trials, {"config": geometry}, predictions=foretold)
diagnosis

# %% [markdown]
# The laws race on these trials. A share counts all values of a law's parameters, so a law with more freedom pays for it.

# %%
race = pd.DataFrame([{"law": law.name, "what is lost": law.sentence, "share": law.share} for law in diagnosis.laws])
percent = {"share": lambda share: f"{100 * share:.1f} %"}
workbook.tables.table(race.head(5), "The laws that explain these trials best", formats=percent)

# %%
ranking = diagnosis.table().head(5)
bounds = {"posterior": lambda share: f"{100 * share:.0f} %"}
workbook.tables.table(ranking[["code", "title", "posterior", "laws"]], "The likeliest causes", formats=bounds)

# %% [markdown]
# Classes that lose by the same law cannot be told apart from outside: they are named as a group, with what would tell them
# apart. The share of *open* is that of causes which nobody has described yet.
#
# What is *not* excluded is part of the answer: for each condition, how many trials were asked and which loss rate they
# still allow.

# %%
limits = {"bound": lambda share: f"{100 * share:.0f} %"}
workbook.tables.table(diagnosis.bounds(), "What was looked at", formats=limits)

# %%
shares = [ranked.posterior for ranked in diagnosis.ranked]
assert abs(sum(shares) - 1) < 1e-6 and diagnosis.verdict in {"healthy", "named", "two causes", "not proven"}
assert len({ranked.code for ranked in diagnosis.ranked}) == len(shares)

# %% [markdown]
# ## Add what was seen inside
#
# A bundle may hold page dumps of one request from both sides of the transfer. Each names its buffer and digests its
# content. If a side buffer (here the index keys) differs while the main one (the compressed entries) is equal, that separates
# two causes that look alike from outside: guess which two.

# %%
digests = {} if live else workbook.digests(bundle)
print(", ".join(f"{name}: {'equal' if same else 'differs'}" for name, same in digests.items()) or "no dumps here")
outside = diagnosis
diagnosis = analysis.diagnose(trials, {"config": geometry, "digests": digests}, predictions=foretold)
diagnosis

# %%
before, after = outside.ranked[0], diagnosis.ranked[0]
print(f"from outside: {before}; with the inside: {after}" if digests else "nothing from inside is known")
share = [{r.code: r.posterior for r in found.ranked} for found in (outside, diagnosis)]
side_alone = digests.get("c4_kv.0") is True and not digests.get("c4_index.0", True)
assert (
    not side_alone
    or bundle.name != "context-loss"
    or (share[1]["F14"] > share[0]["F14"] and share[1]["F13"] < share[0]["F13"])
)

# %% [markdown]
# The two are a side buffer that is not moved (F14) and a transfer out of order (F13): where the side buffer alone differs,
# the first gains what the second loses.
#
# ## Keep the ledger
#
# The ledger holds what was believed before, what each run says, and which run clears which suspect. Results of the kernel and
# page checks in the other notebooks can be entered as well; this notebook enters what the trials alone can clear.

# %%
told = {"config": geometry, "version": stated.version, "command": list(stated.command) or "not known"}
book = analysis.Ledger(opened.details if live else incident, symptom=symptom, deployment=told)
suspects = {"F01": 0.1, "F04": 0.1, "F05": 0.15, "F09": 0.15, "F13": 0.15, "F14": 0.15}
for code, prior in suspects.items():
    book = book.suspect(code, analysis.MECHANISMS[code].title, prior)

# %% [markdown]
# A class is cleared only where the trials *could* have shown it: here the laws by which it loses were open to these trials,
# and its share is below one in a hundred. What nobody looked at clears nobody.

# %%
for ranked in diagnosis.ranked:
    if ranked.code in suspects and ranked.posterior < 0.01 and diagnosis.laws and ranked.code not in diagnosis.causes:
        result = f"{diagnosis.laws[0].sentence}: {100 * ranked.posterior:.1g} % for {ranked.code}"
        book = book.record("all runs", "the law of the loss", result, exonerates=[ranked.code])
book = book.conclude(diagnosis)
if ledger_file:
    book.save(ledger_file)
book

# %% [markdown]
# Choose a hypothesis to see each run that bears on it.

# %%
workbook.explorers.ledger_explorer(book)

# %%
workbook.tables.table(book.exonerated(), "Cleared, and by what")

# %% [markdown]
# ## The next decisive test
#
# A good test is one on which the remaining hypotheses disagree. Its expected outcome is written down before it is run. Where
# two constants are equal, no search for the edge could tell them apart.

# %%
walked = (trials["probe"] == "cliff").any()
tests = list(diagnosis.next_tests)
budget, chunk = geometry.get("topk", 0) * geometry.get("ratio", 1), geometry.get("chunk")
if walked and budget and budget == chunk:
    print(f"- top-k x ratio and the chunk are both {chunk:,}: only another chunk size tells which one the edge follows")
for test in tests[:3]:
    print("-", test)
if any("digest" in str(test) for test in tests[:3]):
    print("  with the pages of one request saved on both sides: needlework pages compare SENT RECEIVED")

# %% [markdown]
# ## Hand it on
#
# Maintainers ask first for the version, the exact command, the effective configuration, what one flag at a time changes, and a
# script. The text below has a place for each and says what is not recorded. Addresses and keys are taken out.

# %%
text = book.issue_text()
print(text)
assert all(part in text for part in ("**Version.**", "**Exact command.**", "**One flag at a time.**", "**Script.**"))

# %% [markdown]
# ## What we found

# %%
seen = [law.sentence for law in diagnosis.laws[:2] if law.share > 0.05] + list(diagnosis.seen)
advised = list(dict.fromkeys(analysis.MECHANISMS[code].meanwhile for code in diagnosis.causes[:2]))
what = (
    re.sub("^1 live", "A live", opened.details[:1].upper() + opened.details[1:]) if live else f"Incident {bundle.name}"
)
when = {"Version": stated.version, "Engine": "" if live else bundle.settings.get("incident", {}).get("engine", "")}
page = workbook.brief(diagnosis, trials, what=what, facts=when, command=stated.command, config=geometry)
workbook.summary(
    brief=page,
    symptom=symptom,
    verdict=page.verdict,
    evidence=[*(seen[:5] or ["nothing is lost beyond stray misses"]), f"foretold: {page.foretold}"],
    confidence=f"{diagnosis.confidence}, from {diagnosis.measured:,} measured trials. Only classes that somebody has described "
    "are ranked; the cause may be another one.",
    next_step=f"{page.next_step}.{' Meanwhile: ' * bool(advised)}{'; or '.join(advised)}",
)

# %% [markdown]
# The verdict and its numbers are computed from the runs above. Seen from outside it ranks causes and proves none: proof is a
# page that differs across the transfer, or a flag that heals, and those are the tests that it names.
#
# ## What would change our mind
#
# * A loss in one of the conditions below, which nobody has looked at.
# * A/A pairs that differ: then the difference between arms must exceed that noise first.
# * An inside finding that contradicts the outside one: buffers that all arrive whole, while the split arm still misses.

# %%
print("\n".join(diagnosis.missing) or "every instrument was used")

# %% [markdown]
# ## Next
#
# Your own deployment: `needlework diagnose combined=http://…,pd=http://… --run FOLDER`, and the test that it names. Or
# [12_real_engine](12_real_engine.ipynb): does all this also read a real engine?
