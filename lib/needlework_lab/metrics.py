"""/metrics in Prometheus' text form, under SGLang's names (sglang srt/observability/metrics_collector.py)."""

from __future__ import annotations

from typing import Any

from needlework_lab.decode import DecodeWorker
from needlework_lab.prefill import PrefillWorker
from needlework_lab.requests import MODEL
from needlework_lab.worker import Worker


def collect(worker: Worker) -> dict[str, float]:
    """All figures by name without prefix; call it in the engine's thread."""
    figures: dict[str, float] = dict(worker.engine.metrics())
    figures["num_aborted_requests_total"] = float(worker.aborted_total)
    if isinstance(worker, (PrefillWorker, DecodeWorker)):
        counters = worker.transfer.counters
        figures |= {
            "num_transfer_failed_reqs_total": float(counters.failed),
            "kv_transfer_latency_ms": counters.latency_ms,
            "kv_transfer_speed_gb_s": counters.speed_gb_s,
            "kv_transfer_total_mb": counters.bytes_total / 1e6,
            **{name: float(value) for name, value in worker.queues().items()},
        }
    return figures


def expose(figures: dict[str, float], labels: dict[str, Any] | None = None) -> str:
    """Prometheus text: names that end in _total are counters, everything else is a gauge."""
    pairs = {"model_name": MODEL, **(labels or {})}
    shown = ",".join(f'{name}="{value}"' for name, value in pairs.items())
    lines = []
    for name, value in sorted(figures.items()):
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{shown}}} {float(value)}"]
    return "\n".join(lines) + "\n"
