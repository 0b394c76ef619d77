"""`explain`: shows which backend takes a problem, why the others do not, and which kernels would run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cute_attn.cli import explain_batch, specs
from cute_attn.errors import ArgumentError, NotSupported
from cute_attn.runtime import arch as archs

if TYPE_CHECKING:
    from cute_attn.request.single import Call

CPU = "cpu"
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="show which backend takes a problem, why the others do not, and which kernels would run",
        description="Exits 0 if a backend takes the problem, 1 if none does, 2 if an argument is invalid.",
    )
    parser.add_argument("--qo-len", type=int, default=1, help="number of query tokens (default 1: decode)")
    parser.add_argument("--kv-len", type=int, default=4096, help="number of keys and values (default 4096)")
    batch = parser.add_argument_group("batches, as the wrappers plan them")
    batch.add_argument("--batch", type=int, metavar="N", help="N requests of --qo-len query tokens and --kv-len keys")
    batch.add_argument("--qo-lens", metavar="N,N", help="query tokens of each request (default: --qo-len)")
    batch.add_argument("--kv-lens", metavar="N,N", help="keys of each request (default: --kv-len)")
    batch.add_argument("--page-size", type=int, metavar="N", help="tokens per page (default: ragged keys and values)")
    parser.add_argument("--num-qo-heads", type=int, default=32, help="number of query heads (default 32)")
    parser.add_argument("--num-kv-heads", type=int, default=8, help="number of kv heads (default 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="head dimension of q and k (default 128)")
    parser.add_argument("--head-dim-vo", type=int, help="head dimension of v and the output (default: --head-dim)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of q (default bfloat16)")
    parser.add_argument("--kv-dtype", choices=DTYPES, help="dtype of k and v (default: --dtype)")
    parser.add_argument("--o-dtype", choices=DTYPES, help="dtype of the output (default: --dtype)")
    parser.add_argument("--kv-layout", default="NHD", help="NHD (default) or HND")
    parser.add_argument("--causal", action="store_true", help="causal mask, aligned to the bottom right")
    parser.add_argument("--custom-mask", action="store_true", help="packed custom mask")
    parser.add_argument("--window-left", type=int, default=-1, help="size of a sliding window (default -1: none)")
    parser.add_argument("--pos-encoding-mode", default="NONE", help="NONE (default), ROPE_LLAMA or ALIBI")
    parser.add_argument("--logits-soft-cap", type=float, help="soft cap of the logits (default: none)")
    parser.add_argument("--sinks", action="store_true", help="attention sinks")
    parser.add_argument(
        "--arch", help=f"{CPU}, or one of {', '.join(archs.ARCHS)} (default: the GPU of this machine, else sm_90a)"
    )
    parser.add_argument("--sms", type=int, help="number of multiprocessors (default: that of a typical GPU of --arch)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from cute_attn.cli import planned
    from cute_attn.dispatch import select
    from cute_attn.request import single as single_request

    arch, sms = target(options)
    if explain_batch.wanted(options):
        return explain_batch.run(options, arch, sms)
    call = make_call(options)
    problem = single_request.problem(call) if arch is None else planned.on_gpu(call)
    print(select.explain(problem, arch))
    try:
        select.choose(problem.features, "auto", arch)
    except NotSupported:
        return 1
    if arch is None:
        return 0
    print(f"\nqo_len {problem.qo_len}, kv_len {problem.kv_len} on {sms} multiprocessors of {arch.name}:")
    print(specs.launched(planned.launches(problem, arch, sms)))
    return 0


def target(options: argparse.Namespace) -> tuple[archs.Arch | None, int]:
    """Returns the architecture and the number of multiprocessors to plan for; (None, 0) means the CPU."""
    import torch

    from cute_attn.cli import planned

    if options.sms is not None and options.sms < 1:
        raise ArgumentError(f"--sms must be at least 1, got {options.sms}")
    if options.arch == CPU:
        return None, 0
    if options.arch is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
        sms = torch.cuda.get_device_properties(index).multi_processor_count
        return archs.for_device(index), options.sms or sms
    arch = archs.named(options.arch or "sm_90a")
    return arch, options.sms or planned.TYPICAL_SMS[arch.name]


def make_call(options: argparse.Namespace) -> Call:
    """Returns the call that the options describe. Its tensors are never read or written, so they take no memory."""
    import torch

    from cute_attn.request.single import Call

    for name in ("qo_len", "kv_len", "num_qo_heads", "num_kv_heads", "head_dim"):
        if getattr(options, name) < 0:
            raise ArgumentError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(options, name)}")
    head_dim_vo = options.head_dim if options.head_dim_vo is None else options.head_dim_vo
    kv_dtype = getattr(torch, options.kv_dtype or options.dtype)
    kv_shape = (options.kv_len, options.num_kv_heads)
    if options.kv_layout == "HND":
        kv_shape = kv_shape[::-1]
    mask_bytes = (options.qo_len * options.kv_len + 7) // 8
    decode = options.qo_len == 1 and not (options.causal or options.custom_mask or options.o_dtype)
    tokens = () if decode else (options.qo_len,)
    return Call(
        torch.empty(*tokens, options.num_qo_heads, options.head_dim, dtype=getattr(torch, options.dtype)),
        torch.empty(*kv_shape, options.head_dim, dtype=kv_dtype),
        torch.empty(*kv_shape, head_dim_vo, dtype=kv_dtype),
        decode,
        kv_layout=options.kv_layout,
        pos_encoding_mode=options.pos_encoding_mode,
        causal=options.causal,
        packed_custom_mask=torch.empty(mask_bytes, dtype=torch.uint8) if options.custom_mask else None,
        window_left=options.window_left,
        logits_soft_cap=options.logits_soft_cap,
        o_dtype=getattr(torch, options.o_dtype) if options.o_dtype else None,
        sinks=torch.zeros(options.num_qo_heads) if options.sinks else None,
    )
