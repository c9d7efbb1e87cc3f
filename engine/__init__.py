"""The persistent engine: weights, paged KV cache, scheduler, sampler, hot reload, OpenAI-compatible server, gateway."""
