"""A small model with latent attention (MLA), shaped like DeepSeek-V3 without its experts, served by the engine of
`examples/llama`.

- `model.py`    projections to the latent space and back; how they are absorbed into queries and outputs.
- `cache.py`    pages of latent rows.
- `forward.py`  prompts by ragged attention over decompressed keys and values; decode steps with absorbed queries.
- `__main__.py` `python -m examples.deepseek`, from the root of a checkout.
"""
