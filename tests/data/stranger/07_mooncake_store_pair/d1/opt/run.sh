#!/bin/bash
MOONCAKE_CONFIG_PATH=/etc/mooncake.json python3 -m vllm.entrypoints.openai.api_server --model /models/qwen-14b \
  --port 8100 --max-model-len 20000 --gpu-memory-utilization 0.9 --tensor-parallel-size 2 \
  --kv-transfer-config '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_consumer"}' > /var/log/vllm.log 2>&1
