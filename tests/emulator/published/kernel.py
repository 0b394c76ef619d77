"""Names of the wheel's forward kernels: what selects one, as text that a compile process takes."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 128  # of a tile: query rows, and keys


@dataclass(frozen=True)
class Kernel:
    """One forward kernel. `traits` are letters: p: two CTAs a tile; c: work of clusters that have not started is taken
    over; 8: inputs of e4m3.
    """

    arch: str
    head_dim: int
    causal: bool
    group: int
    q_stage: int = 1
    traits: str = ""

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 2 if "p" in self.traits else 1

    @property
    def rows(self) -> int:
        """Query rows of a cluster."""
        return ROWS * self.q_stage * self.ctas

    def __str__(self) -> str:
        fields = [self.arch, self.head_dim, int(self.causal), self.group, self.q_stage, self.traits]
        return ":".join(map(str, fields))

    @classmethod
    def parse(cls, text: str) -> Kernel:
        """Returns the kernel that `str` wrote."""
        arch, head_dim, causal, group, q_stage, traits = text.split(":")
        return cls(arch, int(head_dim), causal == "1", int(group), int(q_stage), traits)

    @property
    def file(self) -> str:
        """A file name without an ending."""
        return str(self).replace(":", "_")
