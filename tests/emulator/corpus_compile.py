"""Compiles forward kernels of the installed flash-attn-4 wheel to PTX: `corpus_compile.py DIRECTORY CASE...`.

A case is arch:head_dim:causal:group:q_stage:traits, traits being letters: p two CTAs a tile, c work taken over from
clusters that have not started, 8 inputs of e4m3. Through the DSL's public interface and with fake tensors, so that no
GPU is needed. In a process of its own, because the wheel's packages change classes of the DSL when they are imported.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.compiler import DumpDir, GPUArch, KeepPTX


def main(directory: str, cases: list[str]) -> None:
    for case in cases:
        arch, head_dim, causal, group, q_stage, traits = case.split(":")
        options = int(head_dim), causal == "1", int(group), int(q_stage), traits
        dump = Path(directory, "dump", case.replace(":", "_"))
        dump.mkdir(parents=True)
        make = (_sm90 if arch == "sm_90a" else _sm100)(*options)
        compiled = cute.compile[GPUArch(arch), KeepPTX(True), DumpDir(str(dump))](*_host(make, options[0], traits))
        Path(directory, case.replace(":", "_") + ".ptx").write_text(compiled.__ptx__)


def _sm90(head_dim: int, causal: bool, group: int, q_stage: int, traits: str) -> Callable[[], Any]:
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

    return lambda: FlashAttentionForwardSm90(
        cutlass.BFloat16,
        head_dim,
        head_dim,
        group,
        is_causal=causal,
        is_local=False,
        pack_gqa=group > 1,
        tile_m=128,
        tile_n=128,
        num_stages=2,
        num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=True,
        mma_pv_is_rs=True,
    )


def _sm100(head_dim: int, causal: bool, group: int, q_stage: int, traits: str) -> Callable[[], Any]:
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    return lambda: FlashAttentionForwardSm100(
        head_dim,
        head_dim,
        qhead_per_kvhead=group,
        is_causal=causal,
        is_local=False,
        pack_gqa=group > 1,
        m_block_size=128,
        n_block_size=128,
        q_stage=q_stage,
        is_static_persistent=False,  # its grid needs a GPU to ask
        use_2cta_instrs="p" in traits,
        use_clc_scheduler="c" in traits,
    )


def _host(make: Callable[[], Any], head_dim: int, traits: str) -> tuple[Any, ...]:
    """A host function and fake arguments: [batch, length, heads, head_dim] and lse [batch, heads, length]."""
    batch, qo_len, kv_len, heads, kv_heads = (cute.sym_int() for _ in range(5))

    def tensor(dtype: Any, shape: tuple[Any, ...], align: int) -> Any:
        items = max(align * 8 // dtype.width, 1)
        stride = (*(cute.sym_int64(divisibility=items) for _ in shape[1:]), 1)
        return cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=align)

    item = cutlass.Float8E4M3FN if "8" in traits else cutlass.BFloat16
    q = tensor(item, (batch, qo_len, heads, head_dim), 16)
    k, v = (tensor(item, (batch, kv_len, kv_heads, head_dim), 16) for _ in range(2))
    o = tensor(cutlass.BFloat16, (batch, qo_len, heads, head_dim), 16)
    lse = tensor(cutlass.Float32, (batch, heads, qo_len), 4)

    @cute.jit
    def host(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        scale: cutlass.Float32,
        stream: Any,
    ) -> None:
        make()(q, k, v, o, lse, scale, stream=stream)

    return host, q, k, v, o, lse, cutlass.Float32(1.0), cute.runtime.make_fake_stream()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
