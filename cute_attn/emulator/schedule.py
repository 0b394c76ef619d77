"""Orders in which the emulator runs warps and completes asynchronous work. Apart from the machine, which settings need
not load.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.emulator.errors import LaunchFault


@dataclass(frozen=True)
class Schedule:
    """Order of turns and of completions. "eager": asynchronous work completes at once, and all warps of a CTA start as
    one batch. "delayed": it completes late, in a random order drawn from `seed`. "adversarial": also, every warp runs
    on its own, and turns are in random order. "lagging": the same, and warp `seed` of a cluster, counted over its CTAs,
    runs only where nothing else in the cluster can.
    """

    kind: str = "eager"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("eager", "delayed", "adversarial", "lagging"):
            raise LaunchFault(f"schedule {self.kind!r} is not eager, delayed, adversarial or lagging")

    @property
    def warps_apart(self) -> bool:
        return self.kind in ("adversarial", "lagging")
