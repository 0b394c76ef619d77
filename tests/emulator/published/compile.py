"""Compiles forward kernels of the flash-attn-4 wheel: `python -m tests.emulator.published.compile DIRECTORY KERNEL...`.

Writes the PTX of each kernel (`tests.emulator.published.problem.Kernel` as text) into the directory. Through the DSL's
public interface and with fake tensors, so that no GPU is needed. In a process of its own, because the wheel's packages
change classes of the DSL when they are imported.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import cutlass
from cutlass import cute
from cutlass.base_dsl.compiler import DumpDir, GPUArch, KeepPTX
from cutlass.utils import HardwareInfo

from cute_attn.runtime.arch import TYPICAL_SMS
from tests.emulator.published.problem import ROWS, Kernel


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.published.compile", description=__doc__)
    parser.add_argument("directory", type=Path, help="of the files that are written")
    parser.add_argument("kernels", nargs="+", type=Kernel.parse, metavar="KERNEL")
    asked = parser.parse_args(argv)
    for kernel in asked.kernels:
        dump = asked.directory / "dump" / kernel.file
        dump.mkdir(parents=True)
        make = (_sm90 if kernel.arch == "sm_90a" else _sm100)(kernel)
        options = GPUArch(kernel.arch), KeepPTX(True), DumpDir(str(dump))
        with _gpu(kernel.arch):
            compiled = cute.compile[options](*_host(make, kernel))
        (asked.directory / f"{kernel.file}.ptx").write_text(compiled.__ptx__)


@contextlib.contextmanager
def _gpu(arch: str) -> Iterator[None]:
    """Answers what the host code of persistent kernels asks of the GPU: its SMs."""
    sms = TYPICAL_SMS[arch]
    with (
        mock.patch.object(HardwareInfo, "__init__", return_value=None),
        mock.patch.object(HardwareInfo, "get_device_multiprocessor_count", return_value=sms),
    ):
        yield


def _sm90(kernel: Kernel) -> Callable[[], Any]:
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

    return lambda: FlashAttentionForwardSm90(
        cutlass.BFloat16,
        kernel.head_dim,
        kernel.head_dim,
        kernel.group,
        is_causal=kernel.causal,
        is_local=False,
        pack_gqa=kernel.group > 1,
        tile_m=ROWS,
        tile_n=ROWS,
        num_stages=2,
        num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=True,
        mma_pv_is_rs=True,
    )


def _sm100(kernel: Kernel) -> Callable[[], Any]:
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    return lambda: FlashAttentionForwardSm100(
        kernel.head_dim,
        kernel.head_dim,
        qhead_per_kvhead=kernel.group,
        is_causal=kernel.causal,
        is_local=False,
        pack_gqa=kernel.group > 1,
        m_block_size=ROWS,
        n_block_size=ROWS,
        q_stage=kernel.q_stage,
        is_static_persistent=False,
        use_2cta_instrs="p" in kernel.traits,
        use_clc_scheduler="c" in kernel.traits,
        use_s_ping_pong=False,
    )


def _host(make: Callable[[], Any], kernel: Kernel) -> tuple[Any, ...]:
    """A host function and fake arguments: [batch, length, heads, head_dim] and lse [batch, heads, length]."""
    batch, qo_len, kv_len, heads, kv_heads = (cute.sym_int() for _ in range(5))

    def tensor(dtype: Any, shape: tuple[Any, ...], align: int) -> Any:
        items = max(align * 8 // dtype.width, 1)
        stride = (*(cute.sym_int64(divisibility=items) for _ in shape[1:]), 1)
        return cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=align)

    item = cutlass.Float8E4M3FN if "8" in kernel.traits else cutlass.BFloat16
    q = tensor(item, (batch, qo_len, heads, kernel.head_dim), 16)
    k = tensor(item, (batch, kv_len, kv_heads, kernel.head_dim), 16)
    v = tensor(item, (batch, kv_len, kv_heads, kernel.head_dim), 16)
    o = tensor(cutlass.BFloat16, (batch, qo_len, heads, kernel.head_dim), 16)
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
    main()
