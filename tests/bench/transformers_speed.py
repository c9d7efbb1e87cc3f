"""Greedy generation by Hugging Face transformers, eager or compiled: prints [prefill tok/s, decode tok/s] as JSON."""

from __future__ import annotations

import json
import sys
import time


def main(model_folder: str, mode: str, batch: int, prompt: int, new: int, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, torch_dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    decode = torch.compile(model, dynamic=False) if mode == "compiled" else model
    rates = (0.0, 0.0)
    with torch.inference_mode():
        for _ in range(2):  # the first pass warms up and compiles
            ids = torch.randint(0, model.config.vocab_size, (batch, prompt))
            cache = (
                StaticCache(config=model.config, max_cache_len=prompt + new + 1)
                if mode == "compiled"
                else DynamicCache()
            )
            start = time.perf_counter()
            positions = torch.arange(prompt)
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, cache_position=positions)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            middle = time.perf_counter()
            for i in range(new):
                out = decode(token, past_key_values=cache, use_cache=True, cache_position=torch.tensor([prompt + i]))
                token = out.logits[:, -1].argmax(-1, keepdim=True)
            rates = (batch * prompt / (middle - start), batch * new / (time.perf_counter() - middle))
    print(json.dumps(rates))


if __name__ == "__main__":
    folder, how, *numbers = sys.argv[1:]
    main(folder, how, *map(int, numbers))
