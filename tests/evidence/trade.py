"""Texts of the trade: how hosts, users and secrets stand in units, scripts, manifests and logs of serving stacks.

What must go stands between « and »; all else is plain. `ORDINARY` are lines that engines write and that must stay.
"""

import re

MARKED = """
ExecStart=python -m sglang.launch_server --dist-init-addr «gpu-node-17»:5000 --nnodes 2
torchrun --master_addr «trainbox» --master_port 29500 serve.py
torchrun --rdzv-endpoint=«node-0017.hpc»:29400 serve.py
python -m sglang_router.launch_router --prefill «blackwell7» 8998 --decode «blackwell8»
python -m sglang_router.launch_router --prefill http://«blackwell7»:30000 8998
vllm serve m --nixl-side-channel-host «dgx-3»
VLLM_NIXL_SIDE_CHANNEL_HOST=«dgx-3»
VLLM_HOST_IP=«10.4.7.9»
--head-node-address «gpu-head-1»:6379
ray start --address=«gpu-head-1»:6379
ray start --address «10.4.7.1»:6379
mooncake_master --metadata_server=http://«meta-01»:8080/metadata
MOONCAKE_MASTER=«store-02»:50051
LMCACHE_REMOTE_URL=lm://«cache-07»:65432
NATS_SERVER=nats://«nats-03»:4222
ETCD_ENDPOINTS=http://«etcd-01»:2379
--etcd-endpoints «etcd-01»:2379
--nats-server nats://«nats-03»:4222
«gpu-node-17»:4123:4123 [0] NCCL INFO Bootstrap : Using eth0
«dgx03»:77:912 [3] NCCL WARN Call to connect returned Connection refused
Nov 30 10:00:00 «dgx-berlin-04» sglang[812]: Prefill batch
2026-11-30T10:00:00+0000 «dgx-berlin-04» sglang[812]: Prefill batch
Nov  3 09:59:59 «orion» systemd[1]: Started vllm.service.
Running on host «gpu-17» with 8 GPUs
Worker started on node «gpu-node-22»
Successfully assigned default/vllm-0 to «gpu-node-22»
kubelet on node/«gpu-node-22» evicted the pod
Node:             «gpu-node-22»/«10.4.7.9»
connected to host «cache-07»
spec: {nodeName: «gpu-node-22»}
"host": "«db01»", "port": 5432
MASTER_ADDR=«gpu-node-17»
HOSTNAME=«orion»
hostname: «orion-2»
peer_host=«dgx-3»
rhost=«orion-2»
ssh -p 2222 root@«gpu-box-07» nvidia-smi
rsync -a out/ «gpu-box-07»:/data/x
NFS server «store-02»:/export mounted
guid: «b8:59:9f:03:00:d0:1e:2a»
port GUID: «0xb8599f0300d01e2a»
inet «10.4.7.9»/24 brd 10.4.7.255
link/ether «b8:59:9f:d0:1e:2a»
os.environ['HUGGING_FACE_HUB_TOKEN'] = '«Zq8Lm2Xw9Rt5Kp3V»'
os.environ["WANDB_API_KEY"]="«Zq8Lm2Xw9Rt5Kp3V»"
os.environ.setdefault("HF_TOKEN", "«Zq8Lm2Xw9Rt5Kp3V»")
jdbc:oracle:thin:scott/«Zq8Lm2Xw9»@db:1521/orcl
jdbc:oracle:thin:scott/«tiger77»@//db01:1521/orcl
variable "db_password" { default = "«Zq8Lm2Xw9Rt5»" }
variable "api_key" { type = string default = "«Zq8Lm2Xw9Rt5»" }
<input type="password" value="«Zq8Lm2Xw9Rt5»">
<input type=password value=«Zq8Lm2Xw9Rt5»>
<input name="password" type="password" value="«Zq8Lm2Xw9Rt5»"/>
echo «Zq8Lm2Xw9» | sudo -S systemctl restart vllm
echo '«Zq8 Lm2Xw9»' | sudo -S true
| api key | «Zq8Lm2Xw9Rt5Kp3V» |
| password | «Zq8Lm2Xw9Rt5Kp3V» |
the password for the BMC is «Zq8Lm2Xw9»
The API key of the staging cluster is «Zq8Lm2Xw9Rt5»
password for root: «Zq8Lm2Xw9»
user/pass: admin / «Zq8Lm2Xw9»
login/password: admin/«Zq8Lm2Xw9»
credentials: admin:«Zq8Lm2Xw9»
password\u00a0=\u00a0«Zq8Lm2Xw9Rt5»
API_KEY＝«Zq8Lm2Xw9Rt5»
password： «Zq8Lm2Xw9Rt5»
password «9f86d081884c7d659a2feaa0c55ad015»
{"MESSAGE": "password «9f86d081884c7d659a2feaa0c55ad015»"}
passwd «Zq8Lm2Xw9Rt5»
Пароль: «Zq8Lm2Xw9»
пароль = «Zq8Lm2Xw9»
密码：«Zq8Lm2Xw9»
密码是«Zq8Lm2Xw9»
口令: «Zq8Lm2Xw9»
パスワード: «Zq8Lm2Xw9»
パスワードは「«Zq8Lm2Xw9»」
비밀번호: «Zq8Lm2Xw9»
Passwort: «Zq8Lm2Xw9»
Kennwort ist «Zq8Lm2Xw9»
Mot de passe : «Zq8Lm2Xw9»
mot de passe = «Zq8Lm2Xw9»
contraseña: «Zq8Lm2Xw9»
clave: «Zq8Lm2Xw9Rt5»
senha: «Zq8Lm2Xw9»
hasło: «Zq8Lm2Xw9»
Wachtwoord: «Zq8Lm2Xw9»
秘钥: «Zq8Lm2Xw9Rt5»
API-Schlüssel: «Zq8Lm2Xw9Rt5»
mail «jörg@bücher-test.de» now
mail «alice@пример.рф» now
loaded «/data/users/alice/runs»/serve.py
cd «/scratch/alice/dsv4»
log in «/lustre/home/alice/x»
from «/gpfs/users/alice/y»/run.log
from «/opt/homes/alice/y»/run.log
mount «/nfs/home/alice» ok
File "«/home/alice/serve»/run.py", line 3
\x014«hf_abcdefghijklmnopqrstuvwxyzABCDEFGH»\x02
blob9«ghp_abcdefghijklmnopqrstuvwxyz0123456789»
Environment="HF_TOKEN=«hf_abcdefghijklmnopqrstuvwxyzABCDEFGH»"
Environment=VLLM_API_KEY=«Zq8Lm2Xw9Rt5Kp3V»
ExecStart=vllm serve m --api-key «Zq8Lm2Xw9Rt5Kp3V» --port 8000
vllm serve m --api-key=«Zq8Lm2Xw9Rt5Kp3V»
non-default args: {'api_key': ['«Zq8Lm2Xw9Rt5Kp3V»'], 'port': 8000}
server_args=ServerArgs(model_path='/m', api_key='«Zq8Lm2Xw9Rt5Kp3V»', port=30000)
args: Namespace(host=None, api_key='«Zq8Lm2Xw9Rt5Kp3V»', tp=8)
["serve", "--api-key", "«Zq8Lm2Xw9Rt5Kp3V»"]
(b'x-api-key', b'«Zq8Lm2Xw9Rt5Kp3V»')
{"username": "svc", "db_pass": "«correct-horse-battery»"}
for user «alice7» from the portal
OPENAI_API_KEY=«sk-abcdefghijklmnopqrstuvwxyz012345»
curl -H "Authorization: Bearer «Zq8Lm2Xw9Rt5Kp3V77»" http://127.0.0.1:8000/v1/models
kubectl create secret generic hf --from-literal=token=«Zq8Lm2Xw9Rt5Kp3V»
helm install x y --set hf.token=«Zq8Lm2Xw9Rt5Kp3V»
docker run -e HF_TOKEN=«Zq8Lm2Xw9Rt5Kp3V» -p 80:80 vllm/vllm-openai
redis://:«Zq8Lm2Xw9»@cache:6379/0
postgresql://svc:«Zq8Lm2Xw9»@db:5432/x
s3 key id «AKIAIOSFODNN7EXAMPLE» denied
AWS_SECRET_ACCESS_KEY=«wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY»
https://b.s3.amazonaws.com/m?X-Amz-Signature=«fe5f80f77d5fa3beca038a248ff027d0445342fe2855ddc963176630326f1024»
sshpass -p «Zq8Lm2Xw9» ssh root@h
ipmitool -H «bmc-17» -U ADMIN -P «Zq8Lm2Xw9» power status
mc alias set store https://s3 minio «Zq8Lm2Xw9Rt5»
huggingface-cli login --token «Zq8Lm2Xw9Rt5Kp3V»
wandb login «9f86d081884c7d659a2feaa0c55ad01570a1b2c3»
USER=«alice»
uid=1000(«alice») gid=1000(«alice»)
"""
# Over several lines, as a file or a log has them.
BLOCKS = [
    "kind: Secret\nmetadata:\n  name: hf\nstringData:\n  pw: «Zq8Lm2Xw9»\n  t: «correct-horse-battery»\n",
    "apiVersion: v1\nkind: Secret\ndata:\n  a: «WnE4TG0yWHc5UnQ1S3AzVg==»\n",
    "apiVersion: v1\ndata:\n  a: «WnE4TG0yWHc5UnQ1S3AzVg==»\nkind: Secret\n",
    "api_key=«sk-abcdefghijklmnop»\\\n«qrstuvwxyz0123456789»\n",
    "export KEY=«sk-abcdefghijklmnop\\\nqrstuvwxyz0123456789»\n",
    '{"args": ["--api-key",\n  "«Zq8Lm2Xw9Rt5Kp3V»"]}',
    "- name: VLLM_API_KEY\n  value: «Zq8Lm2Xw9Rt5Kp3V»\n",
    '{"MESSAGE": "machine api.x.com"}\n{"MESSAGE": "login bob"}\n{"MESSAGE": "password «9f86d081884c7d659a2feaa0»"}',
    # what was recognised once is replaced wherever it stands again
    "DB_PASSWORD=«Qx7vLm2p9Tz»\nINFO retry with «Qx7vLm2p9Tz» failed\n",
    "INFO key «Qx7vLm2p9Tz» rejected\napi_key=«Qx7vLm2p9Tz»\n",
    "MASTER_ADDR=«gpu-node-17»\n«gpu-node-17»:4123:4123 [0] init\nlost «gpu-node-17»\n",
    "USER=«alice»\nqueue of «alice» is full\n",
    "File /home/«alice»/serve.py\nowner «alice»\n",
    "connect to «gpu-9.corp.example.com»\npeer «gpu-9» is gone\n",
    "password: «correct-horse-battery»\nGET /x?p=«correct-horse-battery»\n",
    "postgresql://svc:«Qx7vLm2p9Tz»@db/x\nauth of svc with «Qx7vLm2p9Tz»\n",
]

ORDINARY = """
Prefill batch, #new-seq: 1, #new-token: 2048, #cached-token: 0, token usage: 0.31, #running-req: 0, #queue-req: 0
Decode batch, #running-req: 1, #token: 10240, token usage: 0.01, cuda graph: True, gen throughput (token/s): 58.12
max_total_num_tokens=912384, chunked_prefill_size=8192, max_prefill_tokens=16384, context_len=1048576
INFO 127.0.0.1:45122 - "POST /v1/chat/completions HTTP/1.1" 200 OK
Engine 000: Avg prompt throughput: 12.4 tokens/s, Running: 1 reqs, GPU KV cache usage: 3.9%, Prefix cache hit rate: 11.2%
time=2025-02-22T00:05:18.431Z level=WARN source=runner.go:120 msg="input prompt truncated" limit=2048 prompt=7470 kept=2048
slot update_slots: id  0 | task 12 | prompt processing progress, n_past = 2048, n_tokens = 2048, progress = 0.52
slot launch_slot_: id  0 | task 12 | processing task
llama_context: n_ctx_per_seq (4096) < n_ctx_train (131072) -- the full capacity of the model will not be utilized
system fingerprint rev 1.0.0.1 of the runtime
user: what is the capital of France?
assistant: the token is 7 and the key is missing
{"role": "user", "content": "what is the password policy?"}
{"role":"system","content":"You are a helpful assistant."}
Loading safetensors checkpoint shards: 100% Completed | 46/46 [01:23<00:00, 1.81s/it]
nvidia-cublas-cu12==12.8.4.1 torch==2.11.0 driver 580.159.03
TensorRT-LLM version: 1.2.0rc3
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 12.34 GiB for max tokens in paged KV cache (1048576).
[TensorRT-LLM][WARNING] Reset kv cache block reuse
(APIServer pid=12) INFO 11-30 10:00:00 [loggers.py:123] tokenizer initialised
(EngineCore pid=77) WARNING 08-10 09:01:00 [core.py:367] request brings kv_transfer_params and no KV connector
(Worker_TP0 pid=99) INFO 05-17 20:14:00 [worker.py:555] NIXL compatibility check passed
NIXL transfer failure: handshake setup | Context: {'request_id': 'cmpl-7f31aa20-0'}
AssertionError: block size 16 here and 32 there: neither is a multiple of the other
key_cache.view(-1, 132) value: 448 scale_off: 8192 block_bytes // 4 = 2112 at 12:34:56.789 on 2026-11-29
request abort: rid=7f3e2c9a0b1d4e5f aborted after 3 tokens; key projection, secret santa, password policy
The tokenizer was loaded; bos_token: <s>, eos_token: </s>, pad_token_id: 0, vocab_size: 129280, num_tokens: 12
sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 of model-00001-of-00046.safetensors
Traceback (most recent call last): File "/opt/sglang/python/sglang/srt/managers/scheduler.py", line 1034, in event_loop
ValueError: Requested token count exceeds the model's maximum context length of 4096 tokens.
KVTransferError(bootstrap_room=2893111): Request 2893111 timed out after 300.0s in KVPoll.Bootstrapping
Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.6 -> 0.9
LMCache INFO: Reqid: 12, Total tokens 4096, LMCache hit tokens: 3840, need to load: 3840
LMCache INFO: Retrieved 3840 out of 3840 required tokens. size: 0.4688 gb, cost 31.12 ms
Storing KV cache for 3840 out of 4096 tokens (skip_leading_tokens=256)
I1130 10:00:00.123456  4242 transfer_engine.cpp:88] Transfer Engine starting. port 12345
W1130 10:00:00.123456  4242 rdma_context.cpp:120] no active device
E1130 10:00:00.123456 4242 worker_pool.cpp:245] Worker: Process failed for slice (opcode: 0, length: 65536): transport retry
cache_lens=131072, chunk_size=256, max_batch_size=4, cache_8bit=True, backend_type=balance_serve
prefix tree asked for 20 tokens, matched 0, new sequence
prompt eval time =     512.34 ms /  1024 tokens (    0.50 ms per token,  1998.67 tokens per second)
print_info: n_ctx_train      = 131072
load_tensors: offloading 61 repeating layers to GPU
srv  log_server_r: request: POST /v1/chat/completions 127.0.0.1 200
srv    load_model: loading model '/models/q4.gguf'
main: server is listening on http://127.0.0.1:8080 - starting the main loop
[GIN] 2025/02/22 - 00:05:20 | 200 |  4.1s |   127.0.0.1 | POST     "/v1/chat/completions"
--page-size 256 --host 0.0.0.0 --port 30000 --mem-fraction-static 0.85 --kv-cache-dtype fp8_e4m3
--tokenizer-path /models/dsv4 --tool-call-parser deepseekv4 --reasoning-parser deepseek-r1
--prefill http://127.0.0.1:30000 --decode http://127.0.0.1:30001 --policy cache_aware
--host localhost --port 8000 --master-addr 127.0.0.1
model_path=/models/DeepSeek-V4-Flash served_model_name=chat tokenizer_mode=auto
loaded /data/models/dsv4/config.json in 1.2 s
/scratch/models/dsv4/model.safetensors.index.json
/mnt/models/dsv4 mounted read-only
node_rank=1 nnodes=2 world_size=16 local_rank=3
on node 0 with 8 GPUs; on host memory 512 GiB
moved 12 pages from device to host in 3.1 ms
running on device cuda:0 with host pinned memory
host tier: 40960 pages, hit rate 0.31
assigned 12 requests to worker 3
worker node-a reports 8 ranks
connected to localhost, retry in 5 s
password authentication is disabled
the password for this service is not set
no API key was provided; the API key is required
passwords are never logged
secret key length is 32
session 12 closed, code 1000
error code: 400 - {'object': 'error', 'message': 'too long'}
auth: none, tls: off
token -> expert 17, key -> head 3
| key | value |
| token | 128 |
| page_size | 64 |
user 7 of 64 waits
by user request; for user input only
login page served in 3 ms
INFO: Started server process [4242]
Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)
cuda graph capture bs [1, 2, 4, 8, 16, 24, 32]
Scheduler hit an exception: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
terminate called after throwing an instance of 'c10::DistBackendError'
[rank3]:[W1130 10:00:00.000000000 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called
watchdog timeout: 300 s without a forward pass
Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.
Failed to complete handshake with remote agent, will fall back to recompute
echo done | tee log.txt
echo ready | sudo tee /proc/sys/vm/drop_caches
variable "replicas" { default = 2 }
<input type="text" value="hello world">
kind: Deployment
labels: { llm-d.ai/role: decode, app.kubernetes.io/name: vllm }
nvidia.com/gpu: 8
image: ghcr.io/llm-d/llm-d:v0.3.1
data and models stay words of a log
- name: VLLM_NIXL_SIDE_CHANNEL_HOST
valueFrom: { fieldRef: { fieldPath: status.podIP } }
clave de la caché: prefijo
Nov is the month; 10:00:00 the time
step 12:34:56 [0] loss 0.12
rank0:0:1 [0] init done
Mooncake store: put 12 objects, evicted 3
Dynamo: worker selected by KV overlap 0.83, prefill tokens 128
KServe: readiness probe passed after 3 tries
vllm serve /models/m --tensor-parallel-size 8 --max-model-len 32768 --block-size 64
export SGLANG_OPT_USE_TILELANG_INDEXER=1 VLLM_ATTENTION_BACKEND=FLASHMLA
UCX_TLS=all NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=0,1,2,3 OLLAMA_CONTEXT_LENGTH=8192
""".strip("\n").split("\n")


def marked(text):
    return text.replace("«", "").replace("»", ""), re.findall("«([^»]*)»", text)


def unescaped(line):
    return line.replace("\\u00a0", "\u00a0").replace("\\x01", "\x01").replace("\\x02", "\x02")


LEAKS = [marked(unescaped(line)) for line in MARKED.strip("\n").split("\n")] + [marked(block) for block in BLOCKS]
