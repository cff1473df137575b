"""A plain forward pass of the calibration checkpoint in PyTorch, with the semantics of DeepSeek sparse attention and
with real pages: index keys and latents are written as a serving engine writes them (fp8, pages of 64) and read back.

    python tools/checkpoint_reference.py [--lengths 500,1000,2000] [--repeats 2] [--topk 2048] [--fault KIND]

It answers the prompts of `needlework probe recall` and prints recall by length. `--fault` damages the pages after the
prompt is read, as tools/vllm_worker.py does in a running engine: index-skip, index-swap, scales-zero, mla-skip.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import checkpoint_words as words  # these two beside this file
import make_checkpoint as made
import torch
from needlework import pages
from needlework.probes import PromptSpec
from needlework.probes.bench.prompts import Prompt, Ratio, build
from needlework.probes.bench.trial import with_seed
from torch import Tensor

PAGE = 64
INDEX, MLA = pages.LAYOUTS["dsa-index-fp8-ue8m0"], pages.LAYOUTS["v32-mla-fp8"]
FAULTS = ("none", "index-skip", "index-swap", "scales-zero", "mla-skip")


def rounded(x: Tensor) -> Tensor:
    """To bfloat16 and back, where the engine keeps bfloat16."""
    return x.to(torch.bfloat16).float()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return rounded(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight)


def turned(x: Tensor, positions: Tensor, *, halves: bool) -> Tensor:
    """Rotary embedding of the last dimension [..., 64]; pairs are halves or neighbours. positions: one a row of x."""
    size = x.shape[-1] // 2
    angle = positions[:, None] * made.THETA ** (-torch.arange(size) / size)
    cos, sin = (rounded(f(angle)).view(len(x), *(1,) * (x.ndim - 2), size) for f in (torch.cos, torch.sin))
    a, b = (x[..., :size], x[..., size:]) if halves else (x[..., 0::2], x[..., 1::2])
    both = (a * cos - b * sin, a * sin + b * cos)
    return rounded(torch.cat(both, -1) if halves else torch.stack(both, -1).flatten(-2))


def fp8(x: Tensor) -> Tensor:
    """Each row to e4m3 with a scale that is a power of two, and back."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448)))
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def compact(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in float32 and without the heads, of attention and of the indexer, that do nothing."""
    out = {name: t.float() for name, t in weights.items() if "mlp" not in name}
    for layer in range(made.LAYERS):
        at = f"model.layers.{layer}.self_attn."
        o = out[at + "o_proj.weight"].view(made.HIDDEN, made.HEADS, made.VALUE)
        kept = (o != 0).any(2).any(0)
        asked = out[at + "indexer.wq_b.weight"].view(made.INDEX_HEADS, made.INDEX_DIM, made.LOW)
        used = (asked != 0).flatten(1).any(1)
        out[at + "o_proj.weight"] = o[:, kept]
        out[at + "q_b_proj.weight"] = out[at + "q_b_proj.weight"].unflatten(0, (made.HEADS, -1))[kept]
        out[at + "kv_b_proj.weight"] = out[at + "kv_b_proj.weight"].unflatten(0, (made.HEADS, -1))[kept]
        out[at + "indexer.wq_b.weight"] = asked[used]
        out[at + "indexer.weights_proj.weight"] = out[at + "indexer.weights_proj.weight"][used]
    return out


class Reference:
    """The model, from `compact` weights, with its caches. Feed prompt tokens with `read`, then `answer`."""

    def __init__(self, weights: dict[str, Tensor], *, topk: int = made.TOPK, tokens: int = 4096):
        self.w, self.topk, self.length = weights, topk, 0
        count = -(-tokens // PAGE)
        self.pools = [
            tuple(torch.zeros(count, layout.page_bytes(PAGE), dtype=torch.uint8) for layout in (INDEX, MLA))
            for _ in range(made.LAYERS)
        ]
        self.held: list[tuple[Tensor, Tensor]] = [(torch.zeros(0), torch.zeros(0))] * made.LAYERS

    def _of(self, layer: int, name: str) -> Tensor:
        return self.w[f"model.layers.{layer}.self_attn.{name}.weight"]

    def read(self, ids: Sequence[int], chunk: int = 512) -> Tensor:
        """Append tokens; logits [vocabulary] after the last."""
        logits = torch.zeros(0)
        for start in range(0, len(ids), chunk):
            logits = self._chunk(torch.tensor(ids[start : start + chunk]))
        return logits

    def answer(self, logits: Tensor, limit: int = 20) -> list[int]:
        """Greedy tokens until the end mark, which is left out."""
        out: list[int] = []
        while len(out) < limit and (token := int(logits.argmax())) != words.EOS:
            out.append(token)
            logits = self.read([token])
        return out

    def reload(self) -> None:
        """Read all pages again: call it after they were changed."""
        slots = torch.arange(self.length)
        self.held = [(INDEX.gather(i, slots, PAGE), MLA.gather(m, slots, PAGE)) for i, m in self.pools]

    def _chunk(self, ids: Tensor) -> Tensor:
        positions = torch.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        x = self.w["model.embed_tokens.weight"][ids]
        for layer in range(made.LAYERS):
            last = layer == made.LAYERS - 1
            h = rms(x, self.w[f"model.layers.{layer}.input_layernorm.weight"])
            self._write(layer, h, positions)
            rows = slice(-1, None) if last else slice(None)  # nothing reads the other rows of the last layer
            x = rounded(x[rows] + self._attend(layer, h[rows], positions[rows]))
        return rms(x[-1], self.w["model.norm.weight"]) @ self.w["lm_head.weight"].T

    def _write(self, layer: int, h: Tensor, positions: Tensor) -> None:
        key = rounded(h @ self._of(layer, "indexer.wk").T)
        norm, bias = (self.w[f"model.layers.{layer}.self_attn.indexer.k_norm.{name}"] for name in ("weight", "bias"))
        key = torch.nn.functional.layer_norm(key, (made.INDEX_DIM,), norm, bias, 1e-6)
        key = rounded(key)
        key[:, : made.ROPE] = turned(key[:, : made.ROPE], positions, halves=True)
        kv = rounded(h @ self._of(layer, "kv_a_proj_with_mqa").T)
        latent = rms(kv[:, : made.LATENT], self._of(layer, "kv_a_layernorm"))
        both = torch.cat((latent, turned(kv[:, made.LATENT :], positions, halves=False)), 1)
        new = []
        for layout, pool, values in zip((INDEX, MLA), self.pools[layer], (key, both), strict=True):
            layout.scatter(pool, positions, values, PAGE)
            new.append(layout.gather(pool, positions, PAGE))
        before = self.held[layer]
        self.held[layer] = tuple(torch.cat((a, b)) if len(a) else b for a, b in zip(before, new, strict=True))  # type: ignore[assignment]

    def _attend(self, layer: int, h: Tensor, positions: Tensor) -> Tensor:
        low = rms(rounded(h @ self._of(layer, "q_a_proj").T), self._of(layer, "q_a_layernorm"))
        q = rounded(torch.einsum("tl,hdl->thd", low, self._of(layer, "q_b_proj")))
        both = self._of(layer, "kv_b_proj")
        absorbed = rounded(torch.einsum("thd,hdl->thl", q[..., : made.NOPE], both[:, : made.NOPE]))
        q = torch.cat((absorbed, turned(q[..., made.NOPE :], positions, halves=False)), -1)
        asked = rounded(torch.einsum("tl,hdl->thd", low, self._of(layer, "indexer.wq_b")))
        asked[..., : made.ROPE] = turned(asked[..., : made.ROPE], positions, halves=True)
        weights = rounded(h @ self._of(layer, "indexer.weights_proj").T)
        keys, entries = self.held[layer]
        out = torch.zeros(len(h), q.shape[1], made.LATENT)
        for start in range(0, len(h), 64):
            part = slice(start, start + 64)
            scores = torch.einsum("thl,th->tl", (fp8(asked[part]) @ keys.T).clamp(min=0), weights[part])
            late = torch.arange(len(keys))[None] > positions[part, None]
            scores.masked_fill_(late, -torch.inf)
            chosen = scores.topk(min(self.topk, len(keys)), -1)
            if len(keys) <= self.topk:
                logits = torch.einsum("thd,sd->ths", q[part], entries) * made.SCALE
                share = logits.masked_fill(late[:, None], -torch.inf).softmax(-1)
                out[part] = share @ entries[:, : made.LATENT]
            else:
                read = entries[chosen.indices]
                logits = torch.einsum("thd,tsd->ths", q[part], read) * made.SCALE
                share = logits.masked_fill(torch.isinf(chosen.values)[:, None], -torch.inf).softmax(-1)
                out[part] = share @ read[..., : made.LATENT]
        value = rounded(torch.einsum("thl,hvl->thv", rounded(out), both[:, made.NOPE :]))
        return rounded(torch.einsum("thv,dhv->td", value, self._of(layer, "o_proj")))


def damage(model: Reference, fault: str, layer: int, swapped: tuple[int, int] = (2, 30)) -> None:
    """What a transfer that went wrong leaves in one layer's pages."""
    index, mla = model.pools[layer]
    if fault == "index-skip":
        index.zero_()
    elif fault == "index-swap":
        a, b = swapped
        if max(swapped) >= len(index):
            raise ValueError(f"the prompt has {len(index)} pages, and page {max(swapped)} is to be exchanged")
        index[[a, b]] = index[[b, a]]
    elif fault == "scales-zero":
        index[:, PAGE * made.INDEX_DIM :] = 0
    elif fault == "mla-skip":
        mla.zero_()
    elif fault != "none":
        raise ValueError(f"unknown fault {fault}; one of {', '.join(FAULTS)}")
    model.reload()


def built(spec: PromptSpec, tokenizer: words.Tokenizer) -> Prompt:
    """The probes' own prompt, counted with the checkpoint's tokenizer."""

    async def count(messages: list[dict[str, str]]) -> int:
        return len(tokenizer.chat(messages[-1]["content"]))

    return asyncio.run(build(spec, count, Ratio()))


def ask(weights: dict[str, Tensor], tokenizer: words.Tokenizer, prompt: Prompt, *, topk: int = made.TOPK,
        fault: str = "none", layer: int = 2) -> str:  # fmt: skip
    """The answer's text. With a fault, the last token is computed after the damage, as a decode server does."""
    ids = tokenizer.chat(prompt.text)
    model = Reference(weights, topk=topk, tokens=len(ids) + 64)
    model.read(ids[:-1])
    if fault != "none":
        damage(model, fault, layer)
    return tokenizer.decode(model.answer(model.read(ids[-1:]))).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="500,1000,2000,4000")
    parser.add_argument("--depths", default="0,0.5,1")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--control", default="", help="absent: the key is not given")
    parser.add_argument("--needle", default="digits5")
    parser.add_argument("--distractors", type=int, default=2)
    parser.add_argument("--topk", type=int, default=made.TOPK)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    parser.add_argument("--layer", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the tensors lie, as torch names it")
    options = parser.parse_args()
    pieces = words.vocabulary()
    weights, tokenizer = compact(made.tensors(pieces, options.seed)), words.Tokenizer(pieces)
    torch.set_default_device(options.device)
    weights = {name: weight.to(options.device) for name, weight in weights.items()}
    order = Random(options.seed)
    for length in map(int, options.lengths.split(",")):
        hits: list[bool] = []
        misses: list[Any] = []
        for depth in map(float, options.depths.split(",")):
            for repeat in range(options.repeats):
                asked = PromptSpec(length, depth, control=options.control, needle=options.needle)
                asked = replace(asked, distractors=options.distractors)
                spec = with_seed(asked, repeat, order.randrange(9999))
                prompt = built(spec, tokenizer)
                said = ask(weights, tokenizer, prompt, topk=options.topk, fault=options.fault, layer=options.layer)
                hits.append(said == (prompt.expected or "".join(words.REFUSAL)))
                misses += [] if hits[-1] else [(depth, prompt.expected, said)]
        print(f"{length:6,} tokens: {sum(hits)} of {len(hits)}", *misses[:3], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
