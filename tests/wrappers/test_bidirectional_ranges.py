"""Causal attention with a range of keys per token, against attention under the same mask written out, in fp64."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    BatchPrefillWithCausalBidirectionalRangesWrapper,
    NotSupported,
    emulator,
)
from tests.support.dense_attention import assert_near, attention
from tests.support.executors import CUDA, GPU_MARKS, REFERENCE, Executor, needs_gpu

NONE = (-1, -1)


@dataclass(frozen=True)
class Case:
    """Requests of (query tokens, keys). `seed`: of tensors and of ranges: of none, of an image's, of any keys."""

    lengths: tuple[tuple[int, int], ...] = ((33, 33), (70, 200), (5, 150))
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    page_size: int = 16
    windows: tuple[int, int] = (-1, -1)
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype = torch.float16
    soft_cap: float = 0.0
    sinks: bool = False
    plan: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    def rows(self) -> list[tuple[int, int]]:
        """A range of every token: none, those of an image of 37 tokens, or any keys, some past the last."""
        generator, rows = torch.Generator().manual_seed(self.seed), []

        def below(n: int) -> int:
            return int(torch.randint(0, n, (1,), generator=generator))

        for qo_len, kv_len in self.lengths:
            for position in range(kv_len - qo_len, kv_len):
                image, first = position // 37 * 37, below(kv_len)
                choices = (NONE, (image, image + 36), (first, first + below(80)), (0, 3), (first, first - 2))
                rows.append(choices[below(len(choices))])
        return rows

    def keep(self, rows: list[tuple[int, int]]) -> list[torch.Tensor]:
        """The mask of every request, written out."""
        causal_window, range_window = self.windows
        of_token, masks = iter(rows), []
        for qo_len, kv_len in self.lengths:
            keep = torch.zeros(qo_len, kv_len, dtype=torch.bool)
            for i, position in enumerate(range(kv_len - qo_len, kv_len)):
                first, last = next(of_token)
                for key in range(kv_len):
                    causal = key <= position and (causal_window < 0 or position - key <= causal_window)
                    near = range_window <= 0 or position - key < range_window
                    keep[i, key] = causal or (first <= key <= last and near)
            masks.append(keep)
        return masks


class Inputs:
    """Tensors of a case on a device."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(case.seed)
        counts = [-(-kv_len // case.page_size) for _, kv_len in case.lengths]
        self.order = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)].int()
        self.kv_indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        self.qo_indptr = torch.tensor([0, *itertools.accumulate(n for n, _ in case.lengths)], dtype=torch.int32)
        self.last = torch.tensor([(n - 1) % case.page_size + 1 for _, n in case.lengths], dtype=torch.int32)
        q = torch.randn(int(self.qo_indptr[-1]), case.heads[0], case.dim, generator=generator)
        pages = torch.randn(sum(counts) + 2, 2, case.page_size, case.heads[1], case.dim, generator=generator)
        self.q, self.cache = q.to(device, case.dtype), pages.to(device, case.kv_dtype)
        self.sinks = torch.linspace(-1, 2, case.heads[0], device=device) if case.sinks else None
        self.rows = case.rows()
        self.ranges = torch.tensor(self.rows, dtype=torch.int32, device=device)
        self.index = [x.to(device) for x in (self.qo_indptr, self.kv_indptr, self.order, self.last)]


def made(case: Case, device: str, backend: str = "auto", **options: Any) -> Any:
    """A wrapper for the case."""
    workspace = torch.empty(4 << 20, dtype=torch.uint8, device=device)
    dtypes = {"q_data_type": case.dtype, "kv_data_type": case.kv_dtype, "o_data_type": case.dtype}
    dims = {"head_dim_qk": case.dim, "head_dim_vo": case.dim}
    return BatchPrefillWithCausalBidirectionalRangesWrapper(workspace, backend=backend, **dtypes, **dims, **options)


def planned(case: Case, inputs: Inputs, wrapper: Any) -> Any:
    wrapper.plan(*inputs.index, *case.heads, case.dim, case.page_size, logits_soft_cap=case.soft_cap, **dict(case.plan))
    return wrapper


def run(case: Case, inputs: Inputs, wrapper: Any, **options: Any) -> Any:
    sinks = {} if inputs.sinks is None else {"sinks": inputs.sinks}
    return wrapper.run(inputs.q, inputs.cache, inputs.ranges, *case.windows, **sinks, **options)


def check(case: Case, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, rows: Any = None) -> None:
    """Compare every request with attention under its mask."""
    for i, keep in enumerate(case.keep(inputs.rows if rows is None else rows)):
        tokens = slice(int(inputs.qo_indptr[i]), int(inputs.qo_indptr[i + 1]))
        ids = inputs.order[int(inputs.kv_indptr[i]) : int(inputs.kv_indptr[i + 1])].long()
        pages = inputs.cache[ids.to(inputs.cache.device)].float()
        k, v = (pages[:, j].flatten(0, 1)[: keep.shape[1]] for j in range(2))
        expected = attention(inputs.q[tokens], k, v, keep, case.dim**-0.5, soft_cap=case.soft_cap, sinks=inputs.sinks)
        assert_near(out[tokens], lse[tokens], expected)


CASES = {
    "plain": Case(),
    "windows": Case(windows=(20, 10), seed=1),
    "window of causal keys": Case(windows=(20, -1), seed=2),
    "own key only": Case(windows=(0, 0), seed=3),
    "pages of 1": Case(dim=128, heads=(8, 1), page_size=1, seed=4),
    "one split": Case(plan=(("disable_split_kv", True),), windows=(50, -1), seed=5),
    "fixed splits": Case(plan=(("fixed_split_size", 64),), lengths=((20, 300), (3, 90)), seed=6),
    "few tokens": Case(lengths=((1, 400), (3, 20), (2, 2)), seed=7),
    "more tokens than keys": Case(lengths=((40, 20), (3, 1)), seed=8),
    "fp8 cache": Case(kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, seed=9),
    "soft cap and sinks": Case(soft_cap=3.0, sinks=True, seed=10),
    "many rows": Case(lengths=((300, 420),), heads=(2, 2), seed=11),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_attention_under_the_mask(name: str, executor: Executor) -> None:
    case = CASES[name]
    inputs = Inputs(case, executor.device)
    with executor.active():
        wrapper = planned(case, inputs, made(case, executor.device, executor.backend))
        check(case, inputs, *run(case, inputs, wrapper, return_lse=True))


@pytest.mark.parametrize("executor", [REFERENCE, pytest.param(CUDA, marks=GPU_MARKS)], ids=lambda x: x.name)
def test_one_plan_runs_layers_of_other_windows_and_ranges(executor: Executor) -> None:
    """Each layer twice: the second call is repeated from the first one's entry."""
    case = Case()
    inputs = Inputs(case, executor.device)
    wrapper = planned(case, inputs, made(case, executor.device, executor.backend))
    nothing = [NONE] * len(inputs.rows)
    other = torch.tensor(nothing, dtype=torch.int32, device=executor.device)
    for windows, ranges, rows in 2 * [
        ((-1, -1), inputs.ranges, inputs.rows),
        ((9, -1), inputs.ranges, inputs.rows),
        ((9, -1), other, nothing),
        ((-1, 4), inputs.ranges, inputs.rows),
    ]:
        layer = dataclasses.replace(case, windows=windows)
        check(layer, inputs, *wrapper.run(inputs.q, inputs.cache, ranges, *windows, return_lse=True), rows)


@pytest.mark.emulator
def test_a_prompt_cut_into_chunks_has_the_same_bits() -> None:
    """Under fixed splits: rows of other ranges in a tile change neither the order nor the number of a row's tiles."""
    whole = Case(lengths=((150, 150),), heads=(2, 2), windows=(40, -1), plan=(("disable_split_kv", True),), seed=3)
    inputs = Inputs(whole)
    with emulator.using("sm_90a", kernels="fa2"):
        expected = run(whole, inputs, planned(whole, inputs, made(whole, "cpu", "emulator")))
        for first, last in ((0, 70), (70, 71), (71, 150)):
            part, rows = dataclasses.replace(whole, lengths=((last - first, last),)), slice(first, last)
            chunk = Inputs(whole)
            chunk.q, chunk.ranges = inputs.q[rows], inputs.ranges[rows].clone()
            pages = -(-last // 16)
            lengths = [0, last - first], [0, pages], chunk.order[:pages].tolist(), [(last - 1) % 16 + 1]
            chunk.index = [torch.tensor(x, dtype=torch.int32) for x in lengths]
            out = run(part, chunk, planned(part, chunk, made(part, "cpu", "emulator")))
            # Keys of a range that a chunk does not have yet are not seen: rows whose ranges end within it are compared.
            compared = inputs.ranges[rows, 1] < last
            assert torch.equal(out[compared], expected[rows][compared])


@needs_gpu
def test_captured_runs_read_ranges_at_their_address() -> None:
    case = CASES["windows"]
    inputs = Inputs(case, "cuda")
    buffers = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    index = {name: x.clone() for name, x in zip(buffers, inputs.index, strict=True)}
    wrapper = planned(case, inputs, made(case, "cuda", use_cuda_graph=True, **index))
    run(case, inputs, wrapper, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(case, inputs, wrapper, return_lse=True)
    for seed in (5, 6):
        rows = dataclasses.replace(case, seed=seed).rows()
        inputs.ranges.copy_(torch.tensor(rows, dtype=torch.int32))
        graph.replay()
        check(case, inputs, out, lse, rows)


def test_other_backends_refuse_with_a_reason() -> None:
    case = Case()
    inputs = Inputs(case)
    with (
        emulator.using("sm_90a", kernels="fa3"),
        pytest.raises(NotSupported, match="its warps take the last tile of keys"),
    ):
        planned(case, inputs, made(case, "cpu", "emulator"))


RANGES = torch.zeros(108, 2, dtype=torch.int32)
WRONG_RUNS = {
    "shape": ((RANGES[1:],), ArgumentError, r"bidirectional_ranges must have shape \[rows of q, 2\]"),
    "dtype": ((RANGES.long(),), ArgumentError, "bidirectional_ranges must have dtype int32"),
    "stride": ((RANGES.t().contiguous().t(),), ArgumentError, "bidirectional_ranges must be contiguous"),
    "alignment": ((torch.zeros(217, dtype=torch.int32)[1:].view(108, 2),), ArgumentError, "8-byte aligned"),
    "nothing": ((None,), ArgumentTypeError, "bidirectional_ranges must be a torch.Tensor"),
    "window": ((RANGES, 1.5), ArgumentTypeError, "causal_window_left must be an int"),
    "window of ranges": ((RANGES, -1, "all"), ArgumentTypeError, "range_window_left must be an int"),
}


@pytest.mark.parametrize("name", WRONG_RUNS)
def test_wrong_ranges_are_refused(name: str) -> None:
    arguments, error, message = WRONG_RUNS[name]
    case = Case()
    inputs = Inputs(case)
    wrapper = planned(case, inputs, made(case, "cpu"))
    with pytest.raises(error, match=message):
        wrapper.run(inputs.q, inputs.cache, *arguments)
