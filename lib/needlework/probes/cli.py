"""`needlework probe INSTRUMENT URL`: options are the instrument's own parameters."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from needlework import probes
from needlework.serving import Endpoint, TransportError, capabilities, run

from .bench.budget import Budget, Limits
from .bench.trial import Stopped, resolve

INSTRUMENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "recall": (probes.recall, "recall against length and depth"),
    "cliff": (probes.find_cliff, "the length at which recall falls, to the token"),
    "residues": (probes.scan_residues, "does recall depend on the length's residue"),
    "depth": (probes.depth_profile, "recall against the place in the prompt"),
    "warm": (probes.warm_cold, "cold against warm prefix"),
    "turns": (probes.turns, "follow-up turns, continued and re-sent"),
    "abort": (probes.abort, "what an interruption leaves behind"),
    "echo": (probes.echo, "concurrency 1 against N"),
    "drift": (probes.drift, "recall against request count"),
    "coherence": (probes.coherence, "coherence of text beside recall"),
    "pool": (probes.pool, "several backends behind one name?"),
    "reload": (probes.reload, "a prefix that was pushed out of the device's pool and came back"),
    "arms": (probes.compare_arms, "two deployments on identical prompts: NAME=URL NAME=URL"),
}
OWN = {"endpoint", "arms", "run", "limits", "confirm", "progress", "options"}
FLUSH_WORD = "flush"
# options that several instruments have and whose docstrings need not repeat
TOLD = {
    "lengths": "tokens of the prompts",
    "length": "tokens of a prompt",
    "depths": "places of the fact: 0 first, 1 last before the question",
    "depth": "place of the fact: 0 first, 1 last before the question",
    "repeats": "times that each is asked, in fresh text",
    "rounds": "times that each stage is tried",
    "distractors": "facts with a similar key or value that are never asked",
    "style": "how the question asks: literal, relation or chain",
    "concurrency": "requests in flight",
    "trials": "known answers that are asked",
    "tolerance": "tokens by which a prompt may miss its length (of cliff: the width of the interval, as a share)",
    "max_tokens": "tokens of an answer",
    "thinking": "let the model think before it answers",
    "sends": "times that the prompt is sent",
    "warm_sends": "times that a prompt is sent again",
    "canaries": "questions in time",
    "between": "other requests between two canaries",
    "prompts": "facts that are asked, pushed out, and asked again",
    "low": "shortest prompt in tokens",
    "high": "longest prompt in tokens",
    "start": "first length in tokens",
}


def main(argv: list[str]) -> int:
    """Run one instrument; 0 healthy, 1 a finding (or nothing could be proved), 2 user error."""
    args = _parser().parse_args(argv)
    try:
        if args.instrument == "what":
            print(run(_what(_endpoint(args.url[0], args))))
            return 0
        if args.instrument == "flush":
            return _flush(args)
        return _measure(args)
    except TransportError as error:
        raise RuntimeError(f"the endpoint does not answer: {error.reason}") from None
    except Stopped as error:
        raise RuntimeError(str(error)) from None


def _measure(args: argparse.Namespace) -> int:
    function = INSTRUMENTS[args.instrument][0]
    options = {name: getattr(args, name) for name in _parameters(function)}
    limits = Limits(args.max_requests_sent, args.max_prompt_tokens, args.max_minutes, args.max_cost, args.price)
    if args.max_cost is not None and args.price is None:
        raise ValueError("--max-cost needs --price (money for a million prompt tokens)")
    target: Any
    if args.instrument == "arms":
        if len(args.url) != 2 or not all("=" in u.split("://")[0] for u in args.url):
            raise ValueError("arms needs two deployments, for example combined=http://host:1 pd=http://host:2")
        pairs = [u.split("=", 1) for u in args.url]
        target = {name: _endpoint(url, args) for name, url in pairs}
    else:
        if len(args.url) != 1:
            raise ValueError(f"{args.instrument} takes one URL")
        target = _endpoint(args.url[0], args)
    result = function(
        target,
        args.run,
        **options,
        limits=limits,
        confirm=confirm_in_terminal(args.yes),
        progress=True,
    )
    print(result)
    if len(result.table):
        print(result.table.to_string(index=False, max_colwidth=60))
    for warning in result.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return 0 if result.verdict == "healthy" and not result.stopped else 1


def confirm_in_terminal(yes: bool) -> Callable[[Budget], bool]:
    """Shows a budget and asks whether to send it; `yes` shows it only."""

    def ask(budget: Budget) -> bool:
        print(f"budget: {budget}", file=sys.stderr)
        if yes:
            return True
        if not sys.stdin.isatty():
            raise ValueError("add --yes to send the requests of this budget without being asked")
        try:
            return input("send them? [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:  # Ctrl-D
            return False

    return ask


def _endpoint(url: str, args: argparse.Namespace) -> Any:
    if url.startswith("recorded:"):
        return resolve(url)[1]
    return Endpoint(
        url, args.model, key_from(args.api_key_env), args.timeout, tokenizer_url=args.tokenizer_url,
        cache_url=args.cache_url, ca_file=args.ca,
    )  # fmt: skip


def key_from(variable: str | None) -> str | None:
    """The key that an environment variable holds; ValueError, which does not repeat what was given: it may be a key."""
    key = os.environ.get(variable or "NEEDLEWORK_API_KEY")
    if variable and not key:
        raise ValueError(
            "--api-key-env takes the name of an environment variable that is set, not a key: put the key into one, "
            "for example NEEDLEWORK_API_KEY, which is read without this option"
        )
    return key


async def _what(endpoint: Any) -> str:
    if not isinstance(endpoint, Endpoint):
        raise ValueError("what needs a live endpoint")
    found = await capabilities.discover(endpoint)
    return "\n".join([str(found), *(f"note: {n}" for n in found.notes)])


def _flush(args: argparse.Namespace) -> int:
    if args.word != FLUSH_WORD:
        raise ValueError(
            "flushing drops the prefix cache for every user of this server; "
            f"if that is wanted, say so with --word {FLUSH_WORD}"
        )
    endpoint = _endpoint(args.url[0], args)
    if not isinstance(endpoint, Endpoint):
        raise ValueError("flush needs a live endpoint")
    run(capabilities.flush(endpoint))
    print("the server was asked to flush its prefix cache; prove it cold by cached tokens (probe warm)")
    return 0


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The instrument's own options; the depth profile passes the rest on to recall."""
    found = dict(inspect.signature(function).parameters)
    if "options" in found:
        skip = {"lengths", "probe"}
        found = {**{k: v for k, v in inspect.signature(probes.recall).parameters.items() if k not in skip}, **found}
    return {name: p for name, p in found.items() if name not in OWN and name != "probe"}


def _parser() -> argparse.ArgumentParser:
    top = _Parser(prog="needlework probe", description="Measure a live OpenAI-compatible endpoint.")
    verbs = top.add_subparsers(dest="instrument", required=True, metavar="INSTRUMENT")
    for name, (function, text) in INSTRUMENTS.items():
        verb = verbs.add_parser(
            name, help=text, description=inspect.getdoc(function), formatter_class=_Formatter, allow_abbrev=False
        )
        _common(verb)
        verb.add_argument("--run", metavar="DIR", help="folder of the journal; a run that was stopped goes on from it")
        verb.add_argument("--yes", action="store_true", help="send without asking once the budget is shown")
        verb.add_argument("--max-requests-sent", type=int, metavar="N", help="stop after so many requests")
        verb.add_argument("--max-prompt-tokens", type=int, metavar="N", help="stop after so many prompt tokens")
        verb.add_argument("--max-minutes", type=float, metavar="M", help="stop after so many minutes")
        verb.add_argument("--price", type=float, metavar="P", help="money for a million prompt tokens")
        verb.add_argument("--max-cost", type=float, metavar="C", help="stop when so much money is spent")
        told = TOLD | _told(inspect.getdoc(function) or "")
        for option, parameter in _parameters(function).items():
            _add(verb, option, parameter, told.get(option, ""))
    what = verbs.add_parser("what", help="what the endpoint can do, by asking it", allow_abbrev=False)
    flush = verbs.add_parser(
        "flush", help="drop the server's prefix cache (affects its other users)", allow_abbrev=False
    )
    flush.add_argument("--word", default="", help=f"say {FLUSH_WORD!r} to confirm")
    for verb in (what, flush):
        _common(verb)
    return top


def _common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("url", nargs="+", metavar="URL", help="base URL without /v1, or recorded:DIR")
    verb.add_argument("--model", help="model name; default: the first one that is listed")
    verb.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key (NEEDLEWORK_API_KEY)")
    verb.add_argument("--ca", metavar="FILE", help="certificates to trust, for a server that signed its own")
    verb.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds for one request")
    verb.add_argument(
        "--tokenizer-url", metavar="URL", help="where to count tokens when URL is a router without /tokenize"
    )
    verb.add_argument(
        "--cache-url", metavar="URL", help="the prefill server of a pair whose answers cannot prove warm (see what)"
    )


def _told(doc: str) -> dict[str, str]:
    """What a docstring says of each option: "name  text", with continued lines further in."""
    told: dict[str, str] = {}
    name = ""
    for line in doc.split("\n"):
        if match := re.match(r"(\w+)\s{2,}(\S.*)", line):
            name, told[match[1]] = match[1], match[2]
        elif name and line.startswith("  ") and line.strip():
            told[name] += " " + line.strip()
        else:
            name = ""
    return told


def _add(verb: argparse.ArgumentParser, name: str, parameter: inspect.Parameter, told: str) -> None:
    flag, default, annotation = "--" + name.replace("_", "-"), parameter.default, str(parameter.annotation)
    told = told.replace("%", "%%")
    shown = f"{told} (default {default if not isinstance(default, tuple) else ','.join(map(str, default))})".strip()
    more: dict[str, Any] = {"default": default, "help": shown}
    if default is inspect.Parameter.empty:
        more = {"required": True, "type": int, "metavar": "N", "help": told}
    elif isinstance(default, bool):
        more |= {"action": argparse.BooleanOptionalAction, "help": told}
    elif isinstance(default, tuple):
        kind = type(default[0]) if default else float if "float" in annotation else int
        more |= {"type": _listed(kind), "metavar": "A,B,…"}
    elif name == "config":
        more = {"type": constants, "metavar": "topk=512,ratio=4", "help": told}
    elif default is None:
        more = {"type": float, "metavar": "X", "help": told} if "float" in annotation else {
            "type": int, "metavar": "N", "help": told
        }  # fmt: skip
    else:
        more |= {"type": type(default), "metavar": {int: "N", float: "X"}.get(type(default), "NAME")}
    verb.add_argument(flag, **more)


def _listed(kind: type) -> Callable[[str], tuple]:
    def parse(text: str) -> tuple:
        return tuple(kind(part) for part in text.split(",") if part.strip())

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def constants(text: str) -> Mapping[str, float]:
    """`topk=512,ratio=4` as a mapping; raises ValueError."""
    return {k.strip(): float(v) for k, _, v in (part.partition("=") for part in text.split(","))}


class _Parser(argparse.ArgumentParser):
    """Says which option it does not know, and never what stood behind it: that may be a key."""

    def error(self, message: str) -> NoReturn:
        head, _, words = message.partition("unrecognized arguments: ")
        if words:
            named = " ".join(word.split("=")[0] for word in words.split() if word.startswith("-"))
            message = f"{head}unrecognized arguments: {named or 'see --help'}"
            if "key" in named:
                message += "; a key is read from an environment variable, see --api-key-env"
        super().error(message)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=110)
