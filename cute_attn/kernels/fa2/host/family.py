"""The mma.sync kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.fa2 import tiles
from cute_attn.kernels.fa2.spec import Fa2Spec, Tile
from cute_attn.kernels.formats import FP8_DTYPES, KV_BITS
from cute_attn.kernels.host.batch import Tiling
from cute_attn.kernels.host.family import TiledFamily
from cute_attn.kernels.host.features import batched, combine_spec, kv_dtype, rotates, schedule, score_steps
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import BLOCK_SCALE_FIELDS, STRIDE_FIELDS, OptionalBounds
from cute_attn.kernels.host.params import (
    NO_BATCH,
    UNBOUNDED,
    Fields,
    batch_fields,
    divisor,
    mask_bounds,
    rope_fields,
    scale_unit,
)
from cute_attn.kernels.host.prepared import Grid, PreparedKernel, prepared
from cute_attn.problem import Features, Settings, short
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import Values
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule.batch import Size
from cute_attn.schedule.params import SchedulerParams
from cute_attn.schedule.split_kv import Split, ceil_div, min_split_tiles

MANY_ROWS = tiles.APPEND_ROWS + 1  # packed rows of a request: no tile is chosen for more


ADDRESS_FIELDS = ("q", "k", "v", "o", "lse")
LENGTH_FIELDS = ("qo_len", "kv_len", "right", "left", "tiles_per_split")  # of a single request


class Fa2Family(TiledFamily[Tile]):
    name = "fa2"

    def specs(self, features: Features, arch: Arch) -> list[KernelSpec]:
        kernels: list[KernelSpec] = [
            self.spec(Settings(features), tile, split)
            for tile in tiles.candidates(variant(features), arch)
            for split in ((False,) if batched(features) else (False, True))
        ]
        return [*kernels, combine_spec(features)]

    def spec(self, settings: Settings, tile: Tile, split: bool) -> Fa2Spec:
        features = settings.features
        return Fa2Spec(
            dtype=short(features.q_dtype),
            out_dtype="float32" if split else short(features.o_dtype),
            head_dim_qk=features.head_dim_qk,
            head_dim_vo=features.head_dim_vo,
            mask=mask(features),
            scores=scores(features),
            pos_encoding="rope" if rotates(features) else "none",
            split=split,
            schedule=schedule(features),
            kv="paged" if features.kv_source == "paged" else "dense",
            kv_dtype=kv_dtype(features),
            kv_copy_bytes=kv_copy_bytes(features),
            tile=tile,
        )

    def kernel(
        self, settings: Settings, spec: Fa2Spec, heads: int, combine: OptionalBounds | None, gpu: Gpu
    ) -> PreparedKernel:
        """Returns the loaded kernel. The `heads` that share a tile are those of a kv head."""
        features, in_range = settings.features, settings.range_windows[1]  # keys of a range before their token
        batch = batched(features)
        static: Fields = {
            **divisor("group", heads),
            "num_qo_heads": features.num_qo_heads,
            **divisor("num_kv_heads", features.num_kv_heads),
            **divisor("page_size", settings.page_size),
            "soft_cap": settings.logits_soft_cap,
            **rope_fields(settings),
            "lse_scale": settings.lse_scale,
            "range_left": 1 - min(in_range, UNBOUNDED) if in_range > 0 else -UNBOUNDED,
        }
        if batch:  # every item has lengths of its own
            static |= {**dict.fromkeys(LENGTH_FIELDS, 0), **mask_bounds(settings)}
        else:
            static |= {**NO_BATCH, "full_tiles": -1}
        groups = ADDRESS_FIELDS, STRIDE_FIELDS + BLOCK_SCALE_FIELDS, batch_fields(settings) if batch else LENGTH_FIELDS
        launch, unit = gpu.loaded(spec, settings.enable_pdl), scale_unit(spec.scores)
        return PreparedKernel(settings, launch, static, groups, combine, unit)

    def tiling(self, settings: Settings, size: Size, arch: Arch, sms: int) -> Tiling[Tile]:
        features = settings.features
        rows = features.packed_rows(size.qo_len)
        if features.chunk_invariant:  # with many rows a decode step has the bits of a prefill
            rows = MANY_ROWS
        return prepared(_tiling, settings, min(rows, MANY_ROWS), arch, sms)

    def request_launch(
        self, settings: Settings, tiling: Tiling[Tile], split: Split, qo_len: int, kv_len: int
    ) -> tuple[Grid, Values]:
        position, window_left = kv_len - qo_len, settings.window_left  # of query row 0
        right = position if settings.causal else UNBOUNDED
        left = position - window_left if 0 <= window_left < kv_len else -UNBOUNDED
        ctas = ceil_div(qo_len * tiling.params.group_size, tiling.params.rows) * tiling.params.num_kv_heads
        return (ctas, 1, split.num_splits), (qo_len, kv_len, right, left, split.tiles_per_split)


def _tiling(settings: Settings, rows: int, arch: Arch, sms: int) -> Tiling[Tile]:
    """Returns the tiling for requests of `rows` packed rows."""
    features = settings.features
    kind = variant(features)
    rule = tiles.rule_of(kind, rows)
    tile = rule.value(kind, rows, arch)
    params = SchedulerParams(
        rows=tile.rows,
        cols=tile.cols,
        group_size=features.num_qo_heads // features.num_kv_heads,
        num_kv_heads=features.num_kv_heads,
        causal=settings.causal,
        window_left=settings.window_left,
        resident_ctas=sms * tiles.resident_ctas(tile, kind, arch),
        min_split_tiles=min_split_tiles(tile.rows, tile.cols, *kind.head_dims),
        partial_row_bytes=4 * (features.head_dim_vo + 1),
    )
    return prepared(Tiling, tile, rule, params)


def mask(features: Features) -> str:
    """Returns `mask` of a spec."""
    kinds = {"packed": features.custom_mask, "multi_item": features.multi_item, "ranges": features.key_ranges}
    return next((kind for kind, asked in kinds.items() if asked), "band")


def scores(features: Features) -> tuple[str, ...]:
    """Returns `scores` of a spec. Scales per head may have any sign, and are a step."""
    steps = score_steps(features)
    return ("scale",) if features.per_head_scales and not steps else steps


def kv_copy_bytes(features: Features) -> int:
    """Returns `kv_copy_bytes` of a spec."""
    bits = KV_BITS[kv_dtype(features)]
    whole = not any(dim * bits % 128 for dim in features.head_dims)
    return 16 if whole and not features.half_aligned_kv else 8


def variant(features: Features) -> tiles.Variant:
    """Returns the part of the features that the choice of a tile depends on."""
    plain = mask(features) == "band" and not (rotates(features) or scores(features))
    fp8 = short(features.q_dtype) in FP8_DTYPES
    return tiles.Variant(features.head_dims, plain, batched(features), kv_dtype(features), fp8)


FAMILY = Fa2Family()
