"""Calibration: every instrument and the diagnosis against planted faults and healthy deployments, with figures."""

__all__ = ["Case", "calibrate", "cases", "shipped", "summarise"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    homes = {"Case": "cases", "cases": "cases", "calibrate": "run", "summarise": "summary", "shipped": "summary"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
