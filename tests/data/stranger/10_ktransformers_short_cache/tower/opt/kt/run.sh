#!/usr/bin/env bash
source /opt/kt/bin/activate
export TORCH_CUDA_ARCH_LIST="8.6"
ktransformers \
  --gguf_path /models/v3-q4 --model_path deepseek-ai/DeepSeek-V3 \
  --cache_lens 4096 --max_new_tokens 2000 --cache_q4 True \
  --cpu_infer 30 --host 0.0.0.0 --port 10002
