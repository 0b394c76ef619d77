"""Numbers that stand for batch wrappers in traced graphs."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from cute_attn.errors import RuntimeArgumentError

_wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new(wrapper: Any) -> int:
    """Return a number for a wrapper, which is not kept alive by it."""
    handle = next(_numbers)
    _wrappers[handle] = wrapper
    return handle


def wrapper(handle: int) -> Any:
    """Return the wrapper that a handle stands for; RuntimeArgumentError if it no longer exists."""
    found = _wrappers.get(handle)
    if found is None:
        raise RuntimeArgumentError(
            f"handle {handle} stands for no batch wrapper of this process: keep the wrapper as long as compiled "
            "functions run it"
        )
    return found
