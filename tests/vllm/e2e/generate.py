"""A small DeepSeek-V4-shaped model in vLLM's engine: ``generate.py TP OUT`` writes tokens to OUT/tokens.json."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

CONFIG = {
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
                            "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
}  # fmt: skip


def main() -> None:
    tp, out = int(sys.argv[1]), Path(sys.argv[2])
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        tensor_parallel_size=tp,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=4,
        enable_prefix_caching=False,
        seed=1,
    )
    generator = random.Random(7)
    prompts = [{"prompt_token_ids": [generator.randrange(2, 1000) for _ in range(n)]} for n in (2200, 2080, 700)]
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False))
    (out / "tokens.json").write_text(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
