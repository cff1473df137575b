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

from needlework.workbook import incidents
from needlework.workbook.tables import plain

FORMS = "lab, lab:pd:F14, vllm, http://…, a=http://…,b=http://…, or recorded:<run>"
_FAULT = re.compile(r"[FN]\d{1,2}")


class TargetError(ValueError):
    """A target that cannot be used; the message is one sentence that says what to do."""


class Arms(Mapping[str, Any]):
    """Arm name -> endpoint. An arm is started when it is first asked for, so a notebook pays only for what it uses."""

    def __init__(self, openers: Mapping[str, Callable[[], Any]]):
        self._openers = dict(openers)
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._openers:
            raise TargetError(f"this target has no arm {name!r}; it has: {', '.join(self._openers)}")
        if name not in self._open:
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
    incident: incidents.Incident | str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    check: bool = True,
) -> Iterator[Target]:
    """Open a target, close what it started.

    spec: see the module; NEEDLEWORK_TARGET overrides it, `lab` is the default. incident: its `[lab]` faults are what
    plain `lab` plants in the
    PD arm, and `recorded:<run>` is looked up in it. model, api_key: for http (NEEDLEWORK_MODEL and NEEDLEWORK_API_KEY
    otherwise).
    check: ask a live endpoint for its models first. Raises TargetError with one sentence: unknown target, dead
    endpoint, wrong key, no such model.
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
        if kind == "lab":
            yield _lab(stack, wanted, bundle)
        elif kind == "vllm":
            yield _vllm(stack, wanted)
        elif kind == "http":
            yield _http(named, wanted, model, api_key, check)
        else:
            yield _recorded(named, wanted, bundle)


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
    head = spec.split(":", 1)[0].lower()
    kind = {"lab": "lab", "vllm": "vllm", "http": "http", "https": "http", "recorded": "recorded"}.get(head)
    if kind is None:
        raise TargetError(f"unknown target {plain(spec, 60)!r}; use {FORMS}")
    return kind


# ---- lab ----


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


def _lab(stack: contextlib.ExitStack, spec: str, bundle: incidents.Incident | None) -> Target:
    settings = bundle.settings.get("lab", {}) if bundle else {}
    plan = parse_lab(spec, tuple(settings.get("faults", ())))
    options = {**{k: v for k, v in settings.items() if k in ("geometry", "seed")}, **plan.options}
    deployments = Arms(
        {
            arm: functools.partial(_start_lab, stack, {"mode": arm, "faults": plan.faults, **options})
            for arm in plan.arms
        }
    )
    planted = f"with {', '.join(plan.faults)} planted" if plan.faults else "healthy"
    arms = Arms({arm: functools.partial(_endpoint, deployments, arm) for arm in plan.arms})
    return Target(
        "lab", spec, arms, deployments, f"deployment in a box, geometry {options.get('geometry', 'v4')}, {planted}"
    )


def _start_lab(stack: contextlib.ExitStack, options: Mapping[str, Any]) -> Any:
    from needlework import lab

    return stack.enter_context(lab.start(**options))


def _endpoint(deployments: Mapping[str, Any], arm: str) -> Any:
    from needlework.serving import Endpoint

    deployment = deployments[arm]
    # a router has no /tokenize of its own; the prefill worker's is the one that counts
    tokenizer_url = getattr(deployment, "prefill_url", None) if arm == "pd" else None
    return Endpoint(deployment.base_url, tokenizer_url=tokenizer_url, repeatable=True)


# ---- a real engine ----


def _vllm(stack: contextlib.ExitStack, spec: str) -> Target:
    from needlework.serving import vllm

    if (why := vllm.missing()) is not None:
        raise TargetError(f"{why}; or use lab, a URL, or recorded:<run>")
    names = tuple(dict.fromkeys(spec.split(":", 1)[1].split(","))) if ":" in spec else vllm.MODES
    if unknown := [name for name in names if name not in vllm.MODES]:
        raise TargetError(f"the target vllm has the arms {' and '.join(vllm.MODES)}, not {plain(unknown[0], 40)!r}")
    # with both arms, the pair's decode server is the combined arm as well: one server less in memory
    mode = "pd" if "pd" in names else "combined"
    engine = functools.cache(lambda: stack.enter_context(vllm.start(mode)))
    deployments = Arms(dict.fromkeys(names, engine))
    return Target(
        "vllm",
        spec,
        Arms({arm: functools.partial(_engine_endpoint, engine, arm) for arm in names}),
        deployments,
        "vLLM on this machine's CPU",
    )


def _engine_endpoint(engine: Callable[[], Any], arm: str) -> Any:
    from needlework.serving import Endpoint

    running = engine()
    if arm == "combined":
        # its own salt: blocks that one arm has left in the server's cache must not answer for the other
        return Endpoint(running.decode_url, extra={"cache_salt": "combined"})
    prefill = running.prefill_url  # counts tokens, and knows what came out of its cache: the pair's answers do not
    return Endpoint(running.base_url, tokenizer_url=prefill, metrics_url=running.metrics_url, cache_url=prefill)


# ---- live URLs ----


def _http(named: Mapping[str, str], spec: str, model: str | None, api_key: str | None, check: bool) -> Target:
    from needlework.serving import Endpoint

    model = model or os.environ.get("NEEDLEWORK_MODEL") or None
    key = api_key or os.environ.get("NEEDLEWORK_API_KEY") or None
    endpoints, serves = {}, {}
    for arm, part in named.items():
        url, *roles = part.split("+")
        base = re.sub(r"/v1/?$", "", url.rstrip("/"))
        helpers: dict[str, Any] = _helpers(arm, roles)
        if check:
            serves[arm] = check_endpoint(base, model=model, api_key=key, arm=arm)
        endpoints[arm] = Endpoint(base, model=model, api_key=key, **helpers)
    said = f"{len(named)} live endpoint{'s' if len(named) > 1 else ''}"
    for arm, lender in _lenders(endpoints, serves).items():
        endpoints[arm].tokenizer_url = endpoints[lender].tokenizer_url or endpoints[lender].base_url
        said += f"; {arm} has no tokenise route, {lender} counts for it"
    return Target("http", ",".join(f"{arm}=live" for arm in named), endpoints, {}, said)


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
    from needlework.serving import run, tokens

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
    base_url: str, *, model: str | None = None, api_key: str | None = None, arm: str = "target", timeout_s: float = 10.0
) -> list[str]:
    """Names of the models behind base_url. TargetError in one sentence when nothing answers, the key is refused or the
    model is not there.

    The sentence names the arm, never the address or the key.
    """
    import httpx

    from needlework.serving.scrub import private

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=timeout_s, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TargetError(
            f"nothing answers for arm {arm!r} ({type(error).__name__}); check the address and that the server is up"
        ) from None
    if answer.status_code in (401, 403):
        raise TargetError(f"arm {arm!r} refuses the key ({answer.status_code}); set NEEDLEWORK_API_KEY to a valid key")
    if answer.status_code != 200:
        raise TargetError(
            f"arm {arm!r} answers /v1/models with status {answer.status_code}; is it an OpenAI-compatible server?"
        )
    try:
        found = [str(m["id"]) for m in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise TargetError(f"arm {arm!r} answers /v1/models with something other than a list of models") from None
    if model and model not in found:
        serves = plain(private(", ".join(found)), 200)
        raise TargetError(f"arm {arm!r} serves no model {plain(private(model), 60)!r}; it serves: {serves}")
    return found


# ---- recorded runs ----


def _recorded(named: Mapping[str, str], spec: str, bundle: incidents.Incident | None) -> Target:
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


def _own_run(bundle: incidents.Incident | None) -> str:
    """The run recorded by the notebook that asks (the runner tells its name, or Jupyter its path), else the incident's
    first."""
    names = (bundle or incidents.incident()).run_names
    own = os.environ.get("NEEDLEWORK_NOTEBOOK") or Path(os.environ.get("JPY_SESSION_NAME", "")).stem
    if not names:
        raise TargetError("this incident holds no recorded run; give recorded:<folder of a run>, or a live target")
    return own if own in names else names[0]


def _run_folder(name: str, bundle: incidents.Incident | None) -> Path:
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
