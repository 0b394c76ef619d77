"""Base of all kernels: how they are traced and launched."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks.scalars import zeros


class GridProgram:
    """Kernel of one spec. A subclass has `kernel`, its parameters and its block, and what is not as by default."""

    params: Any
    kernel: Any
    block: tuple[int, int, int]
    smem_bytes = 0
    cluster = (1, 1, 1)
    min_ctas = 1  # per SM, that ptxas leaves registers for; 0: as it likes

    def compile_args(self) -> tuple[Any, ...]:
        return (zeros(self.params), Int32(1), Int32(1), Int32(1))

    def before_params(self, params: Any) -> list[Any]:
        """Returns arguments of the kernel before its parameters."""
        return []

    @cute.jit
    def __call__(self, params: Any, grid_x: Int32, grid_y: Int32, grid_z: Int32) -> None:
        self.kernel(*self.before_params(params), params).launch(
            grid=[grid_x, grid_y, grid_z],
            block=list(self.block),
            cluster=self.cluster if max(self.cluster) > 1 else None,
            smem=self.smem_bytes,
            min_blocks_per_mp=self.min_ctas,
            preferred_smem_carveout=100,  # percent; the default asks the driver, which compiles need not have
        )
