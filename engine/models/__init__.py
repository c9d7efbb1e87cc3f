"""Model folders: configuration, weights, GGUF conversion, tokenizer."""
