"""One run of vLLM's engine: ``generate.py TP MODEL OUT`` writes OUT/answers.json and OUT/version."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import checkpoint

# (tokens, needle, where it begins): all but one do not fit into the top-k, so that their rows must choose.
PROMPTS = ((2300, 1001, 8), (2180, 1004, 40), (700, 1006, 300), (3100, 1003, 2000), (2100, 1007, 4))


def prompts() -> list[list[int]]:
    """Words, eight times one needle token among them, and the trigger at the end."""
    generator = random.Random(7)
    made = []
    for length, needle, start in PROMPTS:
        words = [generator.randrange(2, checkpoint.WORDS) for _ in range(length - 1)] + [checkpoint.TRIGGER]
        words[start : start + 8] = [needle] * 8
        made.append(words)
    return made


def main() -> None:
    tp, model, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    from vllm import LLM, SamplingParams, __version__

    (out / "version").write_text(__version__)
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        tensor_parallel_size=tp,
        max_model_len=4096,
        max_num_batched_tokens=2560,  # prompts are split, and earlier ones decode beside the rest of them
        max_num_seqs=8,
        enable_prefix_caching=False,
        max_logprobs=8,
        seed=1,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False, logprobs=8)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], sampling)
    found = [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [sorted((t, p.logprob) for t, p in step.items()) for step in answer.outputs[0].logprobs],
        }
        for answer in answers
    ]
    (out / "answers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
