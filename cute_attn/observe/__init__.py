"""Observers of public calls: dumps for `replay`, NVTX ranges. Loaded only where an environment variable asks for one.

`install` puts a function of its own around each public function and method, so that calls pay nothing where no observer
is wanted.
"""

from __future__ import annotations

import os

from cute_attn.runtime import switches


def install(version: str) -> None:
    """Loads the public modules, and observes their calls as the environment says. `version`: of the library, for dumps.
    Without torch, does nothing: the use of a name tells why.
    """
    try:
        from cute_attn.observe import dump, hooks
    except ImportError:
        return
    observers: list[hooks.Observer] = []
    if text := os.environ.get(switches.DUMP):
        observers.append(dump.from_environment(text, version))
    if switches.is_on(switches.NVTX) and hooks.has_nvtx():
        observers.append(hooks.nvtx_ranges)
    hooks.install(observers)
