"""Settings as people write them: units, scripts, KEY=value, compose, Kubernetes, Helm, KServe, Ray, Dynamo, options
files, JSON in an argument, and what engines print of themselves."""

import pandas as pd
import pytest
from needlework.evidence import compare_roles, effective
from needlework.evidence.settings import (
    components,
    config_settings,
    flags,
    manifest_settings,
    script_settings,
    startup_settings,
)
from needlework.names import SIZES, ours, setting
from saved import block_sizes, saved, without_connector, wrapped

COMMANDS = {
    "vllm serve /m -tp 8 --block-size 64 --max-model-len=32768": {"model_path": "/m", "tp_size": "8", "page_size": "64", "context_length": "32768"},
    "llama-server -m q.gguf -c 32768 -np 4 -ngl 99 -ctk q8_0 -ctv q4_0 -fa -ub 512": {
        "model_path": "q.gguf", "ctx_size": "32768", "parallel": "4", "n_gpu_layers": "99", "cache_type_k": "q8_0",
        "cache_type_v": "q4_0", "flash_attn": "true", "ubatch_size": "512"},
    "python -u -m sglang.launch_server --model-path /m --tp 8 --page-size 64 --disable-radix-cache": {
        "model_path": "/m", "tp_size": "8", "page_size": "64", "disable_radix_cache": "true"},
    "trtllm-serve /m --tp_size 4 --max_seq_len 8192 --max_num_tokens 4096": {"tp_size": "4", "max_seq_len": "8192", "max_num_tokens": "4096"},
    """vllm serve /m --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"fail","extra":{"a":1}}'""": {
        "model_path": "/m", "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail", "kv_transfer_config.extra.a": "1"},
    """vllm serve /m --speculative-config '{"method":"mtp","num_speculative_tokens":2}'""": {
        "model_path": "/m", "speculative_algorithm": "mtp", "speculative_config.num_speculative_tokens": "2"},
    "some-engine --new-thing 7 -x 3": {"new_thing": "7", "x": "3"},
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_a_command(command):
    import shlex

    assert flags(shlex.split(command)) == COMMANDS[command]


SCRIPT = """#!/usr/bin/env bash
# start
set -euo pipefail
export UCX_TLS=all OLLAMA_CONTEXT_LENGTH=8192
TP=4
MODEL=${MODEL:-/models/x}
ARGS=(
  --block-size 32   # tokens
  --kv-cache-dtype fp8
)
ARGS+=(--enforce-eager)
cd /opt && echo --not-an-option 1
if [ -f /x ]; then sleep 1; fi
VLLM_ATTENTION_BACKEND=FLASHMLA exec numactl --cpunodebind=0 my-engine serve "$MODEL" -tp $TP "${ARGS[@]}" \\
  --max-model-len "${LEN:-4096}" 2>&1 | tee --append /var/log/x
"""


def test_a_wrapper_script_with_any_command():
    found = script_settings(SCRIPT)
    assert {key: found[key] for key in ("page_size", "kv_cache_dtype", "enforce_eager", "tp_size", "context_length")} == {
        "page_size": "32", "kv_cache_dtype": "fp8", "enforce_eager": "true", "tp_size": "4", "context_length": "4096"
    }  # fmt: skip
    assert found["UCX_TLS"] == "all" and found["OLLAMA_CONTEXT_LENGTH"] == "8192"
    assert found["VLLM_ATTENTION_BACKEND"] == "FLASHMLA" and found["model_path"] == "/models/x"
    assert not {"not_an_option", "append", "f"} & set(found)


def test_a_script_that_starts_both_sides_gives_each_its_own():
    start = "python3 -m sglang.launch_server --disaggregation-mode {} --page-size {} > x.log 2>&1 &\n"
    script = (
        "#!/bin/bash\n"
        + start.format("prefill", 64)
        + start.format("decode", 16)
        + "python3 -m sglang_router --port 1\n"
    )
    assert script_settings(script, "prefill")["page_size"] == "64"
    assert script_settings(script, "decode")["page_size"] == "16"


def test_a_shell_inside_a_command():
    assert flags(["/bin/bash", "-c", "vllm serve /m --block-size 16"])["page_size"] == "16"


MANIFESTS = {
    "compose": ("""services:
  llm:
    image: vllm/vllm-openai:v0.25.1
    command: --model /m --tensor-parallel-size 2 --block-size 32
    environment:
      - VLLM_LOGGING_LEVEL=DEBUG
      - HF_HOME=/x
""", {"model_path": "/m", "tp_size": "2", "page_size": "32", "VLLM_LOGGING_LEVEL": "DEBUG", "HF_HOME": "/x", "image": "vllm/vllm-openai:v0.25.1"}),
    "compose map": ("""services:
  ollama:
    image: ollama/ollama
    environment: {OLLAMA_CONTEXT_LENGTH: 8192, OLLAMA_NUM_PARALLEL: 4}
""", {"OLLAMA_CONTEXT_LENGTH": "8192", "OLLAMA_NUM_PARALLEL": "4"}),
    "kubernetes sh -c": ("""kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: sglang
        image: lmsysorg/sglang:v0.5.23
        command: ["/bin/sh", "-c"]
        args:
        - |
          export SGLANG_X=1
          python3 -m sglang.launch_server --model-path /m --page-size 64 --context-length 131072
""", {"page_size": "64", "context_length": "131072", "SGLANG_X": "1", "model_path": "/m"}),
    "helm values": ("""servingEngineSpec:
  modelSpec:
  - name: m
    vllmConfig:
      maxModelLen: 4096
      enablePrefixCaching: true
      extraArgs: ["--block-size=64", "--kv-cache-dtype", "fp8"]
""", {"page_size": "64", "kv_cache_dtype": "fp8", "context_length": "4096"}),
    "ray": ("""applications:
- args:
    llm_configs:
    - model_loading_config: {model_id: m}
      engine_kwargs: {tensor_parallel_size: 2, max_model_len: 8192, block_size: 16, brand_new: 1}
""", {"tp_size": "2", "context_length": "8192", "page_size": "16", "brand_new": "1"}),
    "ray service": ("""kind: RayService
spec:
  serveConfigV2: |
    applications:
    - args:
        llm_configs:
        - engine_kwargs:
            max_model_len: 8192
""", {"context_length": "8192"}),
    "kserve": ("""kind: InferenceService
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args: ["--max-model-len=2048", "--dtype=half"]
""", {"context_length": "2048", "dtype": "half"}),
    "kserve llm": ("""kind: LLMInferenceService
spec:
  model: {uri: hf://m, name: m}
  parallelism: {tensor: 4, data: 8}
  template:
    containers:
    - name: main
      image: vllm/vllm-openai
      args: [--block-size=32]
""", {"tp_size": "4", "dp_size": "8", "page_size": "32"}),
    "dynamo config": ("""Common:
  model: m
VllmWorker:
  block-size: 64
  max-model-len: 16384
  max-local-prefill-length: 10
""", {"page_size": "64", "context_length": "16384", "max_local_prefill_length": "10"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(name):
    text, wanted = MANIFESTS[name]
    found = manifest_settings(text, "combined")
    assert {key: found.get(key) for key in wanted} == wanted


GRAPH = """apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: g}
spec:
  services:
    Frontend:
      extraPodSpec: {mainContainer: {image: dynamo, args: ["--router-mode", "kv"]}}
    VllmDecodeWorker:
      subComponentType: decode
      extraPodSpec:
        mainContainer:
          image: vllm-runtime
          args: ["python3 -m dynamo.vllm --model m --block-size 16"]
    VllmPrefillWorker:
      subComponentType: prefill
      extraPodSpec:
        mainContainer:
          image: vllm-runtime
          args: ["python3", "-m", "dynamo.vllm", "--model", "m", "--block-size", "64", "--is-prefill-worker"]
"""


def test_a_graph_with_both_sides_gives_each_role_its_own():
    assert {part.side for part in components(GRAPH)} == {"prefill", "decode", None}
    assert manifest_settings(GRAPH, "prefill")["page_size"] == "64"
    assert manifest_settings(GRAPH, "decode")["page_size"] == "16"
    assert "is_prefill_worker" not in manifest_settings(GRAPH, "decode")


def test_a_sidecar_is_told_apart(tmp_path):
    table = effective(without_connector(tmp_path)).set_index(["role", "setting"])
    assert ("decode", "kv_connector") not in table.index
    assert table.loc[("decode", "routing-sidecar/kv_connector"), "value"] == "nixlv2"
    assert table.loc[("decode", "new_option"), "value"] == "7", "what nobody knows is shown"
    assert table.loc[("decode", "VLLM_LOGGING_LEVEL"), "source"] == "manifest"


@pytest.mark.parametrize(
    "text",
    [
        "a: [1, 2",
        "{{ .Values.x }}: }}",
        "x: " + "[" * 3000,
        "- &a [x, x]\n" + "".join(f"- &b{n} [*a, *a]\n" for n in range(9)),
    ],
)
def test_a_manifest_that_is_none_gives_nothing(text):
    assert manifest_settings(text, "decode") == {}


def test_aliases_that_grow_without_end_are_bounded():
    bomb = "a0: &a0 {command: [x, --k, v]}\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)
    )
    assert manifest_settings(bomb, "decode")["k"] == "v"


def test_a_helm_template_is_read_between_its_marks():
    text = "kind: Deployment\nspec:\n  {{- if .Values.x }}\n  containers:\n  - name: m\n    image: vllm\n    args: [--block-size=16, '--tp={{ .Values.tp }}']\n  {{- end }}\n"
    found = manifest_settings(text, "decode")
    assert found["page_size"] == "16" and found["tp_size"] == "templated"


def test_files_of_options():
    assert config_settings("max-model-len: 4096\nkv_cache_config:\n  tokens_per_block: 32\n  dtype: fp8\n") == {
        "context_length": "4096", "page_size": "32", "kv_cache_config.dtype": "fp8"
    }  # fmt: skip
    assert config_settings("# a\nVLLM_X=1\nexport Y='two words'\n") == {"VLLM_X": "1", "Y": "two words"}


STARTED = {
    "vllm": ("INFO [utils.py:233] non-default args: {'model_tag': 'm', 'block_size': 16, 'kv_transfer_config': {'kv_connector': 'NixlConnector'}}", {"page_size": "16", "kv_connector": "NixlConnector"}),
    "vllm enum": ("non-default args: {'model': 'm', 'max_model_len': 4096, 'mode': <Mode.X: 3>}", {"context_length": "4096", "model_path": "m"}),
    "vllm engine": ("Initializing a V1 LLM engine (v0.21.0) with config: model='m', dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=4, kv_cache_dtype=auto,", {"tp_size": "4", "kv_cache_dtype": "auto", "dtype": "torch.bfloat16"}),
    "vllm old": ("args: Namespace(host=None, port=8000, block_size=16, tensor_parallel_size=2)", {"page_size": "16", "tp_size": "2"}),
    "sglang": ("[2026-11-30 10:00:00] server_args=ServerArgs(model_path='/m', page_size=64, tp_size=8, kv_cache_dtype='fp8_e4m3', max_queued=None)", {"page_size": "64", "tp_size": "8", "kv_cache_dtype": "fp8_e4m3"}),
    "llama.cpp": ("llama_context: n_ctx         = 4096", {"ctx_size": "4096"}),
    "ollama": ('level=INFO source=routes.go:1158 msg="server config" env="map[OLLAMA_CONTEXT_LENGTH:4096 OLLAMA_HOST:http://127.0.0.1:11434 OLLAMA_KV_CACHE_TYPE:]"', {"OLLAMA_CONTEXT_LENGTH": "4096"}),
    "ollama runner": ('level=INFO msg="starting runner" cmd="/usr/bin/ollama runner --model /m --ctx-size 8192 --batch-size 512 --parallel 4"', {"ctx_size": "8192", "parallel": "4"}),
    "lmcache": ("LMCache INFO: Creating LMCacheEngineConfig(chunk_size=256, local_cpu=True, max_local_cpu_size=5.0)", {"chunk_size": "256", "local_cpu": "True"}),
}  # fmt: skip


@pytest.mark.parametrize("engine", STARTED)
def test_what_an_engine_prints_of_its_arguments(engine):
    line, wanted = STARTED[engine]
    found = startup_settings(line)
    assert {key: found.get(key) for key in wanted} == wanted
    assert startup_settings("INFO page_size=64 is nice") == {}


def test_an_environment_file_and_options_file_of_a_unit_are_followed(tmp_path):
    files = {
        "/etc/systemd/system/v.service": "[Service]\nEnvironmentFile=-/etc/default/vllm\nExecStart=/usr/bin/vllm serve m --config /etc/v/options.yaml\n",
        "/etc/default/vllm": "VLLM_USE_X=1\n",
        "/etc/v/options.yaml": "block-size: 32\nunknown-thing: 5\n",
        "/var/log/v.log": "server_args=ServerArgs(page_size=64)\n",
    }
    result = saved(tmp_path, {"combined": ("v.service", ["/var/log/v.log"])}, files)
    table = effective(result).set_index("setting")
    assert table.loc["VLLM_USE_X", ["source", "file"]].tolist() == ["environment file", "/etc/default/vllm"]
    assert table.loc["unknown_thing", "source"] == "config file"
    assert table.loc["page_size", ["value", "source", "overrides"]].tolist() == ["64", "log", "32 (config file)"]


def test_the_options_of_an_unknown_engine_are_settings(tmp_path):
    table = effective(wrapped(tmp_path)).set_index("setting")
    wanted = {
        "cache_lens": "131072",
        "chunk_size": "256",
        "max_batch_size": "4",
        "cache_8bit": "True",
        "cpu_infer": "30",
    }
    assert table.loc[list(wanted), "value"].to_dict() == wanted
    assert set(table.loc[list(wanted), "source"]) == {"wrapper script"}


def test_differences_of_a_pair_come_first(tmp_path):
    differing = compare_roles(effective(block_sizes(tmp_path))).set_index("setting")
    assert differing.index[:2].tolist() == ["page_size", "tp_size"]
    assert differing.loc[["page_size", "tp_size"], "weight"].tolist() == ["decisive", "decisive"]
    assert differing.loc["page_size", ["prefill", "decode"]].tolist() == ["32", ""]


def test_one_table_of_names():
    assert ours("--block-size") == "page" and setting("--block-size") == setting("page_size") == "page_size"
    assert setting("VLLM_BLOCK_SIZE") == "VLLM_BLOCK_SIZE" and setting("--brand-new") == "brand_new"
    assert all(ours(setting(name)) == size for size, names in SIZES.items() for name in names)


def test_a_stopped_combined_server_that_states_little_is_no_difference():
    rows = [
        ("prefill", "page_size", "64"),
        ("decode", "page_size", "64"),
        ("prefill", "tp_size", "8"),
        ("decode", "tp_size", "8"),
    ]
    rows += [("combined", "page_size", "16"), ("combined", "geometry", "x")]
    table = pd.DataFrame(
        [(role, "h", key, value) for role, key, value in rows], columns=["role", "host", "setting", "value"]
    )
    assert compare_roles(table)["setting"].tolist() == ["page_size"]
