"""The GPU that the tests of a module need, `pytestmark = marks.GPU`, or that of a case by its backend, `marks.OF`."""

from __future__ import annotations

import pytest
import torch

from cute_attn.runtime import arch as archs
from tests.support.executors import GPU_MARKS
from tests.support.persistent_emulated import FA3, FA4, Target

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
GPU = list(GPU_MARKS)


def _of(target: Target, marker: pytest.MarkDecorator) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a case of persistent kernels, which needs a GPU that runs them."""
    runs = CAPABILITY >= (8, 0) and target.runs_on(archs.for_capability(CAPABILITY))
    return pytest.mark.gpu, marker, pytest.mark.skipif(not runs, reason=f"needs a GPU that runs {target.kernels}")


FA3_GPU, FA4_GPU = _of(FA3, pytest.mark.sm90), _of(FA4, pytest.mark.sm100)
OF = {"fa2": GPU, "xqa": GPU, "auto": GPU, "fa3": FA3_GPU, "fa4": FA4_GPU}  # by backend
