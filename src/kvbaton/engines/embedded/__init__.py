"""A small real engine in NumPy: Llama-family models, paged KV cache, continuous batching, an OpenAI-compatible server."""
