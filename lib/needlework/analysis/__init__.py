"""What the measurements say: pure functions on tables of trials."""

from needlework.analysis.cliff import Cliff, CliffSearch, EdgeWalk, constants_in
from needlework.analysis.comb import Comb, ResidueScan
from needlework.analysis.diagnosis import Diagnosis, diagnose
from needlework.analysis.drift import Drift, cusum, drift
from needlework.analysis.intervals import sentence, wilson
from needlework.analysis.laws import Fit, Law, conditions, fit
from needlework.analysis.ledger import Ledger
from needlework.analysis.logprobs import distances, step_distance
from needlework.analysis.mechanisms import MECHANISMS, Mechanism
from needlework.analysis.paired import Paired, compare, e_value, holm, mcnemar, newcombe, permutation_test
from needlework.analysis.trials import COLUMNS, NO_MEASUREMENT, OUTCOMES, concat, hits, lengths, load_trials

__all__ = [
    "COLUMNS",
    "MECHANISMS",
    "NO_MEASUREMENT",
    "OUTCOMES",
    "Cliff",
    "CliffSearch",
    "Comb",
    "Diagnosis",
    "Drift",
    "EdgeWalk",
    "Fit",
    "Law",
    "Ledger",
    "Mechanism",
    "Paired",
    "ResidueScan",
    "compare",
    "concat",
    "conditions",
    "constants_in",
    "cusum",
    "diagnose",
    "distances",
    "drift",
    "e_value",
    "fit",
    "hits",
    "holm",
    "lengths",
    "load_trials",
    "mcnemar",
    "newcombe",
    "permutation_test",
    "sentence",
    "step_distance",
    "wilson",
]  # fmt: skip
