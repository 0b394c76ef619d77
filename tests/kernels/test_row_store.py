"""Blocks on `RowLayout`, in a kernel whose threads own whole rows, on the emulator: masks, scores, softmax, store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from cute_attn.emulator.adapter import EmulatedLaunch, visible
from cute_attn.kernels.host.params import magic
from cute_attn.runtime.compile import compile_spec
from cute_attn.runtime.spec import KernelSpec, Program

pytestmark = pytest.mark.emulator

ROWS, WIDTH = 128, 64
QO_LEN, KV_LEN, GROUP, HEADS, KV_HEAD = 45, 50, 2, 4, 1  # 90 of 128 rows exist
BEFORE, AFTER = 3, 2  # tokens of other requests
LEFT, RIGHT = -20, 1
SCALE, V_SCALE, LSE_SCALE = 0.5, 1.5, 0.25
LOG2E = 1.4426950408889634
UNTOUCHED = 7.0


@dataclass(frozen=True)
class RowSpec(KernelSpec):
    kernel: ClassVar[str] = "rows"
    needs_mma: ClassVar[bool] = False
    out_dtype: str
    mask: str = "band"
    partial: bool = False


def program(spec: KernelSpec, arch: str) -> Program:
    from tests.support.row_kernel import RowProgram

    assert isinstance(spec, RowSpec)
    return RowProgram(spec.out_dtype, spec.mask, spec.partial)


@dataclass
class Inputs:
    scores: torch.Tensor  # [ROWS, WIDTH]; the second tile's are higher
    sinks: torch.Tensor  # [HEADS]
    visible: torch.Tensor  # [QO_LEN, KV_LEN]
    bits: torch.Tensor

    @classmethod
    def make(cls, packed: bool) -> Inputs:
        generator = torch.Generator().manual_seed(1)
        scores = torch.randn(ROWS, WIDTH, generator=generator) * 4
        scores[:, WIDTH // 2 :] += 20 * torch.rand(ROWS, 1, generator=generator)
        token, key = torch.arange(QO_LEN)[:, None], torch.arange(KV_LEN)[None]
        seen = (key >= token + LEFT) & (key <= token + RIGHT)
        chosen = torch.rand(QO_LEN, KV_LEN, generator=generator) < 0.7
        chosen[7] = False  # a row that sees nothing
        weights = 1 << torch.arange(8)
        padded = torch.nn.functional.pad(chosen.flatten(), (0, -chosen.numel() % 8)).view(-1, 8)
        bits = (padded * weights).sum(1).to(torch.uint8)
        return cls(scores, torch.randn(HEADS, generator=generator), seen & chosen if packed else seen, bits)

    def expected(self) -> torch.Tensor:
        """Scores [QO_LEN, GROUP, WIDTH] after scale, ALiBi and mask, in fp64."""
        s = self.scores[: QO_LEN * GROUP].double().view(QO_LEN, GROUP, WIDTH)[..., :KV_LEN] * SCALE
        slope = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(KV_HEAD * GROUP, (KV_HEAD + 1) * GROUP)])
        distance = torch.arange(KV_LEN)[None] - torch.arange(QO_LEN)[:, None]
        s = s + slope.double()[None, :, None] * distance[:, None]
        s = s.masked_fill(~self.visible[:, None], float("-inf"))
        return torch.nn.functional.pad(s, (0, WIDTH - KV_LEN), value=float("-inf"))


def run(spec: RowSpec, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, sinks: bool = True) -> None:
    """Launches one CTA; `o` is [token, head, column], or [slot row, column] if partial."""
    # Not from the cache, whose keys know nothing of kernels in tests.
    launch = EmulatedLaunch(compile_spec(spec, "sm_100a", program), pdl=False)
    strides = (0, 0) if spec.partial else tuple(x * o.itemsize for x in o.stride()[:2])
    sink_address = inputs.sinks.data_ptr() if sinks else 0
    addresses: Any = (inputs.scores.data_ptr(), o.data_ptr(), lse.data_ptr(), sink_address, inputs.bits.data_ptr())
    shape = (BEFORE, QO_LEN, KV_LEN, GROUP, *magic(GROUP), KV_HEAD, HEADS, LEFT, RIGHT)
    given = {"scores": inputs.scores, "sinks": inputs.sinks, "bits": inputs.bits}
    with visible(given, {"o": o, "lse": lse}):
        values = (*addresses, inputs.bits.nbytes, *strides, *shape, SCALE, V_SCALE, LSE_SCALE)
        launch.bind({}, [param.name for param in launch.artifact.params]).fire(0, values, ((1, 1, 1),))


def assert_rest_untouched(*outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compares all but a part, which is a view, with what the tensor was filled with."""
    for whole, part in outputs:
        part.fill_(UNTOUCHED)
        assert (whole == UNTOUCHED).all()


@pytest.mark.parametrize("mask", ["band", "packed"])
@pytest.mark.parametrize("gap", [0, 16], ids=["adjacent", "half-aligned"])  # bytes behind heads
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float32, 1e-5)])
def test_final_outputs(dtype: torch.dtype, tolerance: float, gap: int, mask: str) -> None:
    """Rows start at multiples of 32 bytes, which are stored at once, or of 16."""
    inputs = Inputs.make(mask == "packed")
    tokens = BEFORE + QO_LEN + AFTER
    whole = torch.full((tokens, HEADS, WIDTH + gap // dtype.itemsize), UNTOUCHED, dtype=dtype)
    o = whole[..., :WIDTH]
    lse = torch.full((tokens, HEADS), UNTOUCHED)
    run(RowSpec(str(dtype).removeprefix("torch."), mask), inputs, o, lse)
    heads = slice(KV_HEAD * GROUP, (KV_HEAD + 1) * GROUP)
    sink = inputs.sinks[heads].double()[None, :, None].expand(QO_LEN, GROUP, 1)
    logits = torch.cat([inputs.expected(), sink], -1)
    p = torch.softmax(logits, -1)[..., :WIDTH] * V_SCALE
    found, found_lse = o[BEFORE : BEFORE + QO_LEN, heads], lse[BEFORE : BEFORE + QO_LEN, heads]
    torch.testing.assert_close(found.double(), p, rtol=tolerance, atol=1e-6)
    expected_lse = torch.logsumexp(logits, -1) * LOG2E * LSE_SCALE
    torch.testing.assert_close(found_lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert_rest_untouched((whole, found), (lse, found_lse))


def test_rows_that_see_nothing() -> None:
    inputs = Inputs.make(packed=True)
    o, lse = torch.empty(BEFORE + QO_LEN, HEADS, WIDTH), torch.empty(BEFORE + QO_LEN, HEADS)
    run(RowSpec("float32", "packed"), inputs, o, lse, sinks=False)
    empty = ~inputs.visible.any(1)
    assert empty.any()
    heads = slice(KV_HEAD * GROUP, (KV_HEAD + 1) * GROUP)
    assert (o[BEFORE:, heads][empty] == 0).all()
    assert (lse[BEFORE:, heads][empty] == float("-inf")).all()


def test_partial_outputs() -> None:
    inputs, count = Inputs.make(packed=False), QO_LEN * GROUP
    o, lse = torch.full((BEFORE + ROWS, WIDTH), UNTOUCHED), torch.full((BEFORE + ROWS,), UNTOUCHED)
    run(RowSpec("float32", partial=True), inputs, o, lse)
    logits = inputs.expected().view(count, WIDTH)
    found, found_lse = o[BEFORE : BEFORE + count], lse[BEFORE : BEFORE + count]
    torch.testing.assert_close(found.double(), torch.softmax(logits, -1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_lse.double(), torch.logsumexp(logits, -1) * LOG2E, rtol=1e-5, atol=1e-5)
    assert_rest_untouched((o, found), (lse, found_lse))
