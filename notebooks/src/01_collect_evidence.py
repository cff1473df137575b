# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Collect the evidence in one read-only call
#
# *What is deployed, and what do its logs and sources say?*
#
# **You will do:** read one collection of a whole deployment: units, environment, arguments, logs, sources, server answers.
#
# **You will learn:** which value is in force on which role and where it came from; what the logs name and what they do
# not; how deployed source is compared with its release; and that something missing is a finding too.
#
# **You need:** nothing but this repository. To collect from your own machines, write an `incident.toml` and run
# `needlework collect incident.toml --out evidence`.

# %%
import pandas as pd
from needlework import evidence, workbook

workbook.start("Collect the evidence in one read-only call")

# %% tags=["parameters"]
incident = "context-loss"
show_lines = 4

# %% [markdown]
# ## One call, every host and role
#
# The engineer of the incident opened three shells by hand: the decode unit, the prefill unit, and a copy of two source
# files. `evidence.collect` asks for all of it at once, from a fixed list of commands that can only read, and replaces
# secrets and identities before anything is written. Placeholders such as `<address-1>` are stable, so rows still join.
#
# **Guess before you look:** a deployment that answers every request with status 200 has little to hide in its units.

# %%
bundle = workbook.incident(incident)
collection = evidence.Collection.read(bundle.evidence)
told = incident == "context-loss"  # the sentences are about that one; of another collection only the tables speak
if not told:
    print(f"The tables below are of {incident}; the sentences between them tell of context-loss.")
items = pd.DataFrame(collection.items)
whole = len(items) and items["item"].str.startswith("journal").any()
workbook.need(whole, f"incident {incident} holds no units and logs of a deployment; `needlework collect` gathers them")
items["what"] = items["item"].str.partition(":")[0]
states = items.pivot_table(index="what", columns="role", values="state", aggfunc=lambda s: ", ".join(sorted(set(s))))
workbook.tables.table(states.reset_index(), "Items asked for (rows), and what came back from each role")

# %%
replaced = pd.DataFrame([{"kind": kind, **counts} for kind, counts in collection.replaced.items()])
assert not evidence.redaction.check("\n".join(collection.texts.values())), "redact before you share"
workbook.tables.table(replaced, "What redaction replaced: different values, and places they stood in")

# %% [markdown]
# The check in the cell above runs the redaction rules once more over all that was kept: nothing is left to replace.
#
# ## What is not there
#
# An empty answer reads like "all is well" in a shell. Here each absence is a row with a sentence.

# %%
missing = evidence.absences(collection)
found = missing["finding"].astype(str).str
assert not told or found.contains("does not exist").any(), "a named source file is missing in this incident"
assert not told or found.contains("inactive").any(), "the combined unit is present but inactive"
assert not told or found.contains("another service").any(), "the prefill log is not an engine's log"
workbook.tables.table(missing, "Absence as a finding")

# %% [markdown]
# Four rows deserve a pause. One source file that the investigation named is not at its path, so the keys are scored by
# some other file. The combined unit exists and is inactive: the decisive experiment is prepared but not running. A
# unit without a kernel switch does not mean that no switch is set. And the prefill unit's log is not an engine's log.

# %%
units = evidence.units(collection).set_index("role")
active = units.index[units["state"] == "active"].tolist()
assert not told or (active == ["prefill", "decode", "router"] and units.loc["combined", "state"] == "inactive")
assert not told or units.loc["combined", "starts"].endswith(".sh"), "the combined unit starts a script that is there"
workbook.tables.table(units.reset_index()[["role", "unit", "state", "starts"]], "Units, their state, what they start")

# %% [markdown]
# ## The search that came back empty
#
# The engineer filtered the units for the words of every custom kernel and cache setting (`SGLANG_`, `TRITON`, `INDEXER`,
# `page-size`, `radix`, `chunked` …). For prefill and decode nothing came back, which can mean "not set" or "set elsewhere".
# Guess which, then look at all places at once.

# %%
searched = evidence.searched(collection)
pair = searched[searched["role"].isin(["prefill", "decode"])].set_index(["role", "place"])["hits"].unstack()
assert not told or (pair[["unit and drop-ins", "process environment"]] == 0).all(axis=None)
assert not told or (pair["wrapper script"] > 0).all(), "the wrapper scripts hold what the units do not"
workbook.tables.table(searched.drop(columns="host"), "The same words in every place that can set something")

# %% [markdown]
# The units and the environment of both servers name none of the words; the scripts that `ExecStart` starts do. An empty
# filter said only that the search looked in the wrong file.
#
# ## What is in force, and where it came from
#
# A value can be set in the unit, a drop-in, the wrapper script that `ExecStart` names, the process environment or the
# command line, and the server may report its own. The closest to the running process wins; what it overrides is kept.

# %%
table = evidence.effective(collection)
chosen = table[table["setting"].str.contains("page_size|kv_cache|topk|radix|chunk|SGLANG|disagg|context_length")]
assert not told or {"prefill", "decode"} <= set(table["role"])
workbook.tables.table(
    chosen[["role", "setting", "value", "source", "overrides"]], "Effective settings and their sources"
)

# %% [markdown]
# ## Prefill against decode
#
# The two servers of a pair must agree on page size, dtype, layout and budget; they differ on purpose in their ports and
# modes. Differences that can lose context come first.

# %%
differing = evidence.compare_roles(table)
decisive = differing[differing["weight"] == "decisive"]
workbook.tables.table(differing, "Settings that differ between the roles, decisive ones first")

# %%
sides = [role for role in ("prefill", "decode", "combined") if role in differing.columns]
verdict = "agree on every decisive setting" if decisive.empty else f"differ in {', '.join(decisive['setting'])}"
print(f"{' and '.join(sides)} {verdict}")
assert not told or decisive["setting"].tolist() == ["disable_radix_cache"], "another decisive difference, or none"

# %% [markdown]
# *Decisive* means that such a difference can lose context, not that this one does. Here it is the prefix cache (SGLang's
# radix cache): prefill has one, decode has none. In a pair that is normal, since only prefill computes prompts. Page size,
# dtype, budget and chunk are the same on both sides. (The combined server is stopped; its script states the same.)
#
# ## What the logs name
#
# Each line is sorted into categories by whole words: `inf` is not found in `info`. A category that no line falls into
# keeps its row: that nothing was found is an answer too.

# %%
roles = sorted(items.loc[items["what"] == "journal", "role"].unique())
asked = next((role for role in ("decode", "combined", *roles) if role in roles), "decode")
logs = {
    role: evidence.read_log(collection, h, role) for h, role in items[["host", "role"]].drop_duplicates().to_numpy()
}
log = logs[asked]
counts = evidence.scan(log)
assert not told or (asked == "decode" and len(log) == 4000), "the window of the decode log is 4,000 lines"
workbook.tables.table(
    counts[["category", "count", "requests", "example"]], f"{len(log):,} lines of the {asked} log by category"
)

# %%
said = log["message"].str.extract(r'"(?P<request>[A-Z]+ /[^ ?"]*)[^"]*" (?P<status>\d{3})').fillna("no request")
requests = said.value_counts().rename("lines").reset_index()
assert requests["lines"].sum() == len(log)
assert not told or ((requests["status"] == "200").all() and requests["lines"].max() == 3996)
assert not told or not requests["request"].str.contains("completions").any()
workbook.tables.table(requests, f"What the {len(log):,} lines are instead: requests and their status")

# %%
broken = ["nan", "inf", "corrupt", "mismatch", "abort", "evict", "traceback", "out of memory"]
assert not told or counts.set_index("category").loc[[*broken, "chunk", "radix", "prefix"], "count"].sum() == 0
colours = r" ?\[\d+m"  # of a terminal, as the journal kept them
heads = {role: lines["message"].head(show_lines) for role, lines in logs.items() if len(lines)}
heads = {role: lines.str.replace(colours, "", regex=True) for role, lines in heads.items()}
assert not told or heads["decode"].str.contains("200 OK").all()
assert not told or logs["prefill"]["message"].str.contains("system health").any()
if told:
    router = logs["router"]["message"]
    failed = router.str.contains("request failed with server error")
    assert failed.sum() == 19 and not failed.iloc[-1] and "register_tokenizer" in router.iloc[-1]
workbook.tables.table(pd.DataFrame(heads), "The first lines of the logs, without terminal colours")

# %% [markdown]
# No line of the decode log names a NaN, an infinity, corruption, a mismatch, an abort, an eviction, a traceback or lack of
# memory, nor chunk, radix or prefix. But look at what the lines *are*: 3,996 of 4,000 are polls of `/metrics`, and not one
# is a chat request. The prefill log, about credentials and system health, is another service's. The router's log has 19
# lines *request failed with server error*, all before its last line, which registers a server: the start, not the fault. So
# the logs neither prove health nor show the fault: they may not even cover a request that failed.
#
# ## The deployed source
#
# Two source files were asked for. What came is known by size, date and digest.

# %%
files = evidence.source_files(collection)
python = files[files["path"].str.endswith(".py")].set_index(["role", "state"])
assert not told or (python.loc[("decode", "ok"), "bytes"] > 0 and ("decode", "missing") in python.index)
workbook.tables.table(files.assign(sha256=files["sha256"].str[:16]).drop(columns="host"), "Source files and scripts")

# %% [markdown]
# The kernel file came, the indexer's did not: there is no such file at its path. **Guess:** is the file that came the one
# that was released?

# %%
release = evidence.load_plan(bundle.toml).release
compared = evidence.compare_sources(collection, release, bundle.path)
changes = [(c.name, c.added, c.removed) for c in compared]
assert not told or changes == [("attention.py", 0, 2)]
compared[0] if compared else print("no released copy was given to compare with")

# %% [markdown]
# It is not: it lacks two lines, the release's shortcut for a single row. The general path is the same. A difference is a
# lead, not a culprit: [08_sparse_mla_decode](08_sparse_mla_decode.ipynb) runs the code.
#
# ## What we found
#
# * The deployment is prefill, decode and a router; the combined unit is prepared and inactive.
# * The search for kernel and cache settings is empty in units and environment; the wrapper scripts hold them.
# * One of two named source files does not exist at its path; the other differs from its release by two lines.
# * The prefill unit's log belongs to another service.
# * 4,000 lines of the decode log hold no sign of corruption, but 3,996 of them are polls of `/metrics`: they clear nothing.
# * Of the decisive settings only the prefix cache differs between prefill and decode, as is normal in a pair.
#
# ## What would change our mind
#
# A difference in page size, dtype, layout or budget between prefill and decode would move the suspicion to configuration
# before any measurement. A line in the corrupt or mismatch category, joined to a failing trial by request id, would do the
# same for the transfer.
#
# **Next:** [02_reproduce_symptom](02_reproduce_symptom.ipynb): can we make it forget?
