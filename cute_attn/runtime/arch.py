from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    name: str
    pdl: bool
def by_name(n): return Arch(n, not n.startswith("sm_8"))
