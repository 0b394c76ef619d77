"""Honour or refuse, for every argument, on a GPU."""

from __future__ import annotations

import pytest
import torch

from cute_attn.dispatch import capabilities
from cute_attn.runtime import arch as archs
from tests.gpu import marks
from tests.support.honour import CALLS, IDS, Perturbation, honour

pytestmark = marks.GPU


@pytest.mark.parametrize(("kind", "perturbation"), CALLS, ids=IDS)
@pytest.mark.parametrize("backend", [b.name for b in capabilities.BACKENDS if b.capability])
def test_honour(backend: str, kind: str, perturbation: Perturbation) -> None:
    honour(kind, perturbation, backend, "cuda", archs.for_device(torch.cuda.current_device()))
