"""Chooses a backend for each problem, and runs it. Every use of the library loads this package, hence the checks of the
environment.
"""

from cute_attn.runtime import switches

switches.configure_log()
switches.warn_of_unknown()
