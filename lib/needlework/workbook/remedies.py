"""What to do about a class of fault: what keeps users served meanwhile, and where to look first, in words."""

from __future__ import annotations

from dataclasses import dataclass

from needlework import analysis


@dataclass(frozen=True)
class Advice:
    """`what` is the class in words; `meanwhile` a work-around; `look` the first look; `proof` the decisive test."""

    code: str
    what: str
    meanwhile: str
    look: str
    proof: str

    def __str__(self) -> str:
        return f"Meanwhile: {self.meanwhile}. Then: {self.look}."


def advice(code: str) -> Advice:
    """Advice on a class of `analysis.MECHANISMS`; raises ValueError for an unknown one."""
    if (known := analysis.MECHANISMS.get(code)) is None:
        raise ValueError(f"there is no advice on {code[:20]!r}; classes are {', '.join(analysis.MECHANISMS)}")
    return Advice(code, known.title, known.meanwhile, known.look, known.test)
