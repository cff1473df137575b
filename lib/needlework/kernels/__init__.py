"""What the device computes from KV pages: references, Triton twins (`kernels.triton`, same signatures), candidates, and
the check that holds them together."""

from needlework.kernels import candidates, reference
from needlework.kernels.check import Case, CheckResult, check, suite, verdicts

__all__ = ["Case", "CheckResult", "candidates", "check", "reference", "suite", "verdicts"]
