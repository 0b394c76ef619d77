"""A decode kernel prepared for launches: its grid, its scratch memory and its parameter block."""

from __future__ import annotations

import functools

from cute_attn.kernels.host.load import load
from cute_attn.kernels.xqa.host.params import Block, Parameters, Requests, count_row_blocks
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.problem import BatchProblem, DecodeProblem, Problem, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import Launch, current_stream

UNLIMITED = 1 << 62
IDLE = 1 / 32  # of all CTAs, at most


class PreparedKernel:
    """Launches one kernel for requests of the same settings and at most `qo_len` query tokens: single requests, planned
    batches, and decode calls without a plan. `room`: bytes that partial results may take; fewer CTAs, down to one, need
    less.
    """

    def __init__(
        self,
        settings: Settings,
        qo_len: int,
        spec: XqaSpec,
        arch: Arch,
        sms: int,
        device_index: int,
        room: int = UNLIMITED,
    ) -> None:
        f = settings.features
        self.spec, self.arch, self.device_index = spec, arch, device_index
        units = f.num_kv_heads * count_row_blocks(qo_len * (f.num_qo_heads // f.num_kv_heads), spec)
        num_ctas = ctas(spec, sms, room)
        cta_groups = cta_group_count(units, num_ctas)
        self.grid = (cta_groups, num_ctas // cta_groups, 1)
        self.counter_bytes = 4 * num_ctas
        self.partial_bytes = 0 if num_ctas == 1 else partial_bytes(spec) * num_ctas
        self.pdl = arch.pdl and settings.enable_pdl is not False
        self.parameters = Parameters(settings, qo_len, spec, self.grid)

    @functools.cached_property
    def launch(self) -> Launch:
        return load(self.spec, self.arch.name, self.device_index, self.pdl)

    def __call__(
        self, problem: Problem | BatchProblem | DecodeProblem, requests: Requests, counters: int, partials: int
    ) -> None:
        """`counters`, `partials`: addresses of `counter_bytes` and `partial_bytes`."""
        block: Block = self.parameters.of(problem, requests, counters, partials)
        self.launch.fire(tuple(block.values()), self.grid, current_stream(self.device_index))


def ctas(spec: XqaSpec, sms: int, room: int = UNLIMITED) -> int:
    """Of a launch that may use `room` bytes for partial results. One CTA alone has none."""
    return max(1, min(sms * spec.ctas, room // partial_bytes(spec)))


def partial_bytes(spec: XqaSpec) -> int:
    """Of one CTA: it may end one segment and begin another."""
    return 2 * spec.rows * (spec.head_dim + 2) * 4


@functools.cache
def cta_group_count(units: int, ctas: int) -> int:
    """Number of CTA groups that share the units evenly: as many as leave only few CTAs idle."""
    return max(n for n in range(1, units + 1) if units % n == 0 and ctas % n <= ctas * IDLE)
