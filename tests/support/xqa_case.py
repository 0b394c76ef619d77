"""Decode problems over paged caches: arguments of a call, with garbage where nothing may be read, and an fp64 oracle.

Cache slots that belong to no token hold NaN, and the page table holds numbers far outside the cache past a request's
last page: who reads either is found out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from cute_attn.request.bit_packing import packbits
from tests.support.case import off
from tests.support.dense_attention import batch_attention, nvfp4_values, seen
from tests.support.paged_cache import Pages, Stored, ends, stacked, store

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "nvfp4": torch.uint8,
}
WORKSPACE_BYTES = 48 << 20

# Relative to the norm of the output: rounding of the output itself, and of P to 16 bits.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float8_e4m3fn: 4e-2}
FLOOR = {torch.float8_e4m3fn: 2.0**-10}  # half the distance of its smallest numbers
LSE_TOLERANCE, LSE_ROUNDING = 1e-3, 2**-21  # the latter of lse itself: four units in the last place of fp32 scores


@dataclass(frozen=True)
class XqaCase:
    seq_lens: tuple[int, ...]
    kv: str = "bf16"
    q: str = "bf16"
    heads: tuple[int, int] = (8, 2)  # query, kv
    head_dim: int = 128
    page_size: int = 16
    kv_layout: str = "NHD"
    form: str = "pair"  # "pair", or "tensor" with K and V on axis 1
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None  # ragged queries
    mask: bool = False
    window_left: int = -1
    sinks: bool = False
    bmm1_scale: float | None = None  # default 1 / sqrt(head_dim)
    bmm2_scale: float = 1.0
    o_scale: float = 1.0
    device_scales: bool = False
    out: str | None = None
    return_lse: bool = True
    enable_pdl: bool | None = None
    seed: int = 0

    @property
    def qo_lens(self) -> tuple[int, ...]:
        return self.q_lens or (self.q_len,) * len(self.seq_lens)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.bmm1_scale is None else self.bmm1_scale


@dataclass
class Built:
    """A case's tensors: `arguments` of `xqa_batch_decode_with_kv_cache`, and what the oracle needs."""

    case: XqaCase
    arguments: dict[str, Any]
    keys: list[torch.Tensor]  # per request [kv_len, num_kv_heads, head_dim], fp64
    values: list[torch.Tensor]
    query: torch.Tensor
    mask_bits: torch.Tensor | None  # [num_tokens, q_len] bool

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and base-2 lse in fp64, request by request."""
        case, lens = self.case, list(self.case.qo_lens)
        bits = [None] * len(lens) if self.mask_bits is None else self.mask_bits.split(lens)
        kept = [self._visible(*request) for request in zip(bits, lens, map(len, self.keys), strict=True)]
        requests = zip(self.query.split(lens), self.keys, self.values, kept, strict=True)
        o, lse = batch_attention(requests, case.scale, sinks=self.arguments["sinks"])
        o *= case.bmm2_scale * case.o_scale
        return ((o / case.o_scale).clamp(-448, 448) if case.out == "e4m3" else o), lse

    def _visible(self, bits: torch.Tensor | None, qo_len: int, kv_len: int) -> torch.Tensor:
        """A mask says which draft tokens are seen; a window restricts both."""
        kept = seen(qo_len, kv_len, bits is None, self.case.window_left)
        if bits is not None:
            kept[:, max(kv_len - qo_len, 0) :] &= bits[:, max(qo_len - kv_len, 0) : qo_len]
        return kept

    def low_level(self, words: int = 4096, **changes: Any) -> dict[str, Any]:
        """Arguments of `cute_attn.xqa`. `words`: 32-bit words of the workspace and of the semaphores, each."""
        a, (k, v) = self.arguments, self.arguments["kv_cache"]
        given = {"q": a["query"], "k_cache": k, "v_cache": v, "page_table": a["block_tables"]}
        given |= {"seq_lens": a["seq_lens"], "output": torch.zeros_like(a["query"]), "num_kv_heads": 2, "page_size": 16}
        given |= {"kv_layout": self.case.kv_layout, "workspace_buffer": torch.empty(words, device=k.device)}
        return given | {"semaphores": torch.zeros(words, dtype=torch.uint32, device=k.device)} | changes

    def check(self, out: torch.Tensor, lse: torch.Tensor | None) -> str:
        """ "" if out and lse are right, else what is wrong."""
        o, z = self.oracle()
        found = out.detach().cpu().double().reshape(o.shape)
        if found.isnan().any():
            return f"{int(found.isnan().sum())} NaN"
        error, size = float((found - o).norm()), float(o.norm())
        if error > TOLERANCE[out.dtype] * size + FLOOR.get(out.dtype, 0.0) * o.numel() ** 0.5:
            return f"relative error {error / max(size, 1e-30):.2e}"
        if lse is None:
            return ""
        unit = 1 + LSE_ROUNDING / LSE_TOLERANCE * z.masked_fill(z.isinf(), 0.0).abs()
        return off("lse", lse.detach().cpu().reshape(z.shape), z, unit, LSE_TOLERANCE, z.isinf())


def build(case: XqaCase, device: str = "cpu") -> Built:
    generator = torch.Generator().manual_seed(case.seed)
    pages = Pages(case.seq_lens, case.page_size, generator)
    k, v = _numbers(case, generator), _numbers(case, generator)

    def cache(*sides: torch.Tensor) -> Any:
        pair = [pages.scatter(side, case.kv_layout) for side in sides]
        return stacked(*pair) if case.form == "tensor" else tuple(pair)

    num_tokens, q_dtype = sum(case.qo_lens), DTYPES[case.q]
    query = torch.randn(num_tokens, case.heads[0], case.head_dim, generator=generator).to(q_dtype)
    mask_bits = (torch.rand(num_tokens, case.q_len, generator=generator) < 0.6) if case.mask else None
    arguments: dict[str, Any] = {
        "query": query,
        "kv_cache": cache(k.data, v.data),
        "workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8),
        "block_tables": pages.tables(),
        "seq_lens": pages.seq_lens,
        "max_seq_len": max([*case.seq_lens, 0]),
        "bmm1_scale": torch.tensor([case.scale]) if case.device_scales else case.scale,
        "bmm2_scale": torch.tensor([case.bmm2_scale]) if case.device_scales else case.bmm2_scale,
        "sinks": torch.randn(case.heads[0], generator=generator) * 2 if case.sinks else None,
        "q_len_per_req": case.q_len,
        "mask": None if mask_bits is None else words(mask_bits),
        "kv_cache_sf": None if k.scales is None or v.scales is None else cache(k.scales, v.scales),
        "q_cu_seq_lens": None if case.q_lens is None else ends(case.q_lens),
        "out": None if case.out is None else torch.empty(query.shape, dtype=DTYPES[case.out]),
        **{name: getattr(case, name) for name in ("window_left", "kv_layout", "enable_pdl", "o_scale", "return_lse")},
    }
    moved = tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, arguments)
    keys, values = ([*side.values.split(case.seq_lens)] for side in (k, v))
    return Built(case, moved, keys, values, query.double(), mask_bits)


def words(bits: torch.Tensor) -> torch.Tensor:
    """Rows of bool as 16-bit words, little end first, an even number of them."""
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 32))
    return packbits(padded.flatten(), "little").view(torch.uint16).view(len(bits), -1)


def _numbers(case: XqaCase, generator: torch.Generator) -> Stored:
    """K or V of all tokens. Block scales of NVFP4 are 0 and subnormal, too."""
    shape = sum(case.seq_lens), case.heads[1]
    if case.kv != "nvfp4":
        return store(torch.randn(*shape, case.head_dim, generator=generator), DTYPES[case.kv])
    data = torch.randint(0, 256, (*shape, case.head_dim // 2), generator=generator, dtype=torch.uint8)
    codes = torch.randint(0x18, 0x40, (*shape, case.head_dim // 16), generator=generator, dtype=torch.uint8)
    codes[torch.rand(codes.shape, generator=generator) < 0.05] = 0
    codes[torch.rand(codes.shape, generator=generator) < 0.01] = 1
    scales = codes.view(torch.float8_e4m3fn)
    return Stored(data, scales, nvfp4_values(data, scales))


def random_case(seed: int, *, longest: int = 900) -> XqaCase:
    """Small problems that mix everything."""
    r = random.Random(seed)
    kv = r.choice(["bf16", "fp16", "e4m3", "e5m2", "nvfp4"])
    batch = r.choice([1, 1, 2, 3, 5, 34])
    longest = longest if batch < 4 else longest // 4
    q_len = r.choice([1, 1, 1, 2, 3, 5, 16, 33])
    lengths = [r.choice([0, 1, r.randrange(100), r.randrange(longest)]) for _ in range(batch)]
    ragged = q_len > 1 and r.random() < 0.3
    case = XqaCase(
        tuple(n if r.random() < 0.1 else max(n, q_len) for n in lengths),
        kv=kv,
        q=kv if kv in ("bf16", "fp16") else r.choice(["bf16", "fp16"]),
        heads=r.choice([(4, 1), (2, 2), (8, 2), (3, 1), (8, 1), (16, 2), (12, 1), (5, 1)]),
        head_dim=r.choice([64, 128, 128, 256]),
        page_size=r.choice([1, 3, 16, 32, 64, 100]),
        kv_layout=r.choice(["NHD", "HND"]),
        form=r.choice(["pair", "tensor"]),
        q_len=q_len,
        q_lens=tuple(r.randrange(q_len + 1) for _ in range(batch)) if ragged else None,
        mask=q_len > 1 and r.random() < 0.4,
        window_left=r.choice([-1, -1, -1, r.randrange(400), 0]),
        sinks=r.random() < 0.3,
        bmm1_scale=r.choice([None, None, -0.07, 0.0, 0.5]),
        bmm2_scale=r.choice([1.0, -3.0]),
        o_scale=r.choice([1.0, 0.25]),
        device_scales=r.random() < 0.3,
        out=r.choice([None, None, "e4m3"]),
        seed=seed,
    )
    return replace(case, bmm1_scale=case.bmm1_scale if kv != "nvfp4" else (case.bmm1_scale or 0.01) * 0.1)
