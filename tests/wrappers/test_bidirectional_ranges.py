"""Causal attention with a range of keys per token, against attention under the same mask written out, in fp64."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cute_attn import BatchPrefillWithCausalBidirectionalRangesWrapper, NotSupported, emulator
from tests.support.batch_case import BatchCase, BatchInputs, dims, heads, make, paged
from tests.support.dense_attention import assert_near
from tests.support.executors import Executor, needs_gpu
from tests.support.formula import batch_formula
from tests.support.graphs import cuda_graph

NONE = (-1, -1)


@dataclass(frozen=True)
class Case:
    """A batch, whose seed is that of the ranges too, and the windows of a run."""

    batch: BatchCase
    windows: tuple[int, int] = (-1, -1)

    def rows(self) -> list[tuple[int, int]]:
        """A range of every token: none, those of an image of 37 tokens, or any keys, some past the last."""
        generator, rows = torch.Generator().manual_seed(self.batch.seed), []

        def below(n: int) -> int:
            return int(torch.randint(0, n, (1,), generator=generator))

        for qo_len, kv_len in zip(self.batch.qo_lens, self.batch.kv_lens, strict=True):
            for position in range(kv_len - qo_len, kv_len):
                image, first = position // 37 * 37, below(kv_len)
                choices = (NONE, (image, image + 36), (first, first + below(80)), (0, 3), (first, first - 2))
                rows.append(choices[below(len(choices))])
        return rows

    def keep(self, rows: list[tuple[int, int]]) -> list[torch.Tensor]:
        """The mask of every request, written out."""
        causal_window, range_window = self.windows
        of_token, masks = iter(rows), []
        for qo_len, kv_len in zip(self.batch.qo_lens, self.batch.kv_lens, strict=True):
            keep = torch.zeros(qo_len, kv_len, dtype=torch.bool)
            for i, position in enumerate(range(kv_len - qo_len, kv_len)):
                first, last = next(of_token)
                for key in range(kv_len):
                    causal = key <= position and (causal_window < 0 or position - key <= causal_window)
                    near = range_window <= 0 or position - key < range_window
                    keep[i, key] = causal or (first <= key <= last and near)
            masks.append(keep)
        return masks

    def check(self, inputs: BatchInputs, out: torch.Tensor, lse: torch.Tensor, rows: Any = None) -> None:
        """Compare with attention under the masks."""
        masks = self.keep(self.rows() if rows is None else rows)
        requests = [dataclasses.replace(r, keep=keep) for r, keep in zip(inputs.requests, masks, strict=True)]
        assert_near(out, lse, batch_formula(self.batch, dataclasses.replace(inputs, requests=requests)))


def ranges_of(rows: list[tuple[int, int]], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


def index(inputs: BatchInputs) -> tuple[torch.Tensor, ...]:
    names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
    return tuple(getattr(inputs, name).to(inputs.q.device) for name in names)


def made(case: Case, device: str, backend: str = "auto", **options: Any) -> Any:
    """A wrapper for the case."""
    workspace, batch = torch.empty(4 << 20, dtype=torch.uint8, device=device), case.batch
    dtypes = {"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype or batch.dtype, "o_data_type": batch.dtype}
    sizes = {"head_dim_qk": batch.head_dim_qk, "head_dim_vo": batch.head_dim_vo}
    return BatchPrefillWithCausalBidirectionalRangesWrapper(workspace, backend=backend, **dtypes, **sizes, **options)


def planned(case: Case, inputs: BatchInputs, wrapper: Any) -> Any:
    names = ("num_qo_heads", "num_kv_heads", "page_size", "logits_soft_cap", "fixed_split_size", "disable_split_kv")
    options = {name: getattr(case.batch, name) for name in names}
    wrapper.plan(*index(inputs), head_dim_qk=case.batch.head_dim_qk, **options)
    return wrapper


def run(case: Case, inputs: BatchInputs, wrapper: Any, ranges: torch.Tensor, **options: Any) -> Any:
    sinks = {} if inputs.sinks is None else {"sinks": inputs.sinks}
    return wrapper.run(inputs.q, *inputs.kv, ranges, *case.windows, **sinks, **options)


PLAIN = paged((33, 70, 5), (33, 200, 150), **heads(4, 2))


def plain(seed: int, **changes: Any) -> BatchCase:
    return dataclasses.replace(PLAIN, seed=seed, **changes)


CASES = {
    "plain": Case(PLAIN),
    "windows": Case(plain(1), (20, 10)),
    "window of causal keys": Case(plain(2), (20, -1)),
    "own key only": Case(plain(3), (0, 0)),
    "pages of 1": Case(plain(4, page_size=1, **heads(8, 1), **dims(128))),
    "one split": Case(plain(5, disable_split_kv=True), (50, -1)),
    "fixed splits": Case(paged((20, 3), (300, 90), fixed_split_size=64, seed=6, **heads(4, 2))),
    "few tokens": Case(paged((1, 3, 2), (400, 20, 2), seed=7, **heads(4, 2))),
    "more tokens than keys": Case(paged((40, 3), (20, 1), seed=8, **heads(4, 2))),
    "fp8 cache": Case(plain(9, kv_dtype="float8_e4m3fn", dtype="bfloat16")),
    "soft cap and sinks": Case(plain(10, logits_soft_cap=3.0, sinks=True)),
    "many rows": Case(paged((300,), (420,), seed=11, **heads(2, 2))),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_attention_under_the_mask(name: str, executor: Executor) -> None:
    case = CASES[name]
    inputs, ranges = make(case.batch, executor.device), ranges_of(case.rows(), executor.device)
    wrapper = planned(case, inputs, made(case, executor.device, executor.backend))
    case.check(inputs, *run(case, inputs, wrapper, ranges, return_lse=True))


def test_a_token_per_request_is_no_decode() -> None:
    """Whose tokens see no later keys."""
    case = Case(paged((1, 1), (40, 20), **heads(4, 2)))
    assert not planned(case, make(case.batch), made(case, "cpu"))._planned().settings.features.decode


def test_one_plan_runs_layers_of_other_windows_and_ranges(device: str) -> None:
    """Each layer twice: the second call is repeated from the first one's entry."""
    case = CASES["plain"]
    inputs, some = make(case.batch, device), case.rows()
    wrapper = planned(case, inputs, made(case, device))
    none = [NONE] * len(some)
    tensors = {id(rows): ranges_of(rows, device) for rows in (some, none)}
    for windows, rows in 2 * [((-1, -1), some), ((9, -1), some), ((9, -1), none), ((-1, 4), some)]:
        layer = dataclasses.replace(case, windows=windows)
        layer.check(inputs, *run(layer, inputs, wrapper, tensors[id(rows)], return_lse=True), rows)


@pytest.mark.emulator
def test_a_prompt_cut_into_chunks_has_the_same_bits() -> None:
    """Under fixed splits: rows of other ranges in a tile change neither the order nor the number of a row's tiles."""
    whole = Case(paged((150,), (150,), disable_split_kv=True, seed=3, **heads(2, 2)), (40, -1))
    inputs, ranges = make(whole.batch), ranges_of(whole.rows())
    with emulator.using("sm_90a", kernels="fa2"):
        expected = run(whole, inputs, planned(whole, inputs, made(whole, "cpu", "emulator")), ranges)
        for first, last in ((0, 70), (70, 71), (71, 150)):
            rows, pages = slice(first, last), -(-last // 16)
            lengths = [0, last - first], [0, pages], inputs.kv_indices[:pages].tolist(), [(last - 1) % 16 + 1]
            arrays = zip(("qo_indptr", "kv_indptr", "kv_indices", "last_page_len"), lengths, strict=True)
            chunk = dataclasses.replace(inputs, q=inputs.q[rows], **{name: torch.tensor(x) for name, x in arrays})
            wrapper = planned(whole, chunk, made(whole, "cpu", "emulator"))
            out = run(whole, chunk, wrapper, ranges[rows].clone())
            # Keys of a range that a chunk does not have yet are not seen: rows whose ranges end within it are compared.
            compared = ranges[rows, 1] < last
            assert torch.equal(out[compared], expected[rows][compared])


@needs_gpu
def test_captured_runs_read_ranges_at_their_address() -> None:
    case = CASES["windows"]
    inputs, ranges = make(case.batch, "cuda"), ranges_of(case.rows(), "cuda")
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    buffers = {name: x.clone() for name, x in zip(names, index(inputs), strict=True)}
    wrapper = planned(case, inputs, made(case, "cuda", use_cuda_graph=True, **buffers))
    run(case, inputs, wrapper, ranges, return_lse=True)
    (out, lse), replay = cuda_graph(lambda: run(case, inputs, wrapper, ranges, return_lse=True))
    for seed in (5, 6):
        rows = Case(plain(seed)).rows()
        ranges.copy_(ranges_of(rows))
        replay()
        case.check(inputs, out, lse, rows)


def test_other_backends_refuse_with_a_reason() -> None:
    case = CASES["plain"]
    with (
        emulator.using("sm_90a", kernels="fa3"),
        pytest.raises(NotSupported, match="its warps take the last tile of keys"),
    ):
        planned(case, make(case.batch), made(case, "cpu", "emulator"))
