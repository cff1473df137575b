"""Saved machines for tests: a tree of files, the plan that reads it, and what `collect` gives."""

import json

from needlework.evidence import collect, load_plan


def journal(unit, messages, identifier="engine"):
    rows = (
        {"__REALTIME_TIMESTAMP": str(1_780_000_000_000_000 + n * 1_500_000), "_SYSTEMD_UNIT": unit,
         "SYSLOG_IDENTIFIER": identifier, "PRIORITY": "6", "_PID": "4242", "MESSAGE": message}
        for n, message in enumerate(messages)
    )  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


def saved(folder, roles, files):
    """`files`: path -> text or bytes. `roles`: role -> (unit, paths), each on a host of its own over the same tree."""
    for path, content in files.items():
        target = folder / "box" / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    plan = "name = 'saved'\n"
    for role, (unit, paths) in roles.items():
        plan += f"[[hosts]]\nname='h-{role}'\nvia='folder'\nfolder='box'\n[[hosts.roles]]\nrole='{role}'\nfiles={list(paths)}\n"
        plan += f"unit='{unit}'\n" if unit else ""
    (folder / "incident.toml").write_text(plan)
    return collect(load_plan(folder / "incident.toml"))


def wrong_window(folder):
    """Ollama cuts prompts of 7,500 tokens at 2,048; its user has the unit's name (dzhng/deep-research#107)."""
    cut = 'time=2025-02-22T00:05:{:02d}Z level=WARN source=runner.go:120 msg="input prompt truncated" limit=2048 prompt={} kept=2048'
    answer = '[GIN] 2025/02/22 - 00:05:20 | 200 | 4.1s | 127.0.0.1 | POST "/v1/chat/completions"'
    lines = ['time=2025-02-22T00:05:01Z level=INFO source=server.go:619 msg="llama runner started"']
    lines += [line for n in range(12) for line in (cut.format(n, 7470 + 13 * n), answer)]
    files = {
        "/etc/systemd/system/ollama.service": "[Service]\nExecStart=/usr/local/bin/ollama serve\nUser=ollama\n",
        "/etc/systemd/system/ollama.service.d/o.conf": '[Service]\nEnvironment="OLLAMA_KV_CACHE_TYPE=q8_0"\n',
        "/var/log/journal/ollama.service.jsonl": journal("ollama.service", lines, "ollama"),
    }
    return saved(folder, {"combined": ("ollama.service", [])}, files)


POD = """apiVersion: apps/v1
kind: Deployment
metadata: {{ name: chat-{role}, labels: {{ llm-d.ai/role: {role} }} }}
spec:
  template:
    spec:
      containers:
        - name: main
          image: vllm/vllm-openai:v0.25.1
          command: ["vllm", "serve", "/mnt/models"]
          args: [--port=8000, --block-size={block}, --max-model-len=32768, --new-option=7]
          env: [{{ name: VLLM_LOGGING_LEVEL, value: INFO }}]
        - name: routing-sidecar
          args: ["--port=8001", "--vllm-port=8000", "--kv-connector=nixlv2"]
"""


def without_connector(folder):
    """Two pods whose engines were given no KV connector; block sizes of our own (kserve/kserve#5987)."""
    log = "INFO 08-10 09:00:01 [api_server.py:1210] vLLM API server version 0.25.1\n"
    for n in range(12):
        log += f"(EngineCore pid=77) WARNING 08-10 09:01:{n:02d} [core.py:367] request brings kv_transfer_params and this engine has no KV connector\n"
        log += '(APIServer pid=7) INFO: 127.0.0.1:40110 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    sides = {"prefill": 64, "decode": 16}
    files = {f"/manifests/{role}.yaml": POD.format(role=role, block=block) for role, block in sides.items()}
    files |= {f"/logs/{role}.log": log for role in sides}
    return saved(folder, {role: (None, [f"/manifests/{role}.yaml", f"/logs/{role}.log"]) for role in sides}, files)


def block_sizes(folder):
    """A NIXL pair with blocks of 32 and the default: each transfer fails and each request gets 200 (vllm#42895)."""
    roles, files = {}, {}
    for role, options in (
        ("prefill", "--tensor-parallel-size 4 --block-size 32"),
        ("decode", "--tensor-parallel-size 1"),
    ):
        unit, script = f"vllm-{role}.service", f"/opt/vllm/start-{role}.sh"
        lines = ["INFO 05-17 20:11:02 [api_server.py:1200] vLLM API server version 0.21.0"]
        for n in range(4 if role == "decode" else 0):
            at = "(Worker_DP3_EP3 pid=1) ERROR 05-17 20:14:00 [worker.py:767]"
            lines += [
                f"{at} NIXL transfer failure: handshake setup | Context: {{'request_id': 'cmpl-7f31aa2{n}-0'}}",
                f"{at} AssertionError: block size 16 here and 32 there: neither is a multiple of the other",
                f"{at} NIXL transfer failure: handshake | Context: {{'request_id': 'cmpl-7f31aa2{n}-0'}}",
                '(APIServer pid=2) INFO: 127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
            ]
        files |= {
            f"/etc/systemd/system/{unit}": f"[Service]\nEnvironment=VLLM_NIXL_SIDE_CHANNEL_PORT=6550\nExecStart={script}\n",
            script: "#!/bin/bash\nexport VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname)\n"
            f'exec vllm serve /models/moe {options} \\\n  --kv-transfer-config \'{{"kv_connector":"NixlConnector","kv_role":"kv_both"}}\'\n',
            f"/var/log/journal/{unit}.jsonl": journal(unit, lines),
            f"/var/log/vllm/{role}.log": "\n".join(lines) + "\n",
        }
        roles[role] = (unit, [f"/var/log/vllm/{role}.log"])
    return saved(folder, roles, files)


def wrapped(folder):
    """KTransformers under a script of its own; each turn is computed anew (kvcache-ai/ktransformers#1074)."""
    lines = []
    for n in range(8):
        lines += [
            f"2025-04-08 14:46:{n:02d},017 DEBUG /opt/ktransformers/lib/balance_serve.py[330]: prompt tokens: {20 + 40 * n}",
            f"[sched] prefix tree asked for {20 + 40 * n} tokens, matched 0, new sequence",
            'INFO:     127.0.0.1:42534 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        ]
    script = "#!/bin/bash\nktransformers \\\n  --model_path /opt/models/V3 --cpu_infer 30 --cache_lens 131072 --chunk_size 256 \\\n"
    script += "  --max_batch_size 4 --cache_8bit True --use_cuda_graph --port 8080\n"
    files = {
        "/etc/systemd/system/ktransformers.service": "[Service]\nUser=serve\nExecStart=/opt/kt/run.sh\n",
        "/opt/kt/run.sh": script,
        "/var/log/journal/ktransformers.service.jsonl": journal("ktransformers.service", lines, "run.sh"),
    }
    return saved(folder, {"combined": ("ktransformers.service", [])}, files)
