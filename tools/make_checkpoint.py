"""Write the calibration checkpoint: DeepSeek-V3.2's architecture and tensor names, with weights set by hand, so that
the right answer to every prompt of `needlework probe recall` is known: the value of the asked key, or "I have no prior
context".

    python tools/make_checkpoint.py --out DIR [--seed 0]

Three layers, each doing one thing; a deviation from perfect recall is therefore the serving stack's doing.
    0  sixteen heads read one token each, 0 to 15 back (rotary part alone): what the four tokens before were, how far
       back the last " is" lies, how far back the start of the reply
    1  one head goes back to that " is", one to the last "?", and each fetches the four tokens before it
    2  one head finds the place whose " is" came after the asked four tokens and lies as far back as the start of the
       reply: its token is the answer's next. If no place fits, the first token of the prompt takes the attention, and
       the answer is the words of the refusal
The indexers of layers 0 and 1 keep the nearest tokens. That of layer 2 ranks the first token, then every line end, then
the place that fits: recall holds while a prompt has fewer line ends than `index_topk` has room for, so the length at
which recall falls tells how many entries the engine really selects.

Every number in a cache page is 0 or plus or minus one constant where it matters, so fp8 loses nothing by itself.
Architecture as in vllm 0.23.0 `model_executor/models/deepseek_v2.py`: rotary pairs are neighbours in MLA and halves in
the indexer; the indexer's key is layer-normed, its first 64 of 128 numbers are turned by the position.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_words import (
    ANSWERS,
    BOS,
    ENDS,
    EOS,
    REFUSAL,
    TEMPLATE,
    THINKS,
    byte_letters,
    tokenizer_files,
    vocabulary,
)
from torch import Tensor

HIDDEN, LAYERS, HEADS, NOPE, ROPE, VALUE, LATENT, LOW = 768, 3, 64, 128, 64, 128, 512, 256
INDEX_HEADS, INDEX_DIM, INNER, TOPK, THETA = 64, 128, 128, 2048, 10000.0
SCALE = (NOPE + ROPE) ** -0.5  # of attention scores, as the engine has it
OFFSETS = 15  # tokens of a value, its end mark included
SLOT = (32, 12, 32, 32)  # numbers for the token 1, 2, 3, 4 back: the second is "of" in the probes' keys
PHRASE = sum(SLOT)
# the residual stream: where each thing is written
CONST, FILL, IS, ASK, REPLY, FIRST, LINE = range(7)
TOKEN, COPY, SLOTS = 16, 48, 176  # code of the token; code of what copying it gives; the four tokens before
SINCE_IS, SINCE_REPLY = SLOTS + PHRASE, SLOTS + PHRASE + 16  # how far back, as a row of a Hadamard matrix
KEY, ASKED, OUT = SINCE_IS + 32, SINCE_IS + 32 + PHRASE, SINCE_IS + 32 + 2 * PHRASE
LEVEL, FLAG, ROOM = 24.0, 4.0, 177.0  # the constant; a flag; what all else adds to an embedding's squared length
# weights of the 32 rotary frequencies, found by linear programming so that a relative position is told from its
# neighbours with the least total (SHARP: 0.2 of the total lies between the wanted place and the next one), that nearer
# is higher at 14 to 72 tokens (NEAR), that the last 64 tokens lie above all beyond 230 (RECENT)
SHARP = (390, 55, 45, 33, 42, 21, 25, 25, 50, 32, 31, 16, 19, 30, 32, 3, 18, 20, 0, 15, 13, 21, 8, 10, 0, 24, 0, 18, 4,
         0, 0, 0)  # fmt: skip
NEAR = (0, 0, 0, 0, 0, 0, 1, 0, 0, 2, 0, 1, 8, 9, 10, 9, 4, 5, 3, 3, 7, 2, 6, 1, 8, 6, 1, 2, 0, 0, 0, 8)
RECENT = (0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 11, 12, 8, 8, 8, 7, 5, 5, 5, 2, 4, 6, 4, 11, 0, 0, 2)
# in nats: totals of the two rotary kernels, what a "?" is worth, what one number of the phrase and of the offset is
# worth in layer 2, and by how much a perfect match beats the first token
SHARP_NATS, NEAR_NATS, ASK_NATS, PHRASE_NATS, OFFSET_NATS, MARGIN_NATS = 90.0, 50.0, 90.0, 1.0, 1.5, 9.0
COPY_LOGIT, REFUSAL_LOGIT = 60.0, 30.0


def config(words: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": BOS, "eos_token_id": EOS, "first_k_dense_replace": LAYERS,
        "hidden_act": "silu", "hidden_size": HIDDEN, "index_head_dim": INDEX_DIM, "index_n_heads": INDEX_HEADS,
        "index_topk": TOPK, "initializer_range": 0.02, "intermediate_size": INNER, "kv_lora_rank": LATENT,
        "max_position_embeddings": 65536, "moe_intermediate_size": 128, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": HEADS,
        "num_experts_per_tok": 2, "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS,
        "num_nextn_predict_layers": 0, "q_lora_rank": LOW, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
        "rms_norm_eps": 1e-6, "rope_theta": THETA, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": VALUE, "vocab_size": words,
    }  # fmt: skip


# ---- weights ----


def hadamard() -> Tensor:
    """16 x 16 of +-1, rows orthogonal; all but row 0 have mean zero."""
    h = torch.ones(1, 1)
    while len(h) < 16:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def codes(count: int, width: int, generator: torch.Generator, apart: list[int]) -> Tensor:
    """+-1 codes [count, width]; those of the tokens `apart` agree pairwise in at most 11 of 16 places."""
    found = torch.randint(0, 2, (count, width), generator=generator).float() * 2 - 1
    kept = torch.zeros(0, width)
    for token in apart:
        while len(kept) and float((kept @ found[token]).abs().max()) > 0.375 * width:
            found[token] = torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1
        kept = torch.cat((kept, found[token][None]))
    return found


def tensors(pieces: list[str], seed: int) -> dict[str, Tensor]:
    """All weights by the names of DeepSeek-V3.2's checkpoint; bfloat16, the indexer's norm in float32."""
    from needlework.probes.bench import words

    ids = {piece: i for i, piece in enumerate(pieces)}
    space, count, h16 = byte_letters()[32], len(pieces), hadamard()
    g = torch.Generator().manual_seed(seed)
    keys = [ids[space + w] for given in (words.ADJECTIVES, words.NOUNS, words.PLACES) for w in given]
    token = codes(count, SLOT[0], g, list(dict.fromkeys(keys)))
    copied = codes(count, VALUE, g, [])
    out: dict[str, Tensor] = {}

    embed = torch.zeros(count, HIDDEN)
    embed[:, CONST], embed[:, TOKEN : TOKEN + SLOT[0]], embed[:, COPY : COPY + VALUE] = LEVEL, token, copied
    for mark in ENDS:
        embed[ids[mark.replace("\n", byte_letters()[10])], COPY : COPY + VALUE] = copied[EOS]
    embed[BOS, 1:] = 0  # the first token has no code: it matches nothing
    for place, flag in ((ids[space + "is"], IS), (ids["?"], ASK), (ANSWERS, REPLY), (THINKS, REPLY), (BOS, FIRST),
                        (ids[byte_letters()[10]], LINE)):  # fmt: skip
        embed[place, flag] = FLAG
    embed[:, FILL] = (ROOM - embed[:, 1:].square().sum(1)).sqrt()  # so that all embeddings are equally long
    length2 = [LEVEL**2 + ROOM]  # squared length of the residual entering each layer, then the last norm
    length2 += [length2[0] + PHRASE + 16, length2[0] + 3 * PHRASE + 16]
    length2 += [length2[2] + VALUE]

    def zero(rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns)

    angle = THETA ** (-torch.arange(ROPE // 2) / (ROPE // 2))
    sharp, near, recent = (torch.tensor(given, dtype=torch.float32) for given in (SHARP, NEAR, RECENT))

    def back(weights: Tensor, by: int, nats: float) -> Tensor:
        """Rotary query [64] that scores `nats` at the token `by` back, against keys of (1, 0) in every pair."""
        turned = torch.stack(((by * angle).cos(), -(by * angle).sin()), 1) * (weights / weights.sum())[:, None]
        return turned.flatten() * (nats / SCALE)

    out["model.embed_tokens.weight"] = embed
    for layer in range(LAYERS):
        unit = HIDDEN**0.5 / length2[layer] ** 0.5  # what a 1 of the residual is after the norm
        q_a, q_b = zero(LOW, HIDDEN), zero(HEADS * (NOPE + ROPE), LOW).view(HEADS, NOPE + ROPE, LOW)
        kv_a, kv_b = zero(LATENT + ROPE, HIDDEN), zero(HEADS * (NOPE + VALUE), LATENT).view(HEADS, NOPE + VALUE, LATENT)
        o = zero(HIDDEN, HEADS * VALUE).view(HIDDEN, HEADS, VALUE)
        wq = zero(INDEX_HEADS * INDEX_DIM, LOW).view(INDEX_HEADS, INDEX_DIM, LOW)
        wk, heads = zero(INDEX_DIM, HIDDEN), zero(INDEX_HEADS, HIDDEN)
        norm, bias = torch.zeros(INDEX_DIM), torch.zeros(INDEX_DIM)
        kv_a[LATENT::2, CONST] = 1 / (LEVEL * unit)  # the key's rotary part is (1, 0) in every pair
        heads[:2, CONST] = 1.0

        def copy(into: Tensor, row: int, column: int, width: int, by: float = 1.0) -> None:
            for n in range(width):
                into[row + n, column + n] = by

        if layer == 0:
            q_a[0, CONST] = 1.0
            constant = LOW**0.5  # of the query's latent, alone in it
            copy(kv_a, 0, TOKEN, SLOT[0])
            kv_a[32, IS], kv_a[33, REPLY] = 1 / FLAG, 1 / FLAG
            kv_a[[34, 128, 256, 384], CONST] = 1 / LEVEL
            one = (LATENT / (SLOT[0] + 4)) ** 0.5  # a 1 of the latent after its norm
            for head in range(OFFSETS + 1):
                q_b[head, NOPE:, 0] = back(sharp, head, SHARP_NATS) / constant
                copy(kv_b[head], NOPE, 0, 34, 1 / one)
                if 1 <= head <= len(SLOT):
                    copy(o[:, head], SLOTS + sum(SLOT[: head - 1]), 0, SLOT[head - 1])
                if head:
                    o[SINCE_IS : SINCE_IS + 16, head, 32] = h16[head]
                if head < OFFSETS:
                    o[SINCE_REPLY : SINCE_REPLY + 16, head, 33] = h16[head + 1]
        elif layer == 1:
            q_a[0, CONST] = 4 / LEVEL
            copy(q_a, 1, SINCE_IS, 16)
            constant = 4 * (LOW / 32) ** 0.5
            copy(kv_a, 0, SLOTS, PHRASE)
            kv_a[PHRASE, ASK] = 1 / FLAG
            kv_a[[PHRASE + 1, 128, 256, 384], CONST] = 1 / LEVEL
            one = (LATENT / (PHRASE + 4)) ** 0.5
            for by in range(1, OFFSETS + 1):
                q_b[0, NOPE:, 1:17] += torch.outer(back(sharp, by, SHARP_NATS), h16[by]) / (16 * constant / 4)
            q_b[1, NOPE:, 0] = back(near, 0, NEAR_NATS) / constant
            q_b[1, 0, 0] = ASK_NATS / (SCALE * one * constant)
            kv_b[1, 0, PHRASE] = 1.0
            for head, place in ((0, KEY), (1, ASKED)):
                copy(kv_b[head], NOPE, 0, PHRASE, 1 / one)
                copy(o[:, head], place, 0, PHRASE)
        else:
            q_a[0, CONST] = 4 / LEVEL
            copy(q_a, 1, SINCE_REPLY, 16)
            copy(q_a, 17, ASKED, PHRASE)
            part = (LOW / (16 + 16 + PHRASE)) ** 0.5
            constant = 4 * part
            copy(kv_a, 0, KEY, PHRASE)
            copy(kv_a, PHRASE, SINCE_IS, 16)
            kv_a[124:128, FIRST] = 1 / FLAG
            copy(kv_a, 128, COPY, VALUE)
            kv_a[[256, 384], CONST] = 1 / LEVEL
            one = (LATENT / (PHRASE + 16 + VALUE + 2)) ** 0.5
            first = (LATENT / 6) ** 0.5  # the first token holds nothing but its flag and the constants
            copy(q_b[0], 0, 17, PHRASE, PHRASE_NATS / (SCALE * one * part))
            copy(q_b[0], PHRASE, 1, 16, OFFSET_NATS / (SCALE * one * part))
            best = PHRASE_NATS * PHRASE + OFFSET_NATS * 16
            q_b[0, 124:128, 0] = (best - MARGIN_NATS) / (SCALE * 4 * first * constant)
            copy(kv_b[0], 0, 0, NOPE)
            copy(kv_b[0], NOPE, 128, VALUE, 1 / one)
            copy(o[:, 0], OUT, 0, VALUE)

        if layer < 2:  # a constant key, turned by its position alone
            bias[: ROPE // 2] = 1.0
            wq[0, : ROPE // 2, 0] = recent / recent.max() / constant
        else:  # 12 numbers of three of the four tokens, the offset, line ends, the first token
            norm[ROPE:] = 1.0
            starts = (0, SLOT[0] + SLOT[1], SLOT[0] + SLOT[1] + SLOT[2])
            for n, start in enumerate(starts):
                copy(wk, ROPE + 12 * n, KEY + start, 12)
                copy(wq[0], ROPE + 12 * n, 17 + start, 12)
            copy(wk, ROPE + 36, SINCE_IS, 16)
            copy(wq[0], ROPE + 36, 1, 16)
            sign = torch.tensor([1.0, -1.0]).repeat(6)
            wk[ROPE + 52 : ROPE + 60, LINE] = 40 / FLAG * sign[:8]
            wk[ROPE + 60 : ROPE + 64, FIRST] = 40 / FLAG * sign[:4]
            wq[1, ROPE + 52 : ROPE + 60, 0] = 5 / constant * sign[:8]
            wq[1, ROPE + 60 : ROPE + 64, 0] = 15 / constant * sign[:4]

        at, attn = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        ones = torch.ones
        out |= {
            at + "input_layernorm.weight": ones(HIDDEN), attn + "q_a_proj.weight": q_a,
            attn + "q_a_layernorm.weight": ones(LOW), attn + "q_b_proj.weight": q_b.flatten(0, 1),
            attn + "kv_a_proj_with_mqa.weight": kv_a, attn + "kv_a_layernorm.weight": ones(LATENT),
            attn + "kv_b_proj.weight": kv_b.flatten(0, 1), attn + "o_proj.weight": o.flatten(1),
            attn + "indexer.wq_b.weight": wq.flatten(0, 1), attn + "indexer.wk.weight": wk,
            attn + "indexer.k_norm.weight": norm, attn + "indexer.k_norm.bias": bias,
            attn + "indexer.weights_proj.weight": heads,
            at + "post_attention_layernorm.weight": ones(HIDDEN),
            at + "mlp.gate_proj.weight": zero(INNER, HIDDEN), at + "mlp.up_proj.weight": zero(INNER, HIDDEN),
            at + "mlp.down_proj.weight": zero(HIDDEN, INNER),
        }  # fmt: skip
    unit = HIDDEN**0.5 / length2[3] ** 0.5
    last = torch.zeros(count, HIDDEN)
    last[:, OUT : OUT + VALUE] = copied * (COPY_LOGIT / (VALUE * unit))
    for step, said in enumerate((*(ids[w.replace(" ", space)] for w in REFUSAL), EOS)):
        last[said, SINCE_REPLY : SINCE_REPLY + 16] = h16[step + 1] * (REFUSAL_LOGIT / (16 * unit))
    out["model.norm.weight"], out["lm_head.weight"] = torch.ones(HIDDEN), last
    return {name: t if "k_norm" in name else t.to(torch.bfloat16) for name, t in out.items()}


def write(folder: Path, seed: int = 0) -> dict[str, Any]:
    """The checkpoint's files; returns its card: seed, sizes, a digest of the weights."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    pieces = vocabulary()
    weights = {name: t.contiguous() for name, t in tensors(pieces, seed).items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    files = {"config.json": config(len(pieces)), **tokenizer_files(pieces),
             "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False}}  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    path = folder / "model.safetensors"
    return {
        "seed": seed,
        "parameters": sum(t.numel() for t in weights.values()),
        "not_zero": sum(int((t != 0).sum()) for t in weights.values()),
        "bytes": path.stat().st_size,
        "words": len(pieces),
        "layers": LAYERS,
        "heads": HEADS,
        "index_topk": TOPK,
        "blake2b": hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(write(options.out, options.seed), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
