"""Adapters that let other libraries call cute_attn: transformers, torch, vLLM, SGLang, torch.distributed.

Each is imported only when asked for, and needs the library that it is named after. `workspaces.py`, `step_plans.py` and
`latent.py` are what engines share.
"""
