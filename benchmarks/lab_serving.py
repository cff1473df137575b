"""Serving figures of the lab through HTTP: start-up, first token by prompt length, the cost of the split, memory.

    python benchmarks/lab_serving.py [--lengths 2500 10000 65536] [--repeats 2]

Times are medians of wall-clock seconds from sending the request to its first streamed token; every prompt is new
(cached tokens are asserted to be 0). Memory is resident memory of both server processes after the longest prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import httpx
import needlework_lab as lab

SENTENCE = "The miller counted {} sacks of barley before the rain reached the lower meadow. "
WAVE_TOKENS = 12  # a first guess; the realised count is asked of the server


def prompt_of(deployment: lab.Deployment, tokens: int, salt: int) -> tuple[str, int]:
    """A prompt near `tokens` tokens that no cache has seen, and its length as the server counts it."""
    count, sentences = 0, tokens // WAVE_TOKENS
    text = ""
    for _ in range(4):
        text = f"Ledger {salt}. " + "".join(SENTENCE.format(salt * 7919 + i) for i in range(sentences)) + "What is it?"
        body = {"messages": [{"role": "user", "content": text}]}
        count = deployment.request(deployment.roles[0], "POST", "/tokenize", body)["count"]
        if abs(count - tokens) <= 0.01 * tokens:
            break
        sentences = max(1, round(sentences * tokens / count))
    return text, count


def first_token_s(deployment: lab.Deployment, text: str) -> tuple[float, float]:
    """(seconds to the first streamed token, seconds to the end) of a cold request."""
    body = {"model": "needlework-lookup", "messages": [{"role": "user", "content": text}], "max_tokens": 16}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began, first, usage = time.perf_counter(), None, None
    url = deployment.base_url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=300, trust_env=False) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                usage = json.loads(line[6:]).get("usage") or usage
    assert first is not None and usage is not None and usage["prompt_tokens_details"]["cached_tokens"] == 0
    return first, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2500, 10_000, 65_536])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--geometry", default="v4")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, geometry {arguments.geometry}\n")
    figures: dict[tuple[str, int], tuple[int, float, float]] = {}
    for mode in ("combined", "pd"):
        began = time.perf_counter()
        with lab.start(mode=mode, geometry=arguments.geometry) as deployment:
            print(f"{mode}: ready after {time.perf_counter() - began:.1f} s")
            for length in arguments.lengths:
                runs, count = [], 0
                for repeat in range(arguments.repeats):
                    text, count = prompt_of(deployment, length, 1 + repeat + 10 * length)
                    runs.append(first_token_s(deployment, text))
                first, whole = (statistics.median(column) for column in zip(*runs, strict=True))
                figures[mode, length] = count, first, whole
                print(f"  {count:>6} tokens: first token {first:6.2f} s, whole answer {whole:6.2f} s")
            shown = ", ".join(f"{role} {rss / 2**20:.0f} MiB" for role, rss in deployment.rss_bytes().items())
            print(f"  resident memory: {shown}")
    print("\nwhat the split costs (first token, pd / combined)")
    for length in arguments.lengths:
        ratio = figures["pd", length][1] / figures["combined", length][1]
        print(f"  {figures['pd', length][0]:>6} tokens: x {ratio:.2f}")


if __name__ == "__main__":
    main()
