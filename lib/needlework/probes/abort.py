"""What an interruption leaves behind: abort a request at a stage, then judge bystanders, follow-ups and counters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from needlework.serving import Endpoint, TransportError, gauges
from needlework.serving.replies import Unfinished

from .bench.bench import Bench, Common, Options, instrument
from .bench.budget import check_trials
from .bench.prompts import PromptSpec
from .bench.result import Result, foreign, outcomes, share, surprising, tally
from .bench.trial import Ask, Row, Target, with_seed

if TYPE_CHECKING:
    import pandas as pd

# share of the expected time to first token at which the request is dropped; decode waits for the first token
STAGES = {"queued": 0.0, "prefill": 0.4, "transfer": 0.95, "decode": None}
ROLES = ("bystander", "after", "followup")
SETTLE_S = 10.0
TRIES = 3  # of one abort, each with prompts of its own and half the waiting time, while the answer comes first
AGAIN = 1000
SHORTEST_BYSTANDER = 512  # tokens


@instrument()
def abort(
    endpoint: Target,
    run: str | Path | None = None,
    *,
    stages: Sequence[str] = ("queued", "prefill", "transfer", "decode"),
    rounds: int = 3,
    length: int = 4096,
    depth: float = 0.3,
    how: str = "disconnect",
    **options: Unpack[Options],
) -> Result:
    """Abort own requests at each stage, `rounds` times, and check what others and later requests see.

    how     "disconnect" (works everywhere), or "call": the server's abort route, where one was found. Only requests
            that this instrument sent are aborted, never others'.

    Each round sends a victim and a bystander together, drops the victim, then asks one fresh question at once (`after`:
    it may get the victim's pages) and the victim's question again (`followup`: its prefix may be cached, and
    overwritten). `.table` has one row a stage and role; `.details` holds `dishonest` (aborted answers that claim
    another finish reason) and `stuck` (rounds after which the running-requests gauge did not return; None without one).
    """
    common = Common(**options)
    for stage in stages:
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}; choose from {', '.join(STAGES)}")
    if how not in ("disconnect", "call"):
        raise ValueError("an abort is made by disconnect or by call")
    check_trials(len(stages) * rounds * (1 + len(ROLES)))
    base = common.spec(length, depth)

    def group_of(place: tuple[int, str], again: int) -> dict[str, Ask]:
        (r, stage), i = place, stages.index(place[1])
        return {role: ask_of(base, common.arm, stage, role, i, r + AGAIN * again, how) for role in ("victim", *ROLES)}

    places = [(r, stage) for r in range(rounds) for stage in stages]
    rows: list[Row] = []
    with common.bench("abort", endpoint, run) as bench:
        spare = 1 + (TRIES - 1) * len(places) * (1 + len(ROLES))  # the calm request, and aborts that came too late
        asks = (a for place in places for a in group_of(place, 0).values())
        common.begin(bench, base, asks, spare=spare, tokens=spare * max(length, SHORTEST_BYSTANDER))
        if how == "call" and bench.capabilities.abort_path is None:
            raise ValueError("this endpoint has no abort route; use how='disconnect'")
        pace = _pace(bench, base, common.arm, rows)
        for place in places:
            for again in range(TRIES):
                got = interrupted(bench, group_of(place, again), pace, how)
                rows += got
                if got[0].get("aborted") != "too late":
                    break
                pace /= 2  # it was measured in a slow moment: the answer was there before the abort
    victims = [r for r in rows if r["label"].startswith("victim")]
    rows = [r for r in rows if not r["label"].startswith("victim")]
    details = _facts(victims)
    return bench.result(rows, _describe(rows, details), _table(rows), details)


def interrupted(bench: Bench, group: dict[str, Ask], pace: float, how: str = "disconnect") -> list[Row]:
    """The rows of a victim and of those around it, from the journal or by interrupting now."""
    for a in group.values():
        bench.remember(a)
    if not bench.holds(group["victim"]) and not bench.replay:
        bench.run(interrupt(bench, group, pace, how))
    return bench.ask(group.values())


def ask_of(base: PromptSpec, arm: str, stage: str, role: str, i: int, r: int, how: str = "disconnect") -> Ask:
    # the follow-up is the victim's prompt again; the others are fresh
    kind = "victim" if role == "followup" else role
    spec = with_seed(base, i, r, ("victim", "bystander", "after").index(kind))
    if role == "bystander":  # long enough to be under way when the victim is dropped
        spec = replace(spec, target_tokens=max(SHORTEST_BYSTANDER, base.target_tokens // 2))
    warm = "warm" if role == "followup" else "cold"
    return Ask("abort", spec, arm=arm, repeat=r, label=f"{role}/{stage}/{how}", cache=warm, concurrency=2)


def _pace(bench: Bench, base: PromptSpec, arm: str, rows: list[Row]) -> float:
    """Seconds to the first token of an undisturbed request of the victim's length."""
    (calm,) = bench.ask([Ask("abort", with_seed(base, 99), arm=arm, label="calm/none/none")])
    rows.append(calm)
    return float(calm.get("ttft_s") or calm.get("latency_s") or 0.2)


async def interrupt(bench: Bench, group: dict[str, Ask], pace: float, how: str) -> None:
    """Victim and bystander together; the victim is dropped at its stage; the gauges are read before and after."""
    assert bench.endpoint is not None
    victim = group["victim"]
    prompt = await bench.build(victim)
    for role in ("bystander", "after"):
        await bench.build(group[role])
    bench.count(prompt.counted_tokens)
    before = await _gauges(bench.endpoint)
    bystander = asyncio.create_task(bench.trial(group["bystander"]))
    row = bench.row(victim, prompt) | {"outcome": "cut", "prompt_tokens": prompt.counted_tokens}
    row |= await _drop(bench.endpoint, prompt.messages, victim, pace, how)
    # at once: the pages that the victim gives back are the next ones to be handed out
    await asyncio.gather(bystander, bench.trial(group["after"]))
    after = await _settled(bench.endpoint, before)
    row |= {f"{name}_before": v for name, v in before.items()} | {f"{name}_after": v for name, v in after.items()}
    bench.write(row)


async def _drop(endpoint: Endpoint, messages: list, victim: Ask, pace: float, how: str) -> dict[str, Any]:
    stage = victim.label.split("/")[1]
    first, sent = asyncio.Event(), asyncio.Event()
    rid = f"needlework-{victim.trial_id}"
    fields = {"rid": rid} if how == "call" else {}
    sending = asyncio.create_task(
        endpoint.chat(messages, max_tokens=256, on_sent=sent, on_first_token=first, fields=fields)
    )
    delay = STAGES[stage]
    waiting = asyncio.create_task((first if delay is None else sent).wait())
    await asyncio.wait({sending, waiting}, timeout=20 * pace + 30, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if delay is not None:  # counted from when the request has left: what never arrived cannot be aborted
        await asyncio.wait({sending}, timeout=max(0.01, delay * pace))
    if sending.done():  # the answer was faster than the abort
        with contextlib.suppress(TransportError):
            return {"finish_reason": sending.result().finish_reason, "aborted": "too late"}
        return {"aborted": "failed by itself"}
    if how == "call":
        path = endpoint.capabilities.abort_path
        try:
            await endpoint.post_text(path, {"rid": rid})
            reply = await asyncio.wait_for(sending, SETTLE_S)
            return {"finish_reason": reply.finish_reason, "answer": reply.text[:200], "aborted": "by call"}
        except Unfinished as ended:
            return {"finish_reason": ended.finish_reason, "answer": ended.text[:200], "aborted": "by call"}
        except (TransportError, TimeoutError) as error:
            return {"error": endpoint.scrub(error), "aborted": "by call"}
        finally:
            sending.cancel()
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError, TransportError):
        await sending
    return {"aborted": "by disconnect"}


async def _gauges(endpoint: Endpoint) -> dict[str, float | None]:
    found = await gauges.read(endpoint)
    return {name: found[name] for name in ("running", "waiting", "kv_used", "aborted")}


async def _settled(endpoint: Endpoint, before: dict[str, float | None]) -> dict[str, float | None]:
    """The gauges once the running requests are back at their base, or after ten seconds as they are."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        after = await _gauges(endpoint)
        back = after["running"] is None or before["running"] is None or after["running"] <= before["running"]
        if back or asyncio.get_running_loop().time() > deadline:
            return after
        await asyncio.sleep(0.2)


def _facts(victims: list[Row]) -> dict[str, Any]:
    aborted = [v for v in victims if str(v.get("aborted", "")).startswith("by")]
    reasons = [str(v["finish_reason"]) for v in aborted if v.get("finish_reason")]
    gauged = [v for v in aborted if v.get("running_after") is not None and v.get("running_before") is not None]
    return {
        "aborted": len(aborted),
        "too_late": sum(v.get("aborted") == "too late" for v in victims),
        "dishonest": [r for r in reasons if "abort" not in r and "cancel" not in r],
        "stuck": sum(v["running_after"] > v["running_before"] for v in gauged) if gauged else None,
    }


def _describe(rows: list[Row], details: dict[str, Any]) -> tuple[str, str]:
    judged = [r for r in rows if r["label"].split("/")[0] in ROLES]
    if not details["aborted"] or not outcomes(judged)[1]:
        return "No request could be aborted in time; use longer prompts.", "not proven"
    by = {role: [r for r in judged if r["label"].startswith(role + "/")] for role in ROLES}
    text = f"After {details['aborted']} aborts: bystanders {share(by['bystander'])}; the aborted prompt asked again "
    text += f"{share(by['followup'])}; fresh prompts afterwards {share(by['after'])}."
    bad = any(surprising(*outcomes(r), tests=3) for r in by.values())
    mixed = foreign(judged)
    if mixed:
        text += f" {mixed} answers hold the value of another request."
    if details["dishonest"]:
        text += f" {len(details['dishonest'])} aborted answers claim to have ended by {details['dishonest'][0]!r}."
    if details["stuck"]:
        text += f" After {details['stuck']} aborts the running-requests gauge did not come back."
    finding = bad or mixed or details["dishonest"] or details["stuck"]
    return text, "finding" if finding else "healthy"


def _table(rows: list[Row]) -> pd.DataFrame:
    names = {"stage": lambda row: row["label"].split("/")[1], "role": lambda row: row["label"].split("/")[0]}
    return tally(rows, names, ordered=False)
