"""What was deployed and what it logged: collect (read-only), redact, scan, and keep it as one bundle."""

from needlework.evidence.bundle import Bundle, unzip
from needlework.evidence.collect import Collection, collect
from needlework.evidence.findings import Finding, Findings, absences, as_evidence, findings
from needlework.evidence.logs import join_trials, read_log, scan
from needlework.evidence.plan import Plan, load_plan
from needlework.evidence.redaction import Redactor, redact
from needlework.evidence.settings import compare_roles, effective, searched, units
from needlework.evidence.sources import compare_source, compare_sources, source_files

__all__ = [
    "Bundle",
    "Collection",
    "Finding",
    "Findings",
    "Plan",
    "Redactor",
    "absences",
    "as_evidence",
    "collect",
    "compare_roles",
    "compare_source",
    "compare_sources",
    "effective",
    "findings",
    "join_trials",
    "load_plan",
    "read_log",
    "redact",
    "scan",
    "searched",
    "source_files",
    "units",
    "unzip",
]
