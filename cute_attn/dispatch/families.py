"""Kernel families by the names of their GPU backends."""

from __future__ import annotations

from cute_attn.kernels.fa2.host.family import FAMILY as FA2
from cute_attn.kernels.fa3.host.family import FAMILY as FA3
from cute_attn.kernels.fa4.host.family import FAMILY as FA4
from cute_attn.kernels.host.family import KernelFamily
from cute_attn.kernels.xqa.host.family import FAMILY as XQA

_ALL: tuple[KernelFamily, ...] = (FA2, FA3, FA4, XQA)
FAMILIES: dict[str, KernelFamily] = {family.name: family for family in _ALL}
