"""Quantities out of a server's Prometheus text, whatever its release calls them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from .endpoint import PROBE_TIMEOUT_S, Endpoint, attempt

# Metric names moved over time; each quantity has a list of aliases, and "not offered" is None, never 0.
METRICS: dict[str, tuple[str, ...]] = {
    "running": ("sglang:num_running_reqs", "sglang_num_running_reqs", "vllm:num_requests_running",
                "llamacpp:requests_processing", "dynamo_frontend_inflight_requests", "num_requests_running"),
    "waiting": ("sglang:num_queue_reqs", "sglang_num_queue_reqs", "vllm:num_requests_waiting",
                "llamacpp:requests_deferred", "dynamo_frontend_queued_requests"),
    "kv_used": ("sglang:num_used_tokens", "sglang:kv_used_tokens", "sglang:token_usage", "sglang_token_usage",
                "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "kv_cache_utilization"),
    "aborted": ("sglang:num_aborted_requests_total", "sglang:num_aborted_requests", "sglang_num_aborted_requests_total",
                'vllm:request_success_total{finished_reason="abort"}',
                'dynamo_frontend_requests_total{error_type="cancelled"}'),
    "cached_tokens": ("sglang:cached_tokens_total", "sglang_cached_tokens_total", "vllm:prefix_cache_hits_total",
                      "vllm:prefix_cache_hits", "llamacpp:prompt_tokens_cached_total",
                      "trtllm_kv_cache_reused_blocks_total", "dynamo_frontend_cached_tokens_sum"),
    "prompt_tokens": ("sglang:prompt_tokens_total", "sglang_prompt_tokens_total", "vllm:prompt_tokens_total",
                      "llamacpp:prompt_tokens_total", "smg_router_tokens_total",
                      "dynamo_frontend_input_sequence_tokens_sum"),
    "router_retries": ("smg_worker_retries_total", "sgl_router_retries_total", "vllm_router_retries_total"),
    "transfer_failed": ("sglang:num_transfer_failed_reqs_total", "sglang_num_transfer_failed_reqs_total",
                        "vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_transfers"),
}  # fmt: skip
CONTEXT_TOKENS = "dynamo_frontend_model_context_length"  # a gauge for each model and worker
_METRIC_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(\{[^}]*\})?\s+([-+0-9.eEnNaAiIfF]+)")


async def read(endpoint: Endpoint) -> dict[str, float | None]:
    """The quantities of METRICS as this server offers them; None where it does not."""
    found = endpoint.capabilities
    return await of(endpoint, await text(endpoint), found.engine if found is not None else "")


async def text(endpoint: Endpoint) -> str:
    base = endpoint.metrics_url or endpoint.base_url
    return await attempt(endpoint.get_text("/metrics", timeout_s=PROBE_TIMEOUT_S, base=base)) or ""


async def of(endpoint: Endpoint, metrics: str, engine: str) -> dict[str, float | None]:
    """The quantities of METRICS; llama.cpp without --metrics still tells of each slot whether it is at work."""
    gauges = parse(metrics)
    if engine == "llama.cpp" and gauges["running"] is None:
        slots = await attempt(endpoint.get_json("/slots", timeout_s=PROBE_TIMEOUT_S))
        if isinstance(slots, list):
            busy = [slot.get("is_processing") for slot in slots if isinstance(slot, dict)]
            gauges["running"] = float(busy.count(True)) if busy else None
    return gauges


def parse(metrics: str) -> dict[str, float | None]:
    """Parse Prometheus text into the quantities of METRICS, summed over labels."""
    sums: dict[str, float] = {}
    for name, labels, value in _samples(metrics):
        sums[name] = sums.get(name, 0.0) + value
        for label in labels:
            key = f"{name}{{{label}}}"
            sums[key] = sums.get(key, 0.0) + value
    return {what: next((sums[a] for a in aliases if a in sums), None) for what, aliases in METRICS.items()}


def context_length(metrics: str, model: str) -> int | None:
    """The context that a frontend states for `model`, the smallest of its workers; None where it states none."""
    wanted = f'model="{model}"'.lower()
    stated = [v for name, labels, v in _samples(metrics) if name == CONTEXT_TOKENS and wanted in map(str.lower, labels)]
    return int(min(stated)) if stated else None


def _samples(metrics: str) -> Iterator[tuple[str, list[str], float]]:
    """(name, labels, value) of each line that is one; the first 20,000 lines only. A gauge that is NaN or infinite says
    nothing."""
    for line in metrics.splitlines()[:20_000]:
        if match := _METRIC_LINE.match(line):
            name, labels, raw = match.groups()
            try:
                value = float(raw)
            except ValueError:
                continue
            if math.isfinite(value):
                yield name, [label.strip() for label in (labels or "{}")[1:-1].split(",")], value
