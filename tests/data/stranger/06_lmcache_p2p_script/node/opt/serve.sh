#!/usr/bin/env bash
set -euo pipefail
export LMCACHE_CONFIG_FILE=/etc/lmcache/p2p.yaml
export PYTHONHASHSEED=0
exec vllm serve /models/llama-8b \
  --max-model-len 16384 --gpu-memory-utilization 0.8 \
  --no-enable-prefix-caching \
  --kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'
