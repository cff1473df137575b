"""Logs tell what is in them: engines' own words by category, in every form, and nothing that they do not say."""

import bz2
import gzip
import json
import lzma
import re
import time
import tomllib
from importlib.resources import files

import pandas as pd
import pytest
from needlework.analysis import diagnose
from needlework.evidence import Redactor, absences, as_evidence, findings, join_trials, read_log, scan
from needlework.evidence.collect import Collection, _readable
from needlework.evidence.hosts import Answer, last_lines, unpacked
from needlework.evidence.logs import categories, engines_of, level_of, lines_of
from needlework.evidence.settings import DECISIVE
from needlework.workbook import diagnosing
from saved import block_sizes, journal, saved, without_connector, wrapped, wrong_window
from trade import ORDINARY

# Lines in the shape of public reports, with their source: categories that they fall into, and the level.
EXCERPTS = [
    ("ollama/ollama runner", 'level=WARN source=runner.go:153 msg="truncating input prompt" limit=4096 prompt=13789 keep=4 new=4096', {"truncation"}, "warning"),
    ("dzhng/deep-research#107", 'level=WARN source=runner.go:120 msg="input prompt truncated" limit=2048 prompt=7470', {"truncation"}, "warning"),
    ("ggml-org/llama.cpp server", "0.07.935 W slot update_slots: id  0 | task 7 | input truncated, n_ctx = 4096, n_keep = 0, n_left = 4096, n_prompt_tokens = 3071", {"truncation"}, "warning"),
    ("ggml-org/llama.cpp server", "W slot update_slots: id 0 | task 100 | slot context shift, n_keep = 1, n_left = 4094, n_discard = 2047", {"context shift"}, "warning"),
    ("ggml-org/llama.cpp#13194", "8.46.272 W slot update_slots: id  8 | task 338 | forcing full prompt re-processing due to lack of cache data", {"no reuse"}, "warning"),
    ("ggml-org/llama.cpp server", "W slot update_slots: erased invalidated context checkpoint (pos_min = 2724, size = 68.188 MiB)", {"evict"}, "warning"),
    ("ggml-org/llama.cpp server", "W llama_context: n_ctx_per_seq (4096) < n_ctx_train (131072) -- the full capacity will not be utilized", {"mismatch"}, "warning"),
    ("ggml-org/llama.cpp server", "E srv send_error: task id = 5, error: request (5230 tokens) exceeds the available context size (4096 tokens)", {"over limit"}, "error"),
    ("vllm-project/vllm scheduler", "WARNING 05-09 00:49:33 scheduler.py:1057 Sequence group 0 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space.", {"evict"}, "warning"),
    ("vllm-project/vllm#27083", "(Worker_DP0_EP0 pid=28) ERROR 10-16 17:22:56 [nixl_connector.py:827] Handshake failed for request chatcmpl-1a2b3c4d", {"handshake"}, "error"),
    ("vllm-project/vllm#27083", "(Worker_DP0 pid=28) ERROR 10-16 17:22:56 [nixl_connector.py:815] RuntimeError: Remote NIXL agent engine ID mismatch. Expected a, received b.", {"handshake", "mismatch"}, "error"),
    ("vllm-project/vllm#41863", "(Worker_TP0_EP0 pid=865) ERROR 05-01 15:00:23 [nixl_connector.py:1263] NIXL transfer failure: handshake_setup_failed | Context: {}", {"handshake", "transfer"}, "error"),
    ("vllm-project/vllm nixl connector", "(EngineCore_DP0 pid=37) WARNING 09-24 16:35:21 [nixl_connector.py:1048] Releasing expired KV blocks for request cmpl-3da205a6 which were retrieved by 0 decode worker(s) within 120 seconds.", {"transfer"}, "warning"),
    ("ai-dynamo/nixl#1983", "E0722 10:00:00.1 77 nixl_agent.cpp:88] createXferReq: NIXL_ERR_REMOTE_DISCONNECT", {"transfer"}, "error"),
    ("kserve/kserve#5987", "(EngineCore pid=77) WARNING 08-10 [core.py:367] Got kv_transfer_params, but no KVConnector found. Disabling KVTransfer for this request: no KV connector", {"no connector"}, "warning"),
    ("vllm-project/vllm serving", "ValueError: This model's maximum context length is 4096 tokens. However, you requested 5120 tokens", {"over limit"}, "error"),
    ("sgl-project/sglang scheduler", "[2026-09-13 16:06:07] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.0980 -> 0.3487", {"evict"}, ""),
    ("sgl-project/sglang disaggregation", "[2026-02-27 15:01:51 TP3] Decode transfer failed for request rank=3 decode_req.req.rid='63b1b22d' with exception KVTransferError(bootstrap_room=65): Failed to get kvcache from prefill instance, it might be dead", {"transfer"}, "error"),
    ("sgl-project/sglang disaggregation", "KVTransferError(bootstrap_room=2893111): Request 2893111 timed out after 300.0s in KVPoll.Bootstrapping", {"handshake", "timeout", "transfer"}, "error"),
    ("sgl-project/sglang disaggregation", "Decode instance could be dead, remote mooncake session <address-1>:20635_4738 is not alive", {"transfer"}, ""),
    ("sgl-project/sglang tokenizer_manager", "WARNING: Input length (9000 tokens) exceeds the maximum allowed length (8191 tokens). Truncating the input.", {"over limit", "truncation"}, "warning"),
    ("kvcache-ai/Mooncake#919", "E20251012 09:10:11.485378 140180 transfer_task.cpp:236] Failed to complete transfers after 60 seconds for batch 14", {"transfer"}, "error"),
    ("kvcache-ai/Mooncake#1939", "E20260420 09:09:28.022857 555139 transfer_task.cpp:535] Failed to open segment <host-1>", {"handshake"}, "error"),
    ("kvcache-ai/Mooncake#1729", "E0323 09:34:39.531279  3922 file_storage.cpp:481] Key not found: 2a14b0d2", {"cache load"}, "error"),
    ("LMCache/LMCache#969", "[2025-07-03 12:45:27,563] LMCache WARNING: Failed to allocate memory for the KV cache.", {"evict"}, "warning"),
    ("LMCache/LMCache#749", "[2025-06-01 10:00:00,001] LMCache WARNING: In connector.start_load_kv, but the attn_metadata is None", {"cache load"}, "warning"),
    ("ai-dynamo/dynamo#4220", '{"time":"2026-01-02T03:04:05Z","level":"WARN","target":"dynamo_llm::kv_router::prefill_router","message":"Remote prefill failed, falling back to decode-only."}', {"fallback"}, "warning"),
    ("NVIDIA/TensorRT-LLM#11136", "[TRT-LLM] [W] [TensorRT-LLM][WARNING] Request 7 timed out waiting for context KV cache transfer after 1000 ms", {"timeout", "transfer"}, "warning"),
    ("NVIDIA/TensorRT-LLM#12542", "[TensorRT-LLM][ERROR] Assertion failed: Couldn't find the requested block in the reuse tree", {"assert", "transfer"}, "error"),
    ("sgl-project/sglang router", "2026-08-01T00:00:00Z  WARN sglang_router: Retrying request on another worker, attempt 2 of 5", {"retry"}, "warning"),
    ("kvcache-ai/ktransformers#1074", "[sched] prefix tree asked for 120 tokens, matched 0, new sequence", {"no reuse"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("source", "line", "named", "level"), EXCERPTS)
def test_the_words_of_engines_are_known(source, line, named, level):
    entry = next(lines_of(line))
    table = scan(frame([line])).set_index("category")["count"]
    found = {name for name in table.index[table > 0] if name in categories() and not categories()[name].topic}
    assert found == named, source
    assert level_of(entry["message"], entry.get("level", "")) == level


def test_the_excerpts_cover_the_engines():
    assert len(EXCERPTS) >= 25
    said = set(engines_of([line for _, line, _, _ in EXCERPTS]))
    assert said >= {"sglang", "vllm", "llama.cpp", "ollama", "tensorrt-llm", "dynamo", "lmcache", "mooncake", "nixl"}


def frame(lines):
    text = "\n".join(lines)
    items = [{"host": "h", "role": "combined", "item": "log:/x.log", "state": "ok", "unit": None, "reason": None}]
    return read_log(Collection("p", items, {("h", "combined", "log:/x.log"): text}, {}), "h", "combined")


HEALTHY = [
    "server_args=ServerArgs(model_path='/m', abort_on_error=True, retry=3, evict_policy='lru', truncate=False)",
    "non-default args: {'kv_load_failure_policy': 'fail', 'enable_chunked_prefill': True, 'max_retries': 3}",
    "Decode batch, #running-req: 3, #retracted-req: 0, #preempted: 0, errors: 0, no evictions, 0 aborted, timeout=300",
    "0 errors, no mismatch, 0 requests preempted, no failures, context shift is disabled, radix eviction policy: lru",
    "INFO: inference nanoseconds ok; info: infinite patience; nanny started; infrared",
    "slot update_slots: id 0 | task 3 | n_past = 2048, truncated = 0, context_shift = 0",
]  # fmt: skip


# lines of the trade that do tell of something
LOUD = re.compile(
    r"(?i)fail|error|warn|abort|timed|retract|evict|retry|truncat|n_ctx_train|multiple|^W\d|timeout|connector|exceeds|"
    r"fall back|prefix tree|traceback"
)


def test_lines_of_a_healthy_engine_are_no_findings():
    table = scan(frame([*HEALTHY, *(line for line in ORDINARY if not LOUD.search(line))])).set_index("category")
    loud = table[[name not in ("chunk", "radix", "prefix", "no reuse") for name in table.index]]
    assert loud[loud["count"] > 0][["count", "example"]].to_dict("index") == {}


def test_errors_and_warnings_without_a_category_are_counted_too():
    table = scan(frame(["ERROR 10-10 [x.py:1] the flux capacitor is empty", "WARNING: nobody knows", "all fine"]))
    table = table.set_index("category")
    assert table.loc["other error", ["count", "errors"]].tolist() == [1, 1]
    assert table.loc["other warning", "example"] == "WARNING: nobody knows"


# --- forms ---------------------------------------------------------------------------------------------------------

SAID = "WARNING 10-10 10:00:00 [x.py:1] transfer failed"
FORMS = {
    "journal json": journal("a.service", [SAID]),
    "journal short": f"Nov 30 10:00:00 <host-1> engine[7]: {SAID}\n",
    "journal short-iso": f"2026-11-30T10:00:00+0000 <host-1> engine[7]: {SAID}\n",
    "docker json": json.dumps({"log": SAID + "\n", "stream": "stderr", "time": "2026-11-30T10:00:00.5Z"}) + "\n",
    "container": f"2026-11-30T10:00:00.123456789Z stderr P {SAID[:10]}\n2026-11-30T10:00:00.2Z stderr F {SAID[10:]}\n",
    "kubectl": f"2026-11-30T10:00:00.123456789Z {SAID}\n",
    "kubectl prefix": f"[pod/vllm-0/main] 2026-11-30T10:00:00.123456789Z {SAID}\n",
    "compose": f"vllm-1  | {SAID}\n",
    "json lines": json.dumps({"ts": "2026-11-30T10:00:00Z", "level": "warn", "msg": "transfer failed"}) + "\n",
    "plain": SAID + "\n",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form):
    (entry,) = lines_of(FORMS[form])
    assert entry["message"] in (SAID, "transfer failed")
    log = frame(FORMS[form].splitlines())
    assert log["level"].tolist() == ["warning"] and scan(log).set_index("category").loc["transfer", "count"] == 1
    dated = form not in ("journal short", "compose", "plain")
    assert log["time"].notna().all() == dated and str(log["time"].dtype).startswith("datetime64")


def test_the_export_form_of_a_journal_is_read():
    blocks = b""
    for n, message in enumerate([SAID.encode(), b"two\nlines \xff"]):
        plain = b"\n" not in message
        field = b"MESSAGE=" + message if plain else b"MESSAGE\n" + len(message).to_bytes(8, "little") + message
        blocks += b"__CURSOR=s=1\n__REALTIME_TIMESTAMP=%d\n_SYSTEMD_UNIT=a.service\n%s\n\n" % (
            1_780_000_000_000_000 + n,
            field,
        )
    first, second = lines_of(_readable("log:x", blocks))
    assert (first["message"], first["unit"], second["message"][:9]) == (SAID, "a.service", "two\nlines")


def test_compressed_logs_are_read_and_damaged_ones_are_one_sentence(tmp_path):
    data = "".join(f"line {n}\n" for n in range(9000)).encode()
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        assert unpacked(Answer(pack(data)), 2).data == b"line 8998\nline 8999\n"
        assert "damaged" in unpacked(Answer(pack(data)[:-30]), 2).error
    result = saved(
        tmp_path, {"decode": (None, ["/var/log/x.log.gz"])}, {"/var/log/x.log.gz": gzip.compress(SAID.encode())}
    )
    assert scan(read_log(result, "h-decode", "decode")).set_index("category").loc["transfer", "count"] == 1


def test_a_log_of_any_size_is_read_in_bounded_memory():
    class Endless:
        """A gigabyte of lines, made as it is read."""

        def __init__(self):
            self.left = 1 << 30

        def readline(self, limit):
            self.left -= 1 << 16
            return b"x" * (1 << 16) if self.left >= 0 else b""

    assert len(last_lines(Endless(), 1 << 30)) <= 64 << 20  # lines without end: what fits


def test_four_thousand_lines_take_seconds():
    lines = [f"[2026-11-30 10:00:{n % 60:02d} TP0] {ORDINARY[n % len(ORDINARY)]}" for n in range(4000)]
    start = time.process_time()
    scan(frame(lines))
    assert time.process_time() - start < 4, "at most 2 s on a quiet machine"


def test_lines_join_trials_by_the_ids_of_engines():
    log = frame(["NIXL transfer failure | Context: {'request_id': 'cmpl-7f31aa20-0'}", "slot x: id 0 | task 17 | done"])
    joined = join_trials(log, pd.DataFrame({"trial_id": ["cmpl-7f31aa20-0", "17"], "outcome": ["garbage", "exact"]}))
    assert joined[["trial_id", "by"]].to_numpy().tolist() == [["cmpl-7f31aa20-0", "id"], ["17", "id"]]


# --- whole collections ----------------------------------------------------------------------------------------------


def test_a_cut_prompt_leads_and_its_setting_is_named(tmp_path):
    result = wrong_window(tmp_path)
    first = findings(result).rows[0]
    assert (first.name, first.count, first.classes) == ("truncation", 12, ("N1",))
    assert "at 2,048 tokens" in first.text and "12 warnings" in first.text
    assert first.step.startswith("OLLAMA_CONTEXT_LENGTH is set nowhere that was read")
    assert not any("another service" in said or "no error" in said for said in absences(result)["finding"])
    assert not any("no Environment=" in said for said in absences(result)["finding"]), "a drop-in sets the cache's type"


def test_a_unit_that_redaction_renames_still_joins(tmp_path):
    lines = ["INFO vllm request"] * 6
    files = {
        "/etc/systemd/system/alice7.service": "[Service]\nUser=alice7\nExecStart=/usr/bin/vllm serve m\n",
        "/var/log/journal/alice7.service.jsonl": journal("alice7.service", lines),
    }
    result = saved(tmp_path, {"decode": ("alice7.service", [])}, files)
    assert "alice7" not in "".join(result.texts.values()) + str(result.items)
    assert set(read_log(result, "h-decode", "decode")["unit"]) == {"<user-1>.service"}
    assert not any("another service" in said for said in absences(result)["finding"])


def test_pods_without_a_connector(tmp_path):
    rows = findings(without_connector(tmp_path)).rows
    said = [(row.role, row.count, row.classes) for row in rows if row.name == "no connector"]
    assert said == [("prefill", 12, ()), ("decode", 12, ())], "no loss follows from it by itself"
    (page,) = [row for row in rows if row.kind == "setting"]
    assert (page.name, page.text) == ("page_size", "page_size differs: 64 (prefill) against 16 (decode)")
    assert "/manifests/decode.yaml" in page.where and page.step.startswith("set page_size alike")


def test_failed_transfers_of_a_pair(tmp_path):
    result = block_sizes(tmp_path)
    rows = {row.name: row for row in findings(result).rows}
    assert (rows["transfer"].count, rows["transfer"].requests) == (8, 4), "the text copy of the journal counts once"
    assert rows["mismatch"].count == rows["assert"].count == 4 and rows["handshake"].count == 8
    assert rows["page_size"].kind == rows["tp_size"].kind == "setting"
    order = [row.kind for row in findings(result).rows]
    assert order == sorted(order, key=["log", "setting", "absence"].index)


def test_an_engine_that_computes_each_turn_anew(tmp_path):
    result = wrapped(tmp_path)
    (row,) = [row for row in findings(result).rows if row.kind == "log"]
    assert (row.name, row.count, row.classes) == ("no reuse", 8, ()) and "slow, not wrong" in row.text
    assert not any("no error" in said or "another service" in said for said in absences(result)["finding"])


def test_silence_is_said_only_of_what_was_read_and_would_be_written(tmp_path):
    quiet = [f'INFO:     127.0.0.1:{n} - "GET /metrics HTTP/1.1" 200 OK' for n in range(30)] + ["Prefill batch, sglang"]
    items = [{"host": "h", "role": "decode", "item": "journal", "state": "ok", "unit": None, "reason": None}]
    made = Collection("p", items, {("h", "decode", "journal"): "\n".join(quiet)}, {})
    (said,) = absences(made)["finding"]
    assert said.startswith("no error and no warning in the 31 lines read") and "which sglang would write" in said
    assert "transfer" in said and "context shift" not in said, "SGLang has no context shift to write of"
    one = Collection("p", items, {("h", "decode", "journal"): "\n".join([*quiet, "WARNING: odd"])}, {})
    assert absences(one).empty


def test_a_collection_is_evidence_for_the_verdict(tmp_path):
    told = as_evidence(wrong_window(tmp_path))
    assert told["logs"]["truncation: the prompt was cut before the model saw all of it"] == 12
    assert not any(name.startswith(("no connector", "handshake")) for name in told["logs"]), (
        "ollama writes no such lines"
    )
    assert "OLLAMA_CONTEXT_LENGTH" in told["findings"]["N1"][0]
    trials = pd.DataFrame({"target_tokens": [1000, 3000] * 20, "outcome": ["exact", "garbage"] * 20})
    diagnose(trials, evidence={key: told[key] for key in ("config", "logs")})


def test_sizes_that_the_roles_state_alike_are_evidence(tmp_path):
    assert as_evidence(without_connector(tmp_path))["config"] == {"context_limit": 32768}, "page sizes differ: neither"


def test_redaction_counts_what_the_second_look_replaced():
    redactor = Redactor()
    text = redactor.text("lost Qx7vLm2p9Tz\n")
    redactor.text("password=Qx7vLm2p9Tz\n")
    assert redactor.again(text) == "lost <secret-1>\n"


def test_the_verdict_names_the_setting_that_the_collection_found(tmp_path, capsys):
    wrong_window(tmp_path).write(tmp_path / "collected")
    rows = ["target_tokens,prompt_tokens,depth,outcome"]
    for n in range(120):
        length, depth = (500, 1000, 1500, 1900, 2500, 4000, 7000)[n % 7], round((n * 37 % 101) / 101, 3)
        rows.append(
            f"{length},{min(length, 2048)},{depth},{'exact' if length < 2048 or depth > 1 - 2048 / length else 'refusal'}"
        )
    (tmp_path / "trials.csv").write_text("\n".join(rows))
    status = diagnosing.main([str(tmp_path / "trials.csv"), "--evidence", str(tmp_path / "collected")])
    said = capsys.readouterr().out
    assert status == 1
    assert (
        "Collected: h-combined/combined: truncation: 12 lines" in said
        and "OLLAMA_CONTEXT_LENGTH is set nowhere" in said
    )


def test_every_class_that_words_bear_on_is_one_of_the_table():
    known = set(tomllib.loads(files("needlework.analysis").joinpath("faults.toml").read_text()))
    named = {code for category in categories().values() for code in category.classes}
    assert named | {code for codes in DECISIVE.values() for code in codes} <= known
