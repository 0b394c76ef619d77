"""Names of the wheel's forward kernels: what selects one, as text that a compile process takes."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 128  # of a tile: query rows, and keys


@dataclass(frozen=True)
class Kernel:
    """One forward kernel. `traits` are letters: p: two CTAs a tile; c: work of clusters that have not started is taken
    over; 8: inputs of e4m3; s: persistent CTAs, with tiles in order; t: two tiles of scores in turn for one query tile.

    `head_dim_vo`: 0 if it is `head_dim`. `exp2_frequency`: the wheel's own tuning value, which decides how many of the
    exponentials are polynomials; -1 leaves it alone, 0 means none.
    """

    arch: str
    head_dim: int
    causal: bool
    group: int
    q_stage: int = 1
    traits: str = ""
    head_dim_vo: int = 0
    exp2_frequency: int = -1

    @property
    def dim_vo(self) -> int:
        return self.head_dim_vo or self.head_dim

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 2 if "p" in self.traits else 1

    @property
    def rows(self) -> int:
        """Query rows of a cluster, which share its copies of keys and values."""
        return ROWS * self.q_stage * self.ctas

    def __str__(self) -> str:
        fields = [self.arch, self.head_dim, int(self.causal), self.group, self.q_stage, self.traits]
        extra = [self.head_dim_vo, self.exp2_frequency]
        return ":".join(map(str, fields + (extra if extra != [0, -1] else [])))

    @classmethod
    def parse(cls, text: str) -> Kernel:
        """Returns the kernel that `str` wrote."""
        arch, head_dim, causal, group, q_stage, traits, *extra = text.split(":")
        return cls(arch, int(head_dim), causal == "1", int(group), int(q_stage), traits, *map(int, extra))

    @property
    def file(self) -> str:
        """A file name without an ending."""
        return str(self).replace(":", "_")
