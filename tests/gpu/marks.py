"""The GPU that the tests of a module need: `pytestmark = marks.SM80`."""

from __future__ import annotations

import pytest
import torch

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
GPU = [pytest.mark.gpu, pytest.mark.skipif(CAPABILITY == (0, 0), reason="needs a CUDA device")]
SM80 = [
    pytest.mark.gpu,
    pytest.mark.sm80,
    pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs a CUDA device of compute capability 8.0 or later"),
]
