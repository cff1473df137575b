"""The targets `lab…`, `vllm…` and `llama`, as `workbook.open_target` opens them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from needlework.evidence import Bundle
from needlework.serving import Endpoint
from needlework.serving.scrub import plain
from needlework.serving.target import Arms, Target, TargetError

from needlework_lab import llama, vllm
from needlework_lab.starting import start

ENGINES = {"vllm": "vLLM", "llama": "llama.cpp"}
_FAULT = re.compile(r"[FN]\d{1,2}")


@dataclass(frozen=True)
class LabPlan:
    """What a `lab…` specification asks for: arms (modes), faults per arm, and options of `lab.start`."""

    arms: tuple[str, ...]
    faults: tuple[str, ...]
    options: Mapping[str, Any]


def parse_lab(spec: str, incident_faults: tuple[str, ...] = ()) -> LabPlan:
    """Read `lab[:arms][:faults or healthy][:option=value]…`. Parts after a fault that look like `name=value` belong to
    the fault
    until a part names an option of the lab (`geometry`, `seed`)."""
    arms: tuple[str, ...] = ("combined", "pd")
    faults: list[str] | None = None
    options: dict[str, Any] = {}
    for part in [p.strip() for p in spec.split(":")[1:] if p.strip()]:
        words = part.split(",")
        if all(w in ("combined", "pd") for w in words):
            arms = tuple(dict.fromkeys(words))
        elif part == "healthy":
            faults = []
        elif all(_FAULT.fullmatch(w) for w in words):
            faults = [*(faults or []), *words]
        elif re.fullmatch(r"(geometry|seed)=\w+", part):
            name, value = part.split("=")
            options[name] = int(value) if name == "seed" and value.isdigit() else value
        elif faults and re.fullmatch(r"\w+=[\w.,=-]+", part):
            faults[-1] += f":{part}"
        else:
            raise TargetError(
                f"cannot read {plain(part, 40)!r} in the target {plain(spec, 60)!r}; "
                "an example is lab:pd:F14:geometry=tiny"
            )
    return LabPlan(arms, tuple(incident_faults if faults is None else faults), options)


def lab(stack: contextlib.ExitStack, spec: str, bundle: Bundle | None) -> Target:
    settings = bundle.settings.get("lab", {}) if bundle else {}
    plan = parse_lab(spec, tuple(settings.get("faults", ())))
    options = {**{k: v for k, v in settings.items() if k in ("geometry", "seed")}, **plan.options}
    deployments = Arms(
        {
            arm: functools.partial(_start_lab, stack, {"mode": arm, "faults": plan.faults, **options})
            for arm in plan.arms
        },
        "lab",
    )
    planted = f"with {', '.join(plan.faults)} planted" if plan.faults else "healthy"
    arms = Arms({arm: functools.partial(_endpoint, deployments, arm) for arm in plan.arms})
    return Target(
        "lab", spec, arms, deployments, f"deployment in a box, geometry {options.get('geometry', 'v4')}, {planted}"
    )


def _start_lab(stack: contextlib.ExitStack, options: Mapping[str, Any]) -> Any:
    return stack.enter_context(start(**options))


def _endpoint(deployments: Mapping[str, Any], arm: str) -> Any:
    deployment = deployments[arm]
    # a router has no /tokenize of its own; the prefill worker's is the one that counts
    tokenizer_url = getattr(deployment, "prefill_url", None) if arm == "pd" else None
    return Endpoint(deployment.base_url, tokenizer_url=tokenizer_url, repeatable=True)


def vllm_engine(stack: contextlib.ExitStack, spec: str, _: Bundle | None) -> Target:
    return _engine(stack, spec, "vllm", vllm)


def llama_engine(stack: contextlib.ExitStack, spec: str, _: Bundle | None) -> Target:
    return _engine(stack, spec, "llama", llama)


def _engine(stack: contextlib.ExitStack, spec: str, kind: str, engine: Any) -> Target:
    if (why := engine.missing()) is not None:
        raise TargetError(f"{why}; or use lab, a URL, or recorded:<run>")
    names = tuple(dict.fromkeys(spec.split(":", 1)[1].split(","))) if ":" in spec else engine.MODES
    if unknown := [name for name in names if name not in engine.MODES]:
        has = f"the arms {' and '.join(engine.MODES)}" if len(engine.MODES) > 1 else f"the arm {engine.MODES[0]} alone"
        raise TargetError(f"the target {kind} has {has}, not {plain(unknown[0], 40)!r}")
    # with both arms, the pair's decode server is the combined arm as well: one server less in memory
    mode = "pd" if "pd" in names else "combined"
    running = functools.cache(lambda: stack.enter_context(engine.start(mode)))
    deployments = Arms(dict.fromkeys(names, running), kind)
    arms = Arms({arm: functools.partial(_engine_endpoint, deployments, arm) for arm in names})
    return Target(kind, spec, arms, deployments, f"{ENGINES[kind]} on this machine's CPU")


def _engine_endpoint(deployments: Mapping[str, Any], arm: str) -> Any:
    running = deployments[arm]
    if arm == "combined":
        if running.mode == "combined":
            return Endpoint(running.base_url)
        # its own salt: blocks that one arm has left in the server's cache must not answer for the other
        return Endpoint(running.decode_url, extra={"cache_salt": "combined"})
    prefill = running.prefill_url  # counts tokens, and knows what came out of its cache: the pair's answers do not
    return Endpoint(running.base_url, tokenizer_url=prefill, metrics_url=running.metrics_url, cache_url=prefill)
