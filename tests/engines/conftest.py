"""Engines' calls run on CPU tensors, and as they stand on a GPU; not on the emulator, which has tests of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.engine_case import Tokens
from tests.support.executors import CUDA, GPU_MARKS, REFERENCE, Executor


@pytest.fixture(params=[pytest.param(REFERENCE, id="cpu"), pytest.param(CUDA, id="cuda", marks=GPU_MARKS)])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with request.param.active():
        yield request.param


@pytest.fixture
def device(executor: Executor) -> str:
    return executor.device


def held(tokens: Tokens, layout: str = "NHD") -> tuple[torch.Tensor, ...]:
    """What a captured decode without a plan reads in place: queries, tables, lengths, keys and values."""
    return tokens.q, tokens.block_tables(8), tokens.seq_lens, *tokens.caches(layout)
