"""The arguments of runs that give few of a batch wrapper's options."""

from __future__ import annotations

from typing import Any

from cute_attn.request.batch_run import RunArguments

_NOTHING = RunArguments(*[None] * len(RunArguments._fields))._replace(return_lse=False)


def run_arguments(q: Any, kv_cache: Any, **options: Any) -> RunArguments:
    """Return the arguments of a run with `options`; all others ask for nothing."""
    return _NOTHING._replace(q=q, kv_cache=kv_cache, **options)
