"""Units of work that executed instructions are divided by, and what of a unit no instruction count tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perf.sass.units import QUARTERS

STEP = 128  # query rows and keys of a tile step


@dataclass(frozen=True)
class Work:
    """A unit of work: a tile step of prefill, a token and kv head of decode, ... `tensor_flops` of its products on the
    tensor cores, in terms of 16-bit operands; `smem_bytes` that tensor cores read of shared memory and copies write.
    """

    name: str
    tensor_flops: float
    smem_bytes: float


@dataclass(frozen=True)
class Tiling:
    """How a prefill kernel shares operands. `rows`: query rows of a cluster, for which keys are copied once.
    `mma_rows`: rows of one matrix instruction, for which its second operand is read once, over all CTAs that it spans.
    """

    rows: int
    mma_rows: int


def tile_step(head_dims: tuple[int, int], item_bytes: int, tiling: Tiling) -> Work:
    """Returns the work of 128 query rows by 128 keys: S = Q K^T with both operands in shared memory, O += P V with P
    elsewhere (registers or tensor memory)."""
    d_qk, d_vo = head_dims
    q, kv = STEP * d_qk * item_bytes, STEP * (d_qk + d_vo) * item_bytes
    read = q + kv * STEP / tiling.mma_rows
    copied = kv * STEP / tiling.rows
    flops = 2 * STEP * STEP * (d_qk + d_vo)
    return Work("tile step of 128 x 128", flops * item_bytes / 2, read + copied)


@dataclass(frozen=True)
class Roles:
    """Warps of a CTA by role. `math`: roles whose instructions are the softmax: with the accumulators' correction."""

    warps: Mapping[str, tuple[int, ...]]
    math: tuple[str, ...]

    def on_quarter(self, quarter: int) -> Roles:
        """Returns the roles with their warps on one quarter of the SM, without those that have none there."""
        kept = {role: tuple(w for w in warps if w % QUARTERS == quarter) for role, warps in self.warps.items()}
        return Roles({role: warps for role, warps in kept.items() if warps}, self.math)

    @classmethod
    def parse(cls, text: str) -> Roles:
        """Returns the roles of "softmax*=0-7,correction*=8-11,MMA=12,load=13-15"; a star marks roles of the softmax."""
        warps: dict[str, tuple[int, ...]] = {}
        math = []
        for part in text.split(","):
            name, _, numbers = part.partition("=")
            first, _, last = numbers.partition("-")
            warps[name.rstrip("*")] = tuple(range(int(first), int(last or first) + 1))
            if name.endswith("*"):
                math.append(name.rstrip("*"))
        return cls(warps, tuple(math))


# By kernel and warps of a CTA.
ROLES = {
    ("fa4", 12): Roles.parse("producer=0-1,tail=2,MMA=3,softmax*=4-7,epilogue*=8-11"),  # one query tile
    ("fa4", 16): Roles.parse("producer=0-1,tail=2,MMA=3,softmax*=4-11,epilogue*=12-15"),
    ("fa3", 12): Roles.parse("producer=0-3,MMA*=4-11"),
    ("fa3", 16): Roles.parse("producer=0-3,MMA*=4-15"),
    ("flash-attn-4", 16): Roles.parse("softmax*=0-7,correction*=8-11,MMA=12,load=13-15"),
    ("flash-attn-4", 12): Roles.parse("producer=0-3,MMA*=4-11"),
}
