"""A small Llama, served by an engine with a paged KV cache, continuous batching and CUDA graphs.

Read the files in this order:

- `model.py`    the model in plain torch: RMSNorm, RoPE, SwiGLU, grouped queries; attention is a function it is given.
- `cache.py`    pages: which are free, and what they hold.
- `batch.py`    requests, and the index arrays that tell the library where their tokens lie.
- `forward.py`  forward passes: chunks of prompts, and decode steps in CUDA graphs.
- `engine.py`   requests arrive, wait for pages, are prefilled in chunks, decode together, and return their pages.
- `eager.py`    attention written out, and the check that it gives the engine's tokens.
- `command.py`  the command line: options, random prompts, the report.
- `__main__.py` `python -m examples.llama`, from the root of a checkout.

`examples/deepseek` serves a model with latent attention by the same engine.
"""
