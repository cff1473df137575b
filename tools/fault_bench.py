"""Faults in real engines on one GPU: servers started, faults of tools/vllm_faults.py planted and taken out while they
run, and for each a journal of random prompts over the whole space: a diagnosis can be tried on what it has never seen.

    python tools/make_checkpoint.py --out OUT/model-0           # and --seed 1 --out OUT/model-1
    python tools/fault_bench.py all --out OUT --seconds 560     # vLLM; --site DIR when it is not installed
    python tools/fault_bench.py pack --out OUT --data data/engines/vllm

`all` starts servers (stations: one server, or a pair and one server beside it) and works through the cases that have no
journal yet, the strong faults first, until the seconds are over; call it again to go on. `stop` ends the servers. For
each case: the caches are emptied, the fault is planted, a few plain prompts show it, then the random prompts are asked.
`pack` keeps what is worth keeping and puts every run by a seeded coin into `validation` or `blind`, each class in both;
what was planted is in truth.json of each part alone. Needs a GPU of 100 GB with compute capability 9.0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pair_proxy  # these two beside this file
import vllm_faults
from needlework import probes
from needlework.probes.bench.prompts import Prompt, digest
from needlework.probes.bench.trial import Ask, with_seed
from needlework.serving import Endpoint, TransportError

NAME = "needlework-recall"
SHORTEST, LONGEST = 300, 30_000
PROMPTS = {"single": 330, "pair": 150}
HEALTHY = 12  # runs of each kind without a fault
TYPICAL_S = {"single": 42, "pair": 60}
GATEWAY_CODES = {"cut-prompt": "N1", "cut-hidden": "N1", "cap-tokens": "N3", "stale-answer": "F16"}
GATEWAY_SOURCES = {"cut-prompt": "ollama#3839", "cut-hidden": "ollama#17427", "cap-tokens": "ninfer#171",
                   "stale-answer": "LMCache#3388"}  # fmt: skip
SHOWN = ((400, 0.5), (1500, 0.1), (3000, 0.5), (5000, 0.3), (9000, 0.1), (16_000, 0.6))


@dataclass(frozen=True)
class Station:
    """kind: "single", or "pair" with a single server beside it; chunk: tokens of one prefill pass; pool: GiB of cache;
    seed: of the checkpoint; graphs: CUDA graphs on; prefix: prefix cache on."""

    kind: str
    chunk: int
    pool: float = 3.0
    seed: int = 0
    graphs: bool = False
    prefix: bool = True

    @property
    def roles(self) -> tuple[str, ...]:
        return ("one",) if self.kind == "single" else ("one", "prefill", "decode")


STATIONS = {
    "s0": Station("single", 8192),
    "s1": Station("single", 2048),
    "s2": Station("single", 1024, pool=0.4),
    "s3": Station("single", 8192, graphs=True),
    "s4": Station("single", 4096, seed=1),
    "s5": Station("single", 2048, prefix=False),
    "p0": Station("pair", 2048),
    "p1": Station("pair", 4096, seed=1),
    "p2": Station("pair", 1024),
}
ONLY_SMALL = {"evicted-alive"}  # blocks must come round within a run
ONLY_LARGE = {"short-key", "address-wrap"}  # blocks of many prompts must be there at once
ONLY_CHUNKED = {"chunk-head", "chunk-positions", "own-chunk"}
OUTSIDE_GRAPHS = {
    "hit-stale-tail",
    "published-unwritten",
    "short-key",
    "late-write",
    "bystander",
    *GATEWAY_CODES,
    "none",
}
NEEDS_PREFIX = {
    "hit-stale-tail",
    "hit-without-index",
    "published-unwritten",
    "short-key",
    "evicted-alive",
    "trimmed-wrong",
}


@dataclass(frozen=True)
class Case:
    """One run: which fault at which strength, in which server of a pair ("" for a single one), and its number."""

    kind: str
    fault: str
    strength: str = "severe"
    arm: str = ""
    number: int = 0

    @property
    def name(self) -> str:
        return ".".join(filter(None, (self.kind, self.fault, self.strength, self.arm, str(self.number))))

    @property
    def code(self) -> str:
        if self.fault == "none":
            return "healthy"
        return GATEWAY_CODES.get(self.fault) or vllm_faults.CATALOG[self.fault].code

    def fits(self, station: Station) -> bool:
        return (
            station.kind == self.kind
            and not (self.fault in ONLY_SMALL and station.pool > 1)
            and not (self.fault in ONLY_LARGE and station.pool < 1)
            and not (self.fault in ONLY_CHUNKED and station.chunk > 2048)
            and not (self.fault in NEEDS_PREFIX and not station.prefix)
            and not (station.graphs and self.fault not in OUTSIDE_GRAPHS)
        )


def cases() -> list[Case]:
    """All runs: healthy ones among the faults, strong faults before mild ones."""
    strong, mild = [], []
    for name, fault in vllm_faults.CATALOG.items():
        for arm in fault.arms:
            for strength in fault.strengths:
                one = Case("single", name, strength) if arm == "single" else Case("pair", name, strength, arm)
                transfer = "single" not in fault.arms or arm == "single"  # else severe alone: seen on one server too
                if strength == "severe":
                    strong.append(one)
                elif transfer:
                    mild.append(one)
    for name, strengths in pair_proxy.FAULTS.items():
        strong.append(Case("single", name, "severe"))
        strong += [Case("pair", name, "severe", "gateway")] if name in ("cut-prompt", "stale-answer") else []
        mild += [Case("single", name, "mild")] if "mild" in strengths else []
    random.Random(7).shuffle(strong)
    random.Random(8).shuffle(mild)
    strong.sort(key=lambda one: one.kind == "pair" and "single" in getattr(
        vllm_faults.CATALOG.get(one.fault), "arms", ("single",)))  # fmt: skip
    found = [*strong, *mild]
    for kind, every in (("single", 5), ("pair", 3)):
        for number in range(HEALTHY):
            places = [i for i, one in enumerate(found) if one.kind == kind]
            found.insert(places[number * every], Case(kind, "none", number=number))
    return found


# ---- servers ----


def port_of(base: int, name: str, role: str) -> int:
    return base + 4 * list(STATIONS).index(name) + ("one", "prefill", "decode").index(role)


def command(options: argparse.Namespace, name: str, role: str) -> list[str]:
    station = STATIONS[name]
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
        str(options.out / f"model-{station.seed}"),
        "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port_of(options.port, name, role)),
        "--enable-prompt-tokens-details", "--kv-cache-dtype", "fp8_ds_mla", "--block-size", "64",
        "--max-model-len", "32768",
        "--max-num-batched-tokens", str(station.chunk), "--max-num-seqs", "8", "--gpu-memory-utilization", "0.07",
        "--kv-cache-memory-bytes", str(int(station.pool * 2**30)), "--worker-extension-cls", "vllm_worker.Extension",
        *(["--cudagraph-capture-sizes", "1", "2", "4", "8"] if station.graphs else ["--enforce-eager"]),
        *([] if station.prefix else ["--no-enable-prefix-caching"]),
        *(["--kv-transfer-config", transfer] if role != "one" else []),
    ]  # fmt: skip


def serve(options: argparse.Namespace) -> dict[str, subprocess.Popen[bytes]]:
    """Start the servers of all stations that do not run yet, each in a session of its own; returns those."""
    here = Path(__file__).resolve().parent
    paths = [*([str(options.site)] if options.site else []), str(here), str(here.parent / "lib")]
    switches = {
        "PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_DEEP_GEMM_WARMUP": "skip", "PYTHONUNBUFFERED": "1",
        # one GPU shared by all: fragments of 8 KB wait for its turn each (8 MB/s), those of 1 MB hardly (280 MB/s)
        "UCX_TLS": "tcp,cuda_copy,self", "UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    known = options.out / "pids.json"
    pids = json.loads(known.read_text()) if known.exists() else {}
    servers = {}
    for name in options.stations.split(","):
        for role in STATIONS[name].roles:
            if f"{name}-{role}" in pids:
                continue
            port = port_of(options.port, name, role)
            with open(options.out / f"{name}-{role}.log", "wb") as log:
                child = subprocess.Popen(
                    command(options, name, role), stdout=log, stderr=log, start_new_session=True,
                    env=os.environ | switches | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 200)},
                )  # fmt: skip
            servers[f"{name}-{role}"] = child
    known.write_text(json.dumps(pids | {name: child.pid for name, child in servers.items()}))
    return servers


def stop(options: argparse.Namespace) -> None:
    for pid in json.loads((options.out / "pids.json").read_text()).values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)


def order(url: str, do: str, **more: Any) -> dict[str, Any]:
    """One order to the worker behind a server. Raises RuntimeError with what the worker says."""
    body = {"method": "needlework", "args": [json.dumps({"do": do, **more})]}
    answer = httpx.post(f"{url}/collective_rpc", json=body, timeout=60)
    result = answer.json()["results"][0] if answer.status_code == 200 else {"problem": answer.text[:300]}
    if "problem" in result:
        raise RuntimeError(f"{do}: {result['problem']}")
    return result


# ---- prompts ----


Step = tuple[str, list[Ask]]  # how ("ask" one after the other or together, "drop", "turn"), and what


def steps(seed: int, count: int, longest: int = LONGEST) -> list[Step]:
    """`count` random prompts over the whole space as steps: alone or 2 to 8 together, about one in six asked before,
    a few four times, nine dropped and followed by others, follow-up turns, absent keys."""
    dice = random.Random(f"fault bench {seed}")
    number, few = 0, 4 if count < 200 else 9

    def fresh(low: int = SHORTEST, high: int = longest, **more: Any) -> Ask:
        nonlocal number
        number += 1
        depth = dice.choice((0.0, 1.0)) if dice.random() < 0.15 else dice.random()
        tokens = round(math.exp(dice.uniform(math.log(low), math.log(high))))
        spec = probes.PromptSpec(tokens, round(depth, 4), **more)
        return Ask("bench", with_seed(spec, seed, number))

    plain: list[Ask] = []
    for _ in range(count - 4 * few - 2 * few - 4 * (few // 2)):
        old = [a for a in plain[-40:] if not a.send and not a.label]
        if old and dice.random() < 1 / 6:
            again = dice.choice(old)
            sends = sum(a.prompt == again.prompt for a in plain)
            plain.append(replace(again, send=sends, cache="warm", label="again"))
        else:
            plain.append(fresh())
    plain += [fresh(control="absent") for _ in range(few)]
    for _ in range(few // 2):
        once = fresh()
        plain += [replace(once, send=s, label="repeat") for s in range(4)]
    rare = few + 4 * (few // 2)
    tail, plain = plain[-rare:], plain[:-rare]
    for one in tail:
        plain.insert(dice.randrange(len(plain) + 1), one)
    made: list[Step] = []
    while plain:
        size = dice.randint(2, 8) if dice.random() < 0.13 else 1
        group, plain = plain[:size], plain[size:]
        made.append(("ask", [replace(a, concurrency=len(group)) for a in group]))
    for _ in range(few):
        victim = replace(fresh(8000), label="dropped", concurrency=2, repeat=dice.randrange(8, 100))
        after = [replace(fresh(), label="after drop", concurrency=2) for _ in range(2)]
        back = replace(victim, label="dropped again", cache="warm", send=1, concurrency=1, repeat=0)
        made.insert(dice.randrange(len(made) + 1), ("drop", [victim, *after, back]))
    for _ in range(few):
        turn = replace(fresh(high=12_000), label="turn", cache="warm", turn=2)
        made.insert(dice.randrange(len(made) + 1), ("turn", [turn]))
    return made


async def earlier(ask: Ask, prompt: Prompt, endpoint: Endpoint) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The notes in a first turn, answered; the question is a turn of its own."""
    body, _, question = prompt.text.rpartition("\n\n")
    told = [{"role": "user", "content": f"{body}\nKeep these notes in mind and answer OK."}]
    reply = await endpoint.chat(told, max_tokens=16)
    said = {"role": "assistant", "content": reply.text or "OK."}
    return [*told, said, {"role": "user", "content": question}], {}


async def dropped(bench: probes.Bench, victim: Ask, after: list[Ask]) -> None:
    """Send a prompt, hang up after its `repeat` milliseconds, and ask others at once."""
    prompt = await bench.build(victim)
    for one in after:
        await bench.build(one)
    bench.count(prompt.counted_tokens)
    row = bench.row(victim, prompt) | {"outcome": "cut", "prompt_tokens": prompt.counted_tokens, "concurrency": 2}
    sending = asyncio.create_task(bench.endpoint.chat(prompt.messages, max_tokens=64))
    await asyncio.wait({sending}, timeout=victim.repeat / 1000)
    late = sending.done()
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError, TransportError):
        await sending
    bench.write(row | {"aborted": "too late" if late else "by disconnect"})
    await asyncio.gather(*(bench.trial(one) for one in after))


def ask_steps(benches: dict[str, probes.Bench], made: list[Step], dice: random.Random, until: float) -> str:
    """Send the steps to every arm, in an order by dice; returns why it ended early, or ""."""
    for how, asks in made:
        arms = list(benches)
        dice.shuffle(arms)
        for arm in arms:
            if time.time() > until:
                return "out of time"
            bench, own = benches[arm], [replace(a, arm=arm) for a in asks]
            for one in own:
                bench.remember(one)
            try:
                if how == "drop":
                    bench.run(dropped(bench, own[0], own[1:3]))
                    bench.ask(own[3:])
                else:
                    bench.ask(own, concurrency=len(own), prepare=earlier if how == "turn" else None)
            except probes.Stopped as reason:
                return str(reason)
    return ""


# ---- a case ----


@contextlib.contextmanager
def planted(station: str, case: Case, base: int) -> Iterator[tuple[dict[str, Endpoint], list[dict[str, Any]]]]:
    """The arms of a station with the fault in place, and what each worker said of it."""
    roles = STATIONS[station].roles
    urls = {role: f"http://127.0.0.1:{port_of(base, station, role)}" for role in roles}
    wrong = case.fault in pair_proxy.FAULTS
    where = {"": ("one",), "all": roles, "gateway": ()}.get(case.arm, (case.arm,))
    said = []
    for role, url in urls.items():
        here = case.fault if role in where and not wrong else "none"
        said.append({"server": role, **order(url, "plant", name=here, strength=case.strength, seed=case.number)})
    broken = pair_proxy.FAULTS[case.fault][case.strength]() if wrong else None
    with contextlib.ExitStack() as stack:
        arms = {"single" if len(roles) == 1 else "combined": urls["one"]}
        if len(roles) > 1:
            address = stack.enter_context(pair_proxy.pair("vllm", urls["prefill"], urls["decode"], fault=broken))
            arms["pd"] = address
        elif broken is not None:
            arms["single"] = stack.enter_context(pair_proxy.gateway(urls["one"], fault=broken))
        yield {arm: Endpoint(url, NAME) for arm, url in arms.items()}, said


def benches_of(arms: dict[str, Endpoint], run: Path | None, probe: str) -> dict[str, probes.Bench]:
    """One bench an arm, with one journal and one builder."""
    found: dict[str, probes.Bench] = {}
    for arm, endpoint in arms.items():
        first = next(iter(found.values()), None)
        more = {} if first is None else {"journal": first.journal, "builder": first}
        found[arm] = probes.Bench(
            endpoint, run if first is None else None, probe=probe, arm=arm, progress=False, **more
        )
    return found


def shown(arms: dict[str, Endpoint], seed: int) -> list[dict[str, Any]]:
    """A few plain prompts: alone, again at once, six together, one dropped and asked again."""
    benches = benches_of(arms, None, "shown")
    made: list[Step] = [("ask", [Ask("shown", with_seed(probes.PromptSpec(n, d), seed, n))]) for n, d in SHOWN]
    made += [("ask", [replace(made[i][1][0], send=1, cache="warm", label="again")]) for i in (1, 4)]
    made.append(("ask", [Ask("shown", with_seed(probes.PromptSpec(n, 0.4), seed, n, 7), label="together", concurrency=6)
                         for n in (900, 2500, 3500, 5500, 8000, 12_000)]))  # fmt: skip
    first = Ask("shown", with_seed(probes.PromptSpec(15_000, 0.5), seed, 9), label="dropped", repeat=40)
    after = [Ask("shown", with_seed(probes.PromptSpec(n, 0.5), seed, n, 8), label="after drop") for n in (3000, 6000)]
    made.append(("drop", [first, *after, replace(first, label="dropped again", send=1, cache="warm", repeat=0)]))
    ask_steps(benches, made, random.Random(seed), time.time() + 40)
    rows = next(iter(benches.values())).journal.rows.values()
    kept = ("arm", "target_tokens", "prompt_tokens", "depth", "label", "expected", "answer", "outcome", "cached_tokens")
    return [{k: str(row.get(k))[:40] if k == "answer" else row.get(k) for k in kept} for row in rows
            if row["probe"] == "shown" and row["label"] != "dropped"]  # fmt: skip


def what_of(fault: str) -> str:
    """A sentence on a fault."""
    if fault in vllm_faults.CATALOG:
        return vllm_faults.CATALOG[fault].what
    made = {"cut-prompt": pair_proxy.cut_prompt, "cut-hidden": pair_proxy.cut_prompt, 
            "cap-tokens": pair_proxy.cap_tokens, "stale-answer": pair_proxy.stale_answer}.get(fault)  # fmt: skip
    return "" if made is None else " ".join((made.__doc__ or "").split())


def run_case(options: argparse.Namespace, station: str, case: Case) -> dict[str, Any]:
    """One journal and its truth; what was wrong is in the truth's `problem`."""
    folder, started = options.out / "runs" / case.name, time.time()
    seed = int(digest(case.name, 7), 16)
    fault = vllm_faults.CATALOG.get(case.fault)
    truth: dict[str, Any] = {
        **asdict(case), "class": case.code, "station": {"name": station, **asdict(STATIONS[station])},
        "place": fault.place if fault else ("gateway" if case.code != "healthy" else ""), "problem": "",
        "source": fault.source if fault else GATEWAY_SOURCES.get(case.fault, ""),
        "what": what_of(case.fault),
        "parameters": fault.strengths[case.strength] if fault else {},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with planted(station, case, options.port) as (arms, said):
            truth["planted"] = said
            truth["shown"] = shown(arms, seed)
            truth["shown_s"] = round(time.time() - started, 1)
            benches = benches_of(arms, folder, "bench")
            longest = LONGEST if case.kind == "single" else 16_000
            made = steps(seed, options.prompts or PROMPTS[case.kind], longest)
            truth["ended"] = ask_steps(benches, made, random.Random(seed), options.until)
            for bench in benches.values():
                bench.close()
            urls = {r: f"http://127.0.0.1:{port_of(options.port, station, r)}" for r in STATIONS[station].roles}
            truth["failed"] = {role: order(url, "failed").get("failed", "") for role, url in urls.items()}
            rows = list(next(iter(benches.values())).journal.rows.values())
            truth["rows"] = len(rows)
            truth["outcomes"] = {}
            for row in rows:
                if row["probe"] == "bench":
                    per = truth["outcomes"].setdefault(row["arm"], {})
                    per[row["outcome"]] = per.get(row["outcome"], 0) + 1
    except (RuntimeError, ValueError, OSError, httpx.HTTPError, KeyError) as problem:
        truth["problem"] = f"{type(problem).__name__}: {str(problem)[:600]}"
    truth["seconds"] = round(time.time() - started, 1)
    (folder / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")
    wrong = [row for row in truth.get("shown", ()) if row["outcome"] != "exact"]
    counts = {arm: f"{per.get('exact', 0)}/{sum(per.values())}" for arm, per in truth.get("outcomes", {}).items()}
    print(f"{station} {case.name} {case.code}: shown {len(wrong)}/{len(truth.get('shown', ()))}, {counts}, "
          f"{truth['seconds']} s {truth.get('ended', '')} {truth['problem']} "
          f"{''.join(truth.get('failed', {}).values())}", flush=True)  # fmt: skip
    return truth


def station_main(options: argparse.Namespace) -> int:
    """Wait for a station's servers, warm them, then take cases until there are none or the time is over."""
    name = options.station
    urls = [f"http://127.0.0.1:{port_of(options.port, name, role)}" for role in STATIONS[name].roles]
    waited = time.time()
    for url in urls:
        while not _answers(url):
            if time.time() > options.until or any(options.out.glob(f"{name}-*.ended")):
                print(f"{name}: no answer from {url} after {time.time() - waited:.0f} s", flush=True)
                return 1
            time.sleep(0.5)
    print(f"{name} up after {time.time() - options.started:.0f} s", flush=True)
    leader = options.stations.split(",")[0]
    flag = options.out / "warm"
    while name != leader and not flag.exists() and time.time() < waited + 150:
        time.sleep(0.3)
    arms = {role: Endpoint(url, NAME) for role, url in zip(STATIONS[name].roles, urls, strict=True)}
    shown({role: endpoint for role, endpoint in arms.items() if role == "one" or name == leader}, 1)
    flag.touch()
    print(f"{name} warm after {time.time() - options.started:.0f} s", flush=True)
    claims = options.out / "claims"
    claims.mkdir(exist_ok=True)
    chosen = options.cases.split(",") if options.cases else None
    for case in cases():
        if time.time() > options.until - TYPICAL_S[case.kind]:
            break
        if not case.fits(STATIONS[name]) or (chosen and not any(case.name.startswith(c) for c in chosen)):
            continue
        try:
            os.close(os.open(claims / case.name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        truth = run_case(options, name, case)
        if not all(_answers(url) for url in urls):
            print(f"{name}: a server ended under {case.name} {truth['problem']}", flush=True)
            return 1
    return 0


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=3).status_code == 200
    except httpx.HTTPError:
        return False


def all_stations(options: argparse.Namespace) -> int:
    """Servers and stations; ends when every station has."""
    options.out.mkdir(parents=True, exist_ok=True)
    servers = serve(options)
    line = [sys.executable, __file__, "station", "--out", str(options.out), "--port", str(options.port), "--stations",
            options.stations, "--started", str(options.started), "--until", str(options.until), "--cases",
            options.cases, "--prompts", str(options.prompts)]  # fmt: skip
    children = [subprocess.Popen([*line, "--station", name]) for name in options.stations.split(",")]
    while any(child.poll() is None for child in children):
        for name in [name for name, server in servers.items() if server.poll() is not None]:
            log = (options.out / f"{name}.log").read_text(errors="replace").splitlines()
            print(f"{name} ended with {servers.pop(name).returncode}:", *log[-25:], sep="\n", flush=True)
            (options.out / f"{name}.ended").touch()
        time.sleep(1)
    return max(child.returncode for child in children)


# ---- what is kept ----

KEPT = ("trial_id", "probe", "arm", "time", "target_tokens", "prompt_tokens", "depth", "needle_token", "expected",
        "answer", "outcome", "score", "finish_reason", "completion_tokens", "cached_tokens", "cache", "wanted_cache",
        "turn", "concurrency", "ordinal", "ttft_s", "latency_s", "seed", "repeat", "send", "label", "control",
        "answered_from", "aborted", "error")  # fmt: skip
FEWEST = 80  # answers of an arm, or a run that was cut short is left out
PARTS = ("validation", "blind")


def coin(found: list[tuple[str, str]], seed: int = 19) -> dict[str, str]:
    """(name, stratum) of every run -> the part it goes to, by seeded dice: each stratum in both, parts of one size."""
    dice, parts = random.Random(f"fault bench {seed}"), {}
    for stratum in sorted({stratum for _, stratum in found}):
        names = sorted(name for name, own in found if own == stratum)
        dice.shuffle(names)
        have = [list(parts.values()).count(part) for part in PARTS]
        first = dice.randrange(2) if have[0] == have[1] else have.index(min(have))
        parts |= {name: PARTS[(first + i) % 2] for i, name in enumerate(names)}
    return parts


def measured(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """arm -> [answers that were not exact, answers], of the random prompts; a dropped request has none."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        if row["probe"] == "bench" and row["label"] != "dropped" and row["outcome"] != "transport":
            count = counts.setdefault(row["arm"], [0, 0])
            count[0] += row["outcome"] != "exact"
            count[1] += 1
    return counts


def pack(options: argparse.Namespace) -> None:
    """Journals with what an analysis reads, under names that say nothing, and truth.json in each part. A run in which
    nothing was lost although a fault was planted is left out: it is not shown to be one."""
    found = {}
    for out in options.runs:
        for path in sorted(out.glob("runs/*/truth.json")):
            truth = json.loads(path.read_text())
            rows = [json.loads(line) for line in (path.parent / "trials.jsonl").read_text().splitlines()]
            rows = [row for row in rows if row["probe"] != "calibration"]
            counts = measured(rows)
            faulty = truth["class"] != "healthy"
            if min(n for _, n in counts.values()) < FEWEST or (faulty and not any(bad for bad, _ in counts.values())):
                continue
            found[f"{out.name}/{path.parent.name}"] = (truth, rows, counts)
    stratum = {n: t["class"] if t["class"] != "healthy" else f"healthy {t['kind']}" for n, (t, _, _) in found.items()}
    parts = coin(list(stratum.items()))
    truths: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, (truth, rows, counts) in found.items():
        run = f"r{digest(name, 6)}"
        folder = options.data / parts[name] / run
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for row in rows:
            kept = {k: row[k] for k in KEPT if row.get(k) not in (None, "")}
            kept |= {"answer": str(row["answer"])[:40]} if row.get("answer") else {}
            kept |= {k: round(row[k], 3) for k in ("ttft_s", "latency_s", "score") if row.get(k) is not None}
            lines.append(json.dumps({"run": run, **kept}, ensure_ascii=False, separators=(",", ":")))
        text = "\n".join(lines) + "\n"
        (folder / "trials.jsonl").write_text(text, encoding="utf-8")
        station = truth["station"]
        config = {"topk": 2048, "ratio": 1, "page": 64, "chunk": station["chunk"]}
        note = {"schema": 1, "engine": options.engine, "deployment": truth["kind"], "config": config}
        (folder / "manifest.json").write_text(json.dumps(note, indent=1) + "\n")
        plain = [row for row in truth.get("shown", ()) if row["outcome"] != "exact"]
        names = ("arm", "prompt_tokens", "label", "expected", "answer", "outcome")
        truths[parts[name]][run] = {
            **{k: truth[k] for k in ("class", "fault", "strength", "kind", "arm", "place", "source", "what")},
            "parameters": truth["parameters"], "caution": truth.get("caution", ""),
            "station": station, "ended": truth.get("ended", ""), "problem": truth["problem"], "lost": counts,
            "shown": {"lost": len(plain), "asked": len(truth.get("shown", ())),
                      "examples": [{k: row[k] for k in names} for row in plain[:3]]},
            "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        }  # fmt: skip
    about = json.loads(options.about.read_text()) if options.about else {}
    for part, runs in truths.items():
        (options.data / part / "truth.json").write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")
        print(part, len(runs), sorted(one["class"] for one in runs.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("all", "station", "stop", "list", "pack"))
    parser.add_argument("--out", type=Path, default=Path("fault-bench"))
    parser.add_argument("--site", type=Path, help="folder with vLLM and what it needs, if they are not installed")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--stations", default=",".join(STATIONS))
    parser.add_argument("--station", default="")
    parser.add_argument("--cases", default="", help="names of cases begin so; all by default")
    parser.add_argument("--prompts", type=int, default=0, help="a run; by default 360 for one server, 210 for a pair")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing after that")
    parser.add_argument("--started", type=float, default=0.0)
    parser.add_argument("--until", type=float, default=0.0)
    parser.add_argument("--data", type=Path, help="pack: folder for what is kept")
    parser.add_argument("--runs", type=Path, nargs="*", help="pack: several folders like --out")
    parser.add_argument("--about", type=Path, help="pack: JSON of versions and card, for the truth")
    parser.add_argument("--engine", default="vllm 0.23.0")
    options = parser.parse_args()
    options.started = options.started or time.time()
    options.until = options.until or time.time() + options.seconds
    options.out = options.out.resolve()
    if options.what == "pack":
        options.runs = options.runs or [options.out]
        pack(options)
        return 0
    if options.what == "list":
        for case in cases():
            print(case.name, case.code)
        return 0
    if options.what == "stop":
        stop(options)
        return 0
    return station_main(options) if options.what == "station" else all_stations(options)


if __name__ == "__main__":
    sys.exit(main())
