"""Write docs/examples: the summary of each shipped incident that holds a case to judge, made from its recordings alone.

    python tools/examples.py

Notebook 11 shows how each number comes about; here the same functions are called without it.
"""

from __future__ import annotations

from pathlib import Path

from needlework import __version__, analysis, probes, workbook
from needlework.evidence import Bundle, incidents
from needlework.workbook import onepage

PLACE = Path(__file__).resolve().parents[1] / "docs" / "examples"


def judged() -> list[Bundle]:
    """The incidents with recorded answers to judge: of a model that can answer, no planted faults in an engine."""
    every = [incidents.incident(name) for name in incidents.names()]
    return [one for one in every if one.run_names and not one.settings.get("recorded", {}).get("faults")]


def example(bundle: Bundle) -> tuple[analysis.Diagnosis, onepage.Brief]:
    """Verdict and page from the recorded runs, the collected constants and the page dumps."""
    runs = [bundle.run(name) for name in bundle.run_names]
    trials = analysis.concat([analysis.load_trials(run) for run in runs])
    journals = [probes.Recorded(run).journal for run in runs]
    foretold = [record for journal in journals for record in journal.records]
    stated = workbook.deployed(bundle)
    inside = {"config": dict(stated.config), "digests": workbook.digests(bundle)}
    diagnosis = analysis.diagnose(trials, inside, predictions=foretold)
    engine = bundle.settings.get("incident", {}).get("engine", "")
    facts = {"Engine": engine, "Made with": f"needlework {__version__}"}
    what, config = f"Incident {bundle.name}", stated.config
    return diagnosis, onepage.brief(diagnosis, trials, what=what, facts=facts, command=stated.command, config=config)


if __name__ == "__main__":
    for bundle in judged():
        diagnosis, brief = example(bundle)
        print(onepage.write(PLACE / bundle.name, brief), str(diagnosis).partition("\n")[0], sep="\n  ")
