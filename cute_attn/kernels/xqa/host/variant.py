"""From what an attention call or plan asks for to the decode kernel's own terms (`cute_attn.xqa`)."""

from __future__ import annotations

from cute_attn.kernels.host.features import kv_dtype
from cute_attn.kernels.xqa.host import runner as xqa_runner
from cute_attn.problem import Features, Settings, XqaFeatures
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec

__all__ = ["ONE_PIECE", "specs", "xqa_features"]

ONE_PIECE = 1 << 30  # tokens of the only page of keys that lie in one piece: more than any request has


def xqa_features(settings: Settings, q_len: int) -> XqaFeatures:
    f = settings.features
    paged = f.kv_source == "paged"
    return XqaFeatures(
        f.device,
        f.q_dtype,
        kv_dtype(f),
        f.o_dtype,
        f.num_qo_heads,
        f.num_kv_heads,
        f.head_dim_qk,
        settings.page_size if paged else ONE_PIECE,
        q_len,
        window_left=settings.window_left,
        enable_pdl=settings.enable_pdl,
        kv_layout=settings.kv_layout,
        paged=paged,
        lse_scale=settings.lse_scale,
    )


def specs(features: Features, arch: Arch) -> list[KernelSpec]:
    """Every kernel that calls of one query token and of these features may need."""
    asked = xqa_features(Settings(features), 1)
    return list(dict.fromkeys(xqa_runner.choose_spec(asked, few, arch) for few in (True, False)))
