"""Logging: the level of the logger "cute_attn" by `CUTE_ATTN_LOGLEVEL`. Messages are written only where results are
memoised, so that calls that repeat pay nothing.
"""

from __future__ import annotations

import logging
import os
import warnings

from cute_attn.runtime import switches

LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")
FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"

logger = logging.getLogger("cute_attn")


def configure() -> None:
    """Sets the level, if the variable is set, and a handler on stderr unless the program has set up one."""
    text = os.environ.get(switches.LOGLEVEL, "")
    if not text:
        return
    name = text.upper()
    if name not in LEVELS:
        warnings.warn(f"{switches.LOGLEVEL} must be one of {', '.join(LEVELS)}, got {text!r}", stacklevel=2)
        return
    logger.setLevel(name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False  # a root logger that is set up later must not repeat the lines
