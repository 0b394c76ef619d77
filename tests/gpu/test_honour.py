"""Honour or refuse, for every argument, on a GPU."""

from __future__ import annotations

import pytest
import torch

from cute_attn import select
from cute_attn.runtime import arch as archs
from tests.honour import CALLS, IDS, Perturbation, honour

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("kind", "perturbation"), CALLS, ids=IDS)
@pytest.mark.parametrize("backend", [b.name for b in select.BACKENDS if b.capability])
def test_honour(backend: str, kind: str, perturbation: Perturbation) -> None:
    honour(kind, perturbation, backend, "cuda", archs.for_device(torch.cuda.current_device()))
