"""What each fault class looks like from outside and inside, as declared odds, and the test that would decide.

`expects` says how often a feature (features.py) is there when the class is the cause; a feature that a class does not
mention has its background odds (odds.py). The odds are readings of public reports (see each class's citations), held
against planted faults by the calibration; they are not fitted to one deployment.
"""

from __future__ import annotations

from needlework.analysis import classes_lifetimes, classes_lookalikes, classes_reading
from needlework.analysis.odds import BACKGROUND, ELSEWHERE, Signature

__all__ = ["BACKGROUND", "BY_CODE", "ELSEWHERE", "LOOKALIKES", "SIGNATURES", "Signature"]

_FAULTS = sorted((*classes_reading.READING, *classes_lifetimes.LIFETIMES), key=lambda signature: signature.code)
SIGNATURES: tuple[Signature, ...] = (*classes_lookalikes.LOOKALIKES, *_FAULTS)
BY_CODE = {signature.code: signature for signature in SIGNATURES}
LOOKALIKES = ("N1", "N2", "N3", "N4", "N5")
