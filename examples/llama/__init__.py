"""A small Llama served by an engine with a paged KV cache, continuous batching and CUDA graphs.

Read the files in this order:

- `model.py`    the model in plain torch: RMSNorm, RoPE, SwiGLU, grouped queries. Attention is a function that it is given.
- `cache.py`    pages: which are free, and where the keys and values of a request lie.
- `forward.py`  a batch of requests through the model: index arrays, plans, attention, and CUDA graphs for decode.
- `engine.py`   requests arrive, wait for pages, are prefilled in chunks, decode together, and return their pages.
- `eager.py`    attention written out, and the check that the engine's tokens are those that it gives.
- `__main__.py` the command line.
"""
