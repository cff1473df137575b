"""Faults by code, with their parameters, and how a specification such as "F14:first_chunks=1" is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from needlework.analysis import MECHANISMS


@dataclass(frozen=True)
class Fault:
    """One class of fault that the lab can plant.

    `parameters` are names with default values (whole numbers, mostly); `strengths` are parameter sets from mild to
    severe; `install(engine, **parameters)` hooks the fault into an engine. `roles`: the engines it acts in.
    `lookalike`: not a fault of the cache, but easily taken for one.
    """

    code: str
    title: str
    citations: tuple[str, ...]
    account: str
    parameters: Mapping[str, int | float | str]
    strengths: Mapping[str, Mapping[str, int | float | str]]
    install: Callable[..., None] = field(repr=False)
    roles: tuple[str, ...] = ("combined", "prefill", "decode")
    lookalike: bool = False
    needs: Mapping[str, int] = field(default_factory=dict)  # engine options without which the fault has no place

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.code} {self.title}" + (f" ({options})" if options else "")

    def _repr_html_(self) -> str:
        cites = ", ".join(map(escape, self.citations))
        return f"<p><b>{escape(str(self))}</b><br>{escape(self.account)}<br><small>{cites}</small></p>"


@dataclass(frozen=True)
class Planted:
    """A fault with the parameters it was planted with."""

    code: str
    parameters: dict[str, Any]

    def __str__(self) -> str:
        return ":".join([self.code, *[f"{k}={v}" for k, v in self.parameters.items()]])


FAULTS: dict[str, Fault] = {}


def fault(
    code: str,
    *,
    strengths: Mapping[str, Mapping[str, int | float | str]] | None = None,
    roles: tuple[str, ...] = ("combined", "prefill", "decode"),
    needs: Mapping[str, int] | None = None,
    **parameters: int | float | str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the function below as a fault; its docstring is the account, the rest is told in faults.toml."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        account = " ".join((function.__doc__ or "").split())
        levels = dict(strengths or {})
        levels.setdefault("default", dict(parameters))
        known = MECHANISMS[code]
        FAULTS[code] = Fault(
            code,
            known.title,
            known.citations,
            account,
            parameters,
            levels,
            function,
            roles,
            known.lookalike,
            dict(needs or {}),
        )
        return function

    return register


def parse(spec: str) -> Planted:
    """A fault from "F14" or "F14:first_chunks=1,…" or "F14@mild". ValueError for what does not exist."""
    head, _, options = spec.partition(":")
    code, _, strength = head.partition("@")
    if code not in FAULTS:
        raise ValueError(f"no fault named {code[:20]!r}; the lab has {', '.join(sorted(FAULTS))}")
    known = FAULTS[code]
    chosen: dict[str, Any] = dict(known.parameters)
    if strength:
        if strength not in known.strengths:
            raise ValueError(f"{code} has no strength {strength[:20]!r}; choose one of {', '.join(known.strengths)}")
        chosen |= known.strengths[strength]
    for part in filter(None, options.replace(":", ",").split(",")):
        name, _, text = part.partition("=")
        if name not in chosen:
            raise ValueError(f"{code} has no parameter {name[:20]!r}; it has {', '.join(known.parameters) or 'none'}")
        kind = type(known.parameters[name])
        try:
            chosen[name] = kind(text)
        except ValueError:
            raise ValueError(f"{code}: {name} must be of type {kind.__name__}, not {text[:20]!r}") from None
    return Planted(code, chosen)


def install(engine: Any, specs: Iterable[str]) -> tuple[Planted, ...]:
    """Plant faults in an engine, in order. A fault of the other role of a pair is checked and left out."""
    planted = tuple(parse(str(spec)) for spec in specs)
    for one in planted:
        known = FAULTS[one.code]
        if engine.role in known.roles:
            known.install(engine, **one.parameters)
    return planted


def needs(specs: Iterable[str]) -> dict[str, int]:
    """Engine options that some faults need to have a place in the stack; what the caller sets goes before them."""
    return {name: value for spec in specs for name, value in FAULTS[parse(spec).code].needs.items()}
