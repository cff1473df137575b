# %% [markdown]
# # Choose what to examine
#
# Which incident, which deployment, and is this machine fit?
#
# **You will do**: check the machine, pick an incident, pick a target and open it once.
#
# **You will learn**: what an incident bundle holds, what the four kinds of target are, and where to go next.
#
# **You need**: nothing but this folder. Nothing is downloaded and nothing is sent to another machine.

# %% [markdown]
# ## Start
#
# Every notebook begins like this: one call that sets the seed and the figure style, and prints the versions in use.

# %%
from needlework import workbook

start = workbook.start("Choose what to examine")

# %% [markdown]
# Everything that you may want to change is in the next cell, and only there.

# %% tags=["parameters"]
incident = "context-loss"  # a folder under data/incidents
target = "lab"  # lab, lab:pd:F14, vllm, http://…, a=http://…,b=http://…, or recorded:<run>

# %% [markdown]
# ## Is this machine fit?
#
# Guess first: a laptop with two cores and no GPU is enough for every notebook on the default target. The table says
# what is needed, what for, and whether it is met here.

# %%
needs = workbook.machine.needs()
workbook.tables.table(needs, "What the workbook needs of this machine")

# %%
lacking = needs.loc[needs["met"] == "NO", "need"]
print(f"this machine lacks: {', '.join(lacking)}" if len(lacking) else "everything that is required is met")

# %% [markdown]
# Each row that is not required serves one step: without Chromium there is no picture of the report,
# without an SSH client no evidence from other hosts. The notebooks say so where it matters.

# %% [markdown]
# ## Which incident?
#
# An incident is one folder under `data/incidents`: what was deployed and logged (`evidence/`), what was measured (`runs/`),
# raw cache pages (`pages/`), and the hypotheses with the tests that bear on them (`ledger.json`). In JupyterLab the next
# cell is a drop-down list; in the report it is a row of buttons.

# %%
picker = workbook.explorers.incident_picker(start=incident)
picker

# %%
bundle = workbook.incident(incident)
assert picker.default == bundle.name == incident
bundle

# %% [markdown]
# The incident chosen in the parameters is the one that the following notebooks work on. To work on another one, change
# the parameter in each notebook, or run them all for it: `needlework run --incident NAME`.

# %% [markdown]
# ## Which deployment?
#
# A *target* is what the probes talk to. All four kinds have the same interface, so every notebook works on each of them:
#
# | target | what it is | needs |
# |---|---|---|
# | `lab` | the deployment in a box: real pages, real HTTP, real processes, faults planted by name | nothing |
# | `vllm` | a real engine on this machine's CPU with a small model | `make engine`, once |
# | `http://…` | a live OpenAI-compatible endpoint, or two of them for an A/B comparison | its address |
# | `recorded:<run>` | a recorded run, answered from its journal | nothing |
#
# An endpoint's key is read from `NEEDLEWORK_API_KEY`, never from a notebook, and is never shown.

# %%
with workbook.open_target(target, incident=bundle) as opened:
    print(opened.describe())
    arms = list(opened.arms)

# %%
assert arms, "a target has at least one arm"

# %% [markdown]
# An *arm* is one way to reach the model. `combined` computes the prompt and the answer in one server; `pd` computes the
# prompt in one process (prefill), moves the key/value cache, and generates in another (decode). An arm is started only
# when a notebook first uses it, so opening the target above cost nothing. *Geometry v4* means pages and sizes as in
# DeepSeek-V4; `F14` is the class of the fault that is planted in `pd`, and `docs/classes.md` lists all twenty.

# %% [markdown]
# ### A mistyped target gets a one-sentence answer
#
# A typing error should cost a minute, not an hour. Guess what is wrong with this target before you read the answer.

# %%
try:
    workbook.kind_of("sglang")
except workbook.TargetError as error:
    message = str(error)
print(message)

# %%
assert "unknown target" in message and "http://" in message

# %% [markdown]
# <details><summary>Aside: two live endpoints at once</summary>
#
# `a=http://…,b=http://…` names two arms of one target. The comparison notebook then asks both the same
# prompts in turn. Bare addresses separated by a comma are called `a` and `b`.
#
# </details>

# %% [markdown]
# ## What we found
#
# * This machine meets every requirement of the default target.
# * The incident is named in one parameter, the deployment in another; nothing else needs to be changed to examine a
#   deployment of your own.
#
# ## What would change our mind
#
# A required row that says **NO** above, or a later notebook that takes more than a minute here: then run one notebook at a
# time (`needlework run 03`), or read the recorded run instead of measuring (`recorded:<run>`).
#
# ## Next
#
# [01_collect_evidence](01_collect_evidence.ipynb): what is deployed, and what do its logs and sources say?
