"""Chooses a backend for each problem, and runs it. Every use of the library loads this package, hence the checks of the
environment.
"""

from cute_attn.runtime import log, switches

log.configure()
switches.warn_of_unknown()
