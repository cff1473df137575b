"""What a notebook examines: the deployment in a box, a real engine, a live URL (or two), or a recorded run, behind one
interface.

    with workbook.open_target(target) as t:
        t.arms            # {"combined": Endpoint, "pd": Endpoint}; an arm starts when it is first used
        t.kind            # "lab", "vllm", "http" or "recorded"
        t.describe()      # one sentence without addresses

Specifications: `lab`, `lab:pd:F14`, `lab:combined,pd:F05:k=256`, `lab:pd:healthy:geometry=tiny`, `vllm`, `vllm:pd`,
`http://host:port`,
`a=http://host:1,b=http://host:2`, `recorded:<run>` (a run of the incident, or a folder), `a=recorded:x,b=recorded:y`.

A router often hides the routes of its workers. `pd=http://router:1+tokenizer=http://prefill:2` names who counts tokens,
`+cache=http://prefill:2` whose counter tells cached tokens, `+metrics=…` whose gauges count. Where no tokenizer is
named and the arm has none, another arm of the target that serves the same model counts for it.
"""

from __future__ import annotations

import contextlib
import functools
import html
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from needlework import neighbours
from needlework.evidence import Bundle, incidents

from . import tokens
from .endpoint import Endpoint
from .replies import TransportError
from .scrub import plain, private
from .sync import run

FORMS = "lab, lab:pd:F14, vllm, llama, http://…, a=http://…,b=http://…, or recorded:<run>"


_live: dict[str, None] = {}  # kinds of the live deployments that this process was given, in order


def live_kinds() -> list[str]:
    """Kinds of target ("lab", "vllm", "http") of which an arm was handed out in this process: measured live."""
    return list(_live)


class TargetError(ValueError):
    """A target that cannot be used; the message is one sentence that says what to do."""


class Arms(Mapping[str, Any]):
    """Arm name -> endpoint. An arm is started when it is first asked for, so a notebook pays only for what it uses."""

    def __init__(self, openers: Mapping[str, Callable[[], Any]], kind: str | None = None):
        self._openers, self._kind = dict(openers), kind
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._openers:
            raise TargetError(f"this target has no arm {name!r}; it has: {', '.join(self._openers)}")
        if name not in self._open:
            if self._kind:
                _live[self._kind] = None
            self._open[name] = self._openers[name]()
        return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._openers)

    def __len__(self) -> int:
        return len(self._openers)


@dataclass(frozen=True)
class Target:
    """An open target. `deployments` holds the lab's or engine's own handles by arm (empty for http and recorded)."""

    kind: str
    spec: str
    arms: Mapping[str, Any]
    deployments: Mapping[str, Any] = field(default_factory=dict)
    details: str = ""

    @property
    def first(self) -> Any:
        """The endpoint of the first arm: enough where one deployment is examined."""
        return self.arms[next(iter(self.arms))]

    @property
    def live(self) -> bool:
        return self.kind != "recorded"

    def describe(self) -> str:
        return f"{self.details}; arms: {', '.join(self.arms)}"

    def __str__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.describe())}</p>"


@contextlib.contextmanager
def open_target(
    spec: str | None = None,
    *,
    incident: Bundle | str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    check: bool = True,
    **options: Any,
) -> Iterator[Target]:
    """Open a target, close what it started.

    spec: see the module; NEEDLEWORK_TARGET overrides it, `lab` is the default. incident: its `[lab]` faults are what
    plain `lab` plants in the
    PD arm, and `recorded:<run>` is looked up in it. model, api_key: for http (NEEDLEWORK_MODEL and NEEDLEWORK_API_KEY
    otherwise).
    check: ask a live endpoint for its models first. options: of every live Endpoint (timeout_s, ca_file).
    Raises TargetError with one sentence: unknown target, dead endpoint, wrong key, no such model.
    """
    wanted = (os.environ.get("NEEDLEWORK_TARGET") or spec or "lab").strip()
    bundle = incidents.incident(incident) if isinstance(incident, str) else incident
    named = split_arms(wanted)
    with contextlib.ExitStack() as stack:
        kinds = {kind_of(part) for part in named.values()}
        if len(kinds) != 1:
            raise TargetError(
                f"a target has one kind for all its arms, {plain(wanted, 80)!r} mixes {', '.join(sorted(kinds))}"
            )
        kind = kinds.pop()
        if kind == "http":
            yield _http(named, wanted, model, api_key, check, options)
        elif kind == "recorded":
            yield _recorded(named, wanted, bundle)
        else:
            try:
                opener = neighbours.load(neighbours.TARGETS, kind)
            except neighbours.NotInstalled as error:
                raise TargetError(f"{error}; or use a URL, or recorded:<run>") from None
            yield opener(stack, wanted, bundle)


def split_arms(spec: str) -> dict[str, str]:
    """Split `a=…,b=…` (or two bare URLs) into arms; anything else is one arm called `target`."""
    parts = re.split(r",(?=(?:[A-Za-z][\w-]*=)?(?:https?://|recorded:))", spec)
    arms: dict[str, str] = {}
    for i, part in enumerate(p.strip() for p in parts):
        match = re.fullmatch(r"([A-Za-z][\w-]*)=((?:https?://|recorded:).*)", part)
        name, value = (
            match.groups()
            if match
            else ("target" if len(parts) == 1 else "ab"[i] if len(parts) == 2 else f"arm{i + 1}", part)
        )
        if name in arms:
            raise TargetError(f"arm {name!r} is named twice in the target")
        arms[name] = value
    return arms


def kind_of(spec: str) -> str:
    """The kind of a target: "http", "recorded", or the name of one that a package beside this one offers ("lab")."""
    head = spec.split(":", 1)[0].lower()
    offered = neighbours.EXTRAS[neighbours.TARGETS].keys() | neighbours.found(neighbours.TARGETS).keys()
    if head in ("http", "https", "recorded") or head in offered:
        return "http" if head == "https" else head
    meant = f"perhaps http://{plain(spec, 60)}; " if re.match(r"[\w.-]+:\d+(/|$)|localhost\b", spec) else ""
    raise TargetError(f"unknown target {plain(spec, 60)!r}; {meant}use {FORMS}")


# ---- live URLs ----


def _http(
    named: Mapping[str, str], spec: str, model: str | None, api_key: str | None, check: bool, options: dict[str, Any]
) -> Target:
    model = model or os.environ.get("NEEDLEWORK_MODEL") or None
    key = api_key or os.environ.get("NEEDLEWORK_API_KEY") or None
    endpoints, serves = {}, {}
    for arm, part in named.items():
        url, *roles = part.split("+")
        base = re.sub(r"/v1/?$", "", url.rstrip("/"))
        helpers: dict[str, Any] = _helpers(arm, roles)
        if check:
            trusted = options.get("ca_file")
            serves[arm] = check_endpoint(base, model=model, api_key=key, arm=arm, ca_file=trusted)
        endpoints[arm] = Endpoint(base, model=model, api_key=key, **options, **helpers)
    said = f"{len(named)} live endpoint{'s' if len(named) > 1 else ''}"
    for arm, lender in _lenders(endpoints, serves).items():
        endpoints[arm].tokenizer_url = endpoints[lender].tokenizer_url or endpoints[lender].base_url
        said += f"; {arm} has no tokenise route, {lender} counts for it"
    arms = Arms({arm: functools.partial(endpoints.__getitem__, arm) for arm in endpoints}, "http")
    return Target("http", ",".join(f"{arm}=live" for arm in named), arms, {}, said)


def _helpers(arm: str, roles: Sequence[str]) -> dict[str, str]:
    """`tokenizer=URL` and the like, as options of an Endpoint."""
    found = {}
    for role in roles:
        name, _, url = role.partition("=")
        if name not in ("tokenizer", "cache", "metrics") or not url.startswith(("http://", "https://")):
            raise TargetError(
                f"cannot read {plain(role, 40)!r} of arm {arm!r}; after the address come +tokenizer=http://…, "
                "+cache=http://… or +metrics=http://…"
            )
        found[f"{name}_url"] = url
    return found


def _lenders(endpoints: Mapping[str, Any], serves: Mapping[str, list[str]]) -> dict[str, str]:
    """Arm without a tokenise route -> an arm that has one and serves the same models; only with several live arms."""
    if len(serves) < 2:
        return {}
    hello = [{"role": "user", "content": "Hello."}]
    has = {
        arm: run(tokens.tokenize_form(endpoint, serves[arm][0], hello))[1] is not None
        for arm, endpoint in endpoints.items()
        if serves.get(arm)
    }
    able = [arm for arm, counts_tokens in has.items() if counts_tokens]
    return {
        arm: lender
        for arm, counts_tokens in has.items()
        if not counts_tokens and (lender := next((a for a in able if serves[a] == serves[arm]), None))
    }


def check_endpoint(
    base_url: str, *, model: str | None = None, api_key: str | None = None, arm: str = "target",
    timeout_s: float = 10.0, ca_file: str | None = None,
) -> list[str]:  # fmt: skip
    """Names of the models behind base_url. TargetError in one sentence when nothing answers, the key is refused or the
    model is not there.

    The sentence names the arm, never the address or the key.
    """
    try:
        found = [card["id"] for card in run(Endpoint(base_url, model, api_key, timeout_s, ca_file=ca_file).models())]
    except ValueError as error:
        raise TargetError(f"arm {arm!r}: {error}") from None
    except TransportError as error:
        if error.status in (401, 403):
            why = "set NEEDLEWORK_API_KEY to a valid key" if api_key else "no key was sent: set NEEDLEWORK_API_KEY"
            said = f"arm {arm!r} refuses the key ({error.status}); {why}"
        elif error.status is not None:
            said = f"arm {arm!r} answers /v1/models with status {error.status}; is it an OpenAI-compatible server?"
        elif error.failure == "malformed":
            said = f"arm {arm!r} answers /v1/models with something other than a list of models: {error.reason}"
        else:
            said = f"nothing answers for arm {arm!r}: {error.reason}"
        raise TargetError(said) from None
    if model and model not in found:
        serves = plain(private(", ".join(found)), 200)
        raise TargetError(f"arm {arm!r} serves no model {plain(private(model), 60)!r}; it serves: {serves}")
    return found


# ---- recorded runs ----


def _recorded(named: Mapping[str, str], spec: str, bundle: Bundle | None) -> Target:
    from needlework.probes import Recorded  # type: ignore[attr-defined,unused-ignore]

    arms: dict[str, Any] = {}
    for arm, part in named.items():
        folder = _run_folder(part.partition(":")[2] or _own_run(bundle), bundle)
        if len(named) > 1:
            arms[arm] = Recorded(folder)
            continue
        for recorded_arm in _arms_of(folder) or ["target"]:
            arms[recorded_arm] = Recorded(folder)
    return Target("recorded", spec, arms, {}, "recorded run, nothing is sent")


def _own_run(bundle: Bundle | None) -> str:
    """The run recorded by the notebook that asks (the runner tells its name, or Jupyter its path), else the incident's
    first."""
    names = (bundle or incidents.incident()).run_names
    own = os.environ.get("NEEDLEWORK_NOTEBOOK") or Path(os.environ.get("JPY_SESSION_NAME", "")).stem
    if not names:
        raise TargetError("this incident holds no recorded run; give recorded:<folder of a run>, or a live target")
    return own if own in names else names[0]


def _run_folder(name: str, bundle: Bundle | None) -> Path:
    if bundle is None:
        bundle = incidents.incident()
    for folder in (bundle.runs / name, Path(name)):
        if (folder / "trials.jsonl").is_file():
            return folder
    raise TargetError(
        f"no recorded run {plain(name, 60)!r}; incident {bundle.name} holds: {', '.join(bundle.run_names) or 'none'}"
    )


def _arms_of(folder: Path) -> list[str]:
    arms: dict[str, None] = {}
    with (folder / "trials.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                if isinstance(row := json.loads(line), dict) and row.get("arm"):
                    arms[str(row["arm"])] = None
    return list(arms)
