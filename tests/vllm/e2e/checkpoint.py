"""A small DeepSeek-V4-shaped checkpoint whose answers do not depend on the number of tensor-parallel ranks.

Random, with four things planted:

- *Sums over ranks are exact.* Each output channel of a layer that is split along its input (attention's output
  projection, the experts' second matrices) reads one half of that input only. With two ranks one of them adds
  exact zeros, so nothing is rounded twice. These layers are not in fp8: the CPU build's fp8 products read a zero
  weight as 1/128 of a step.
- *Indexer products are exact.* Index head h and its keys meet in channel h alone: one product of two fp8 values,
  which bfloat16 holds. What is left is the order of a sum over heads in float32.
- *A needle is looked up.* A needle token carries a mark that every row's indexer prefers (head 7), and that the
  main attention of the trigger token looks for; the value that it finds is the needle's own content, and the
  output matrix names that token's successor. So the answer to a trigger is the needle's successor, if the indexer
  still selects the needle.
- *Rows differ.* Everything else is random, so each row prefers other keys, and each token has another successor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "o_groups": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_hash_layers": 0,
    "compress_ratios": [4, 4],
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 16, "original_max_position_embeddings": 4096,
                     "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 65536,
    "sliding_window": 128,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                            "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
                            "ignored_layers": [f"model.layers.{layer}.{name}" for layer in range(2) for name in (
                                "attn.wo_b", "attn.indexer.wq_b", "ffn.shared_experts.gate_up_proj",
                                "ffn.shared_experts.down_proj")]},
}  # fmt: skip
WORDS = 1000  # tokens 2 to 999 are words; then come the needles, and one trigger
NEEDLES = range(1000, 1008)
TRIGGER = 1008
CONTENT = 384  # channels of the hidden state that say which token this is
ASKS, ALWAYS, MARK = 509, 510, 511  # channels: the trigger's, every token's, the needles'
HIDDEN, LATENT, HEADS, DIM, INDEX_HEADS, INDEX_DIM, INNER = 512, 256, 16, 512, 8, 128, 256
SOUGHT = 447  # the channel of the main attention's keys in which a mark and a trigger's query meet


def successors() -> dict[int, int]:
    """The token that follows a token, or that answers a trigger where it is the needle."""
    tokens = list(range(2, CONFIG["vocab_size"]))
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0)).tolist()
    return {token: tokens[at] for token, at in zip(tokens, order, strict=True)}


def write(folder: Path, seed: int = 1) -> None:
    """config.json and model.safetensors; the same files for the same seed."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random = torch.Generator().manual_seed(seed)
    tensors = _ends(random)
    for layer in range(CONFIG["num_hidden_layers"]):
        tensors |= {f"layers.{layer}.{name}": value for name, value in _layer(random).items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")


def _normal(random: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=random)


def _ends(random: torch.Generator) -> dict[str, torch.Tensor]:
    content = _normal(random, CONFIG["vocab_size"], CONTENT)
    embed = torch.zeros(CONFIG["vocab_size"], HIDDEN)
    embed[:, :CONTENT] = content
    embed[:, CONTENT:ASKS] = _normal(random, CONFIG["vocab_size"], ASKS - CONTENT)
    embed[:, ALWAYS] = 10.0
    embed[NEEDLES.start : NEEDLES.stop, MARK] = 30.0
    embed[TRIGGER, :CONTENT] = 0.0
    embed[TRIGGER, ASKS] = 30.0
    head = _normal(random, CONFIG["vocab_size"], HIDDEN, scale=0.1)
    for token, following in successors().items():
        head[following, :CONTENT] += content[token]
    streams = CONFIG["hc_mult"]
    return {
        "embed.weight": embed.bfloat16(),
        "head.weight": (0.02 * head).bfloat16(),
        "norm.weight": _norm(random, HIDDEN),
        "hc_head_fn": _normal(random, streams, streams * HIDDEN, scale=0.02),
        "hc_head_base": _normal(random, streams, scale=0.3),
        "hc_head_scale": torch.ones(1),
    }


def _norm(random: torch.Generator, size: int) -> torch.Tensor:
    return (1.0 + _normal(random, size, scale=0.1)).bfloat16()


def _layer(random: torch.Generator) -> dict[str, torch.Tensor]:
    streams = CONFIG["hc_mult"]
    mixes = (2 + streams) * streams
    layer = {"attn_norm.weight": _norm(random, HIDDEN), "ffn_norm.weight": _norm(random, HIDDEN)}
    for part in ("attn", "ffn"):
        layer |= {
            f"hc_{part}_fn": _normal(random, mixes, streams * HIDDEN, scale=0.02),
            f"hc_{part}_base": _normal(random, mixes, scale=0.3),
            f"hc_{part}_scale": torch.ones(3),
        }
    layer |= {f"attn.{name}": value for name, value in _attention(random).items()}
    layer |= {f"ffn.{name}": value for name, value in _experts(random).items()}
    return layer


def _words_only(weight: torch.Tensor) -> torch.Tensor:
    """A matrix over the hidden state that does not see the planted channels."""
    weight[:, ASKS:] = 0.0
    return weight


def _attention(random: torch.Generator) -> dict[str, torch.Tensor]:
    wq_a = _words_only(_normal(random, LATENT, HIDDEN, scale=HIDDEN**-0.5))
    wq_a[254:] = 0.0
    wq_a[254, ALWAYS] = wq_a[255, ASKS] = 1.0
    wq_b = _normal(random, HEADS * DIM, LATENT, scale=LATENT**-0.5)
    wq_b[:, 254:] = 0.0
    wq_b[SOUGHT::DIM] = 0.0
    wq_b[SOUGHT::DIM, 255] = 1.0
    wkv = _words_only(_normal(random, DIM, HIDDEN, scale=HIDDEN**-0.5))
    wkv[SOUGHT] = 0.0
    wo_a, wo_b = _output_projection(random)
    tensors = {"wo_b.weight": wo_b.bfloat16(), "indexer.wq_b.weight": _index_queries(random).bfloat16()}
    for name, weight in {"wq_a": wq_a, "wq_b": wq_b, "wkv": wkv, "wo_a": wo_a}.items():
        tensors[f"{name}.weight"], tensors[f"{name}.scale"] = _fp8(weight)
    # The values that attention looks up: the content of the pooled tokens, and their mark.
    values = _words_only(_normal(random, DIM, HIDDEN, scale=0.2 * HIDDEN**-0.5))
    values[:CONTENT, :CONTENT] += torch.eye(CONTENT)
    values[SOUGHT] = 0.0
    values[SOUGHT, MARK] = 1.0
    keys = torch.zeros(INDEX_DIM, HIDDEN)
    keys[:INDEX_HEADS] = _words_only(_normal(random, INDEX_HEADS, HIDDEN, scale=HIDDEN**-0.5))
    keys[INDEX_HEADS - 1] = 0.0
    keys[INDEX_HEADS - 1, MARK] = 1.0
    weights = _words_only(_normal(random, INDEX_HEADS, HIDDEN, scale=HIDDEN**-0.5))
    weights[INDEX_HEADS - 1] = 0.0
    weights[INDEX_HEADS - 1, ALWAYS] = 4.0
    return tensors | {
        "attn_sink": _normal(random, HEADS),
        "q_norm.weight": _norm(random, LATENT),
        "kv_norm.weight": _norm(random, DIM),
        **_compressor("compressor", random, values),
        **_compressor("indexer.compressor", random, keys),
        "indexer.weights_proj.weight": weights.bfloat16(),
    }


def _index_queries(random: torch.Generator) -> torch.Tensor:
    weight = torch.zeros(INDEX_HEADS, INDEX_DIM, LATENT)
    for head in range(INDEX_HEADS - 1):
        weight[head, head, :254] = _normal(random, 254, scale=254**-0.5)
    weight[INDEX_HEADS - 1, INDEX_HEADS - 1, 254] = 1.0
    return weight.flatten(0, 1)


def _compressor(name: str, random: torch.Generator, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """An entry is made of eight tokens: its own four, and through a matrix of its own the four before."""
    size = len(values)
    gate = _words_only(_normal(random, 2 * size, HIDDEN, scale=0.5 * HIDDEN**-0.5))
    return {
        f"{name}.ape": _normal(random, 4, 2 * size, scale=0.1),
        f"{name}.wkv.weight": torch.cat((values, values)).bfloat16(),
        f"{name}.wgate.weight": gate.bfloat16(),
        f"{name}.norm.weight": _norm(random, size),
    }


def _output_projection(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Content comes back to the channels that it came from: a quarter of them through each group of heads."""
    groups, rank = CONFIG["o_groups"], CONFIG["o_lora_rank"]
    heads, quarter = HEADS // groups, CONTENT // groups
    first = _normal(random, groups, rank, heads, DIM, scale=0.3 * (heads * DIM) ** -0.5)
    second = _normal(random, HIDDEN, groups, rank, scale=0.3 * (groups * rank) ** -0.5)
    for group in range(groups):
        part = torch.arange(quarter)
        for head in range(heads):
            first[group, part, head, quarter * group + part] += 1.0 / heads
        second[quarter * group + part, group, part] += 3.0
    second[_first_half(), groups // 2 :] = 0.0
    second[~_first_half(), : groups // 2] = 0.0
    second[ASKS:] = 0.0
    return first.flatten(2).flatten(0, 1), second.flatten(1)


def _first_half() -> torch.Tensor:
    """Output channels that read the first half of a layer's input; the others read the second."""
    channels = torch.arange(HIDDEN)
    return torch.where(channels < CONTENT, channels < CONTENT // 2, channels % 2 == 0)


def _experts(random: torch.Generator) -> dict[str, torch.Tensor]:
    tensors = {
        "gate.weight": _normal(random, CONFIG["n_routed_experts"], HIDDEN, scale=HIDDEN**-0.5).bfloat16(),
        "gate.bias": _normal(random, CONFIG["n_routed_experts"], scale=0.1),
    }
    # In fp4: a code is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a byte holds two, and 32 share a scale.
    for expert in range(CONFIG["n_routed_experts"]):
        for name, (rows, columns) in {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}.items():
            codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=random)
            if name == "w2":
                codes = _one_half(codes)
            exponents = torch.randint(119, 122, (rows, columns // 32), dtype=torch.uint8, generator=random)
            tensors[f"experts.{expert}.{name}.weight"] = codes
            tensors[f"experts.{expert}.{name}.scale"] = exponents.view(torch.float8_e8m0fnu)
    for name, (rows, columns) in {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}.items():
        weight = _normal(random, rows, columns, scale=0.5 * columns**-0.5)
        if name == "w2":
            weight = _one_half(weight)
        tensors[f"shared_experts.{name}.weight"] = weight.bfloat16()
    return tensors


def _one_half(weight: torch.Tensor) -> torch.Tensor:
    half = weight.shape[1] // 2
    weight[_first_half(), half:] = 0
    weight[~_first_half(), :half] = 0
    weight[ASKS:] = 0
    return weight


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and one power of two for each block of 128 x 128."""
    rows, columns = weight.shape
    blocks = weight.view(rows // 128, 128, columns // 128, 128)
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448.0)))
    return (blocks / scale).view(rows, columns).to(torch.float8_e4m3fn), scale[:, 0, :, 0].to(torch.float8_e8m0fnu)
