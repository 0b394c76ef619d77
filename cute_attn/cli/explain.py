"""`explain`: shows which backend takes a problem, why the others do not, and which kernels would run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cute_attn.cli import explain_batch, specs
from cute_attn.errors import ArgumentError
from cute_attn.runtime import arch as archs
from cute_attn.runtime.spec import KernelSpec

if TYPE_CHECKING:
    from cute_attn.dispatch.capabilities import Load
    from cute_attn.problem import Features
    from cute_attn.request.settings import Call

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
    parser.add_argument("--kv-dtype", choices=(*DTYPES, "nvfp4"), help="dtype of k and v (default: --dtype)")
    parser.add_argument("--o-dtype", choices=DTYPES, help="dtype of the output (default: --dtype)")
    parser.add_argument("--kv-layout", default="NHD", help="NHD (default) or HND")
    parser.add_argument("--causal", action="store_true", help="causal mask, aligned to the bottom right")
    parser.add_argument("--custom-mask", action="store_true", help="packed custom mask")
    parser.add_argument("--window-left", type=int, default=-1, help="size of a sliding window (default -1: none)")
    parser.add_argument("--pos-encoding-mode", default="NONE", help="NONE (default), ROPE_LLAMA or ALIBI")
    parser.add_argument("--logits-soft-cap", type=float, help="soft cap of the logits (default: none)")
    parser.add_argument("--sinks", action="store_true", help="attention sinks")
    parser.add_argument(
        "--arch",
        help=f"{CPU}, one of {', '.join(archs.ARCHS)}, or a GPU's name such as h100 (default: the GPU of this machine, "
        "else sm_90a)",
    )
    parser.add_argument("--sms", type=int, help="number of multiprocessors (default: that of a typical GPU of --arch)")
    parser.add_argument("--specs", action="store_true", help="print the spec of each kernel as JSON too")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of text")
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
    features = problem.features
    load = select.load_of(problem.settings, problem.qo_len)
    title = f"qo_len {problem.qo_len}, kv_len {problem.kv_len} on {sms} multiprocessors of {arch and arch.name}"

    def launches() -> Planned:
        assert arch is not None
        return "", planned.launches(problem, arch, sms)

    return answer(options, features, arch, load, title, launches)


Launches = Sequence[tuple[KernelSpec, tuple[int, int, int]]]
Planned = tuple[str, Launches]  # the schedule in words, and kernels and grids


def answer(
    options: argparse.Namespace,
    features: Features,
    arch: archs.Arch | None,
    load: Load,
    title: str,
    launches: Callable[[], Planned],
) -> int:
    """Prints verdicts, and where a backend of a GPU takes the problem what it would run; returns the exit code."""
    from cute_attn.dispatch import explain, select

    found = explain.verdicts(features, arch, load)
    chosen = next((each.backend for each in found if each.verdict == explain.CHOSEN), None)
    schedule, planned = launches() if chosen is not None and arch is not None else ("", [])
    if options.json:
        document = {
            "problem": select.title(features, arch),
            "chosen": chosen,
            "backends": [
                {
                    "backend": each.backend,
                    "verdict": each.verdict,
                    "why": each.why,
                    "refusals": [
                        dict(zip(("feature", "reason", "instead"), r[1:], strict=True)) for r in each.refusals
                    ],
                }
                for each in found
            ],
            "launches": [{"spec": spec.asdict(), "grid": grid} for spec, grid in planned],
        }
        print(json.dumps(document, indent=1))
    else:
        print(explain.text(features, arch, load))
        if planned or schedule:
            print(f"\n{title}:")
            print("\n".join(filter(None, (schedule, specs.launched(planned, options.specs)))))
    return 0 if chosen is not None else 1


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
    arch = archs.of_gpu("sm_90a" if options.arch is None else options.arch)
    return arch, options.sms or planned.TYPICAL_SMS[arch.name]


def check_sizes(options: argparse.Namespace) -> None:
    """Refuses sizes of a request below 0."""
    for name in ("qo_len", "kv_len", "num_qo_heads", "num_kv_heads", "head_dim"):
        if getattr(options, name) < 0:
            raise ArgumentError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(options, name)}")


def make_call(options: argparse.Namespace) -> Call:
    """Returns the call that the options describe."""
    from cute_attn.dispatch import explain

    check_sizes(options)
    return explain.described(explain.Described(*(getattr(options, name) for name in explain.Described._fields)))
