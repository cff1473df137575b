"""Hold a kernel against its reference where kernels really fail, and say what was covered and what was not."""

from needlework.kernels.check.cases import Case
from needlework.kernels.check.run import CheckResult, check, verdicts
from needlework.kernels.check.suites import suite

__all__ = ["Case", "CheckResult", "check", "suite", "verdicts"]
