"""Kernel families by the names of their GPU backends."""

from __future__ import annotations

from typing import Any

from cute_attn.kernels.fa2.host.family import FAMILY as FA2
from cute_attn.kernels.fa3.host.family import FAMILY as FA3
from cute_attn.kernels.fa4.host.family import FAMILY as FA4
from cute_attn.kernels.host.family import TiledFamily
from cute_attn.kernels.xqa.host.family import FAMILY as XQA
from cute_attn.kernels.xqa.host.family import XqaFamily

KernelFamily = TiledFamily[Any] | XqaFamily

FAMILIES: dict[str, KernelFamily] = {family.name: family for family in (FA2, FA3, FA4, XQA)}
