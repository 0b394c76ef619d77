"""`explain`: shows which backend takes a problem, why the others do not, and which kernels would run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_attn.cli import specs
from cute_attn.errors import ArgumentError
from cute_attn.runtime import arch as archs
from cute_attn.runtime.spec import KernelSpec

if TYPE_CHECKING:
    from cute_attn.dispatch.capabilities import Load
    from cute_attn.dispatch.explain import Launch
    from cute_attn.kernels.host.batch import BatchSchedule
    from cute_attn.problem import BatchLengths, Features

CPU = "cpu"
WORKSPACE_BYTES = 128 << 20  # of a batch: what callers are told to bring
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="show which backend takes a problem, why the others do not, and which kernels would run",
        description="Exits 0 if a backend takes the problem, 1 if none does, 2 if an argument is invalid.",
    )
    add_request(parser, qo_len=1, kv_len=4096, num_qo_heads=32, num_kv_heads=8, head_dim=128)
    batch = parser.add_argument_group("batches, as the wrappers plan them")
    batch.add_argument("--batch", type=int, metavar="N", help="N requests of --qo-len query tokens and --kv-len keys")
    batch.add_argument("--qo-lens", metavar="N,N", help="query tokens of each request (default: --qo-len)")
    batch.add_argument("--kv-lens", metavar="N,N", help="keys of each request (default: --kv-len)")
    batch.add_argument("--page-size", type=int, metavar="N", help="tokens per page (default: ragged keys and values)")
    parser.add_argument("--head-dim-vo", type=int, help="head dimension of v and the output (default: --head-dim)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of q (default bfloat16)")
    parser.add_argument("--kv-dtype", choices=(*DTYPES, "nvfp4"), help="dtype of k and v (default: --dtype)")
    parser.add_argument("--o-dtype", choices=DTYPES, help="dtype of the output (default: --dtype)")
    parser.add_argument("--kv-layout", default="NHD", help="NHD (default) or HND")
    parser.add_argument("--custom-mask", action="store_true", help="packed custom mask")
    parser.add_argument("--sinks", action="store_true", help="attention sinks")
    parser.add_argument(
        "--arch",
        help=f"{CPU}, one of {', '.join(archs.ARCHS)}, or a GPU's name such as h100 (default: the GPU of this machine, "
        "else sm_90a)",
    )
    parser.add_argument("--sms", type=int, help="number of multiprocessors (default: that of a typical GPU of --arch)")
    parser.add_argument("--specs", action="store_true", help="print the spec of each kernel as JSON too")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of text")


SIZES = {
    "qo_len": "number of query tokens, 1 in a decode step",
    "kv_len": "number of keys and values",
    "num_qo_heads": "number of query heads",
    "num_kv_heads": "number of kv heads",
    "head_dim": "head dimension of q and k, and of v where it has none of its own",
}


def add_request(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Adds the sizes of a request, with their defaults, and its mask and scores."""
    for name, what in SIZES.items():
        default, flag = defaults[name], f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--causal", action="store_true", help="causal mask, aligned to the bottom right")
    parser.add_argument("--window-left", type=int, default=-1, help="size of a sliding window (default -1: none)")
    parser.add_argument("--logits-soft-cap", type=float, help="soft cap of the logits (default: none)")
    parser.add_argument("--pos-encoding-mode", default="NONE", help="NONE (default), ROPE_LLAMA or ALIBI")


Launches = Sequence[tuple[KernelSpec, tuple[int, int, int]]]


class Asked(NamedTuple):
    """What selection is asked, and of the family that it chooses: the schedule in words, kernels and grids."""

    features: Features
    load: Load
    launch: Launch
    title: str
    planned: Callable[[Any], tuple[str, Launches]]


def run(options: argparse.Namespace) -> int:
    arch, sms = target(options)
    batch = any(value is not None for value in (options.batch, options.qo_lens, options.kv_lens, options.page_size))
    return answer(options, arch, sms, (of_batch if batch else of_request)(options, arch, sms))


def of_request(options: argparse.Namespace, arch: archs.Arch | None, sms: int) -> Asked:
    """Returns a request, as the functions without a plan run it."""
    import torch

    from cute_attn.dispatch import explain, select

    check_sizes(options)
    problem = explain.described(options, device=torch.device("cpu" if arch is None else "cuda"))
    settings, launch = problem.settings, explain.launch_of(problem, sms)
    load, title = select.load_of(settings, problem.qo_len), f"qo_len {problem.qo_len}, kv_len {problem.kv_len}"
    return Asked(settings.features, load, launch, title, lambda family: ("", family.launches(problem, arch, sms)))


def answer(options: argparse.Namespace, arch: archs.Arch | None, sms: int, asked: Asked) -> int:
    """Prints verdicts, and where a backend of a GPU takes the problem what it would run; returns the exit code."""
    from cute_attn.dispatch import explain, select
    from cute_attn.dispatch.families import FAMILIES

    found = explain.verdicts(asked.features, arch, asked.load, asked.launch)
    chosen = next((each.backend for each in found if each.verdict == explain.CHOSEN), None)
    schedule, planned = asked.planned(FAMILIES[chosen]) if chosen and arch is not None else ("", [])
    if options.json:
        told = ("feature", "reason", "instead")
        refusals = ([dict(zip(told, refusal[1:], strict=True)) for refusal in each.refusals] for each in found)
        document = {
            "problem": select.title(asked.features, arch),
            "chosen": chosen,
            "backends": [each._asdict() | {"refusals": why} for each, why in zip(found, refusals, strict=True)],
            "launches": [{"spec": spec.asdict(), "grid": grid} for spec, grid in planned],
        }
        print(json.dumps(document, indent=1))
    else:
        print(explain.text(asked.features, arch, asked.load, asked.launch))
        if arch is not None and (planned or schedule):
            print("\n".join(filter(None, (f"\n{asked.title} on {sms} multiprocessors of {arch.name}:", schedule))))
        for spec, grid in planned:
            print(f"  {specs.label(spec)}, grid {' x '.join(map(str, grid))}")
            if options.specs:
                print(f"    {spec.key()}")
    return 0 if chosen is not None else 1


def target(options: argparse.Namespace) -> tuple[archs.Arch | None, int]:
    """Returns the architecture and the number of multiprocessors to plan for; (None, 0) means the CPU."""
    import torch

    if options.sms is not None and options.sms < 1:
        raise ArgumentError(f"--sms must be at least 1, got {options.sms}")
    if options.arch == CPU:
        return None, 0
    if options.arch is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
        sms = torch.cuda.get_device_properties(index).multi_processor_count
        return archs.for_device(index), options.sms or sms
    arch = archs.of_gpu("sm_90a" if options.arch is None else options.arch)
    return arch, options.sms or archs.TYPICAL_SMS[arch.name]


def check_sizes(options: argparse.Namespace) -> None:
    """Refuses sizes of a request below 0."""
    for name in SIZES:
        if getattr(options, name) < 0:
            raise ArgumentError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(options, name)}")


# ---- batches: what a wrapper would plan


def of_batch(options: argparse.Namespace, arch: archs.Arch | None, sms: int) -> Asked:
    """Returns a batch, as a wrapper plans it."""
    import torch

    from cute_attn.dispatch import explain, select
    from cute_attn.problem import BatchLimits
    from cute_attn.schedule.batch import typical_qo_len

    lengths, q_len = tokens(options), None
    if options.page_size is not None and not options.custom_mask:  # kernels of decode could run it
        heads = options.num_qo_heads, options.num_kv_heads
        q_len = select.newest_bound(lengths.longest_qo, heads, options.causal) or None
    source = "ragged" if options.page_size is None else "paged"
    device = torch.device("cpu" if arch is None else "cuda")
    decode = q_len is not None
    settings = explain.settings_of(options, options.page_size or 1, device=device, kv_source=source, decode=decode)
    limits = BatchLimits(WORKSPACE_BYTES, max_qo_len=q_len)
    load = select.load_of(settings, q_len or typical_qo_len(lengths, limits), lengths.batch_size)

    def planned(family: Any) -> tuple[str, Launches]:
        plan, found = family.batch_launches(settings, lengths, limits, arch, sms)
        return schedule(plan) if plan else "  CTAs divide the keys without a schedule", found

    pages = f" in pages of {options.page_size}" if options.page_size else ""
    title = f"{_count(lengths.batch_size, 'request')}, {_count(lengths.rows, 'query token')}"
    launch, title = (settings, lengths, limits, sms), f"{title}, {lengths.total_kv} keys{pages}"
    return Asked(settings.features, load, launch, title, planned)


def schedule(plan: BatchSchedule[object]) -> str:
    """Tile of a plan, and its room for work items, cuts and partial results."""
    params, (items, merges, _) = plan.tiling.params, plan.room.capacity
    tile = f"{params.rows} packed rows ({_count(params.group_size, 'head')} of each token) x {params.cols} keys"
    lines, (workspace, _) = [f"  tile: {tile}"], plan.workspace()
    if not merges:
        return "\n".join((*lines, f"  {_count(items, 'work item')} x {params.num_kv_heads}, no query tile is cut"))
    lines.append(f"  at most {items} work items x {params.num_kv_heads}, {workspace / 2**20:.1f} MiB of workspace")
    return "\n".join((*lines, f"  the planner kernel may cut {_count(merges, 'query tile')}"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def tokens(options: argparse.Namespace) -> BatchLengths:
    """Lengths of the requests, checked as a plan checks them."""
    import numpy as np

    from cute_attn.problem import BatchLengths
    from cute_attn.request import batch_plan, checks
    from cute_attn.request.index_arrays import bounds, last_page_len
    from cute_attn.request.settings import MAX_INDEX, MAX_KV_LEN

    qo_lens, kv_lens = (_lengths(options, name) for name in ("qo_lens", "kv_lens"))
    if options.batch is not None and options.batch < 1:
        raise ArgumentError(f"--batch must be at least 1, got {options.batch}")
    count = options.batch if options.batch is not None else max(len(qo_lens or ()), len(kv_lens or ()), 1)
    qo_lens, kv_lens = qo_lens or [options.qo_len] * count, kv_lens or [options.kv_len] * count
    for name, lengths in (("--qo-lens", qo_lens), ("--kv-lens", kv_lens)):
        if len(lengths) != count:
            raise ArgumentError(f"{name} must have a length for each of {count} requests, got {len(lengths)}")
        checks.each_within(name, np.array(lengths), MAX_KV_LEN)
    kv_len, size = np.array(kv_lens), 1
    if options.page_size is not None:
        size = batch_plan.count("page_size", options.page_size)
    pages = -(-kv_len // size)
    q_bounds, kv_bounds = bounds(np.array(qo_lens)), bounds(pages)
    checks.increasing("the sum of --qo-lens", q_bounds, MAX_INDEX)
    checks.increasing("the number of keys or pages of --kv-lens", kv_bounds, MAX_INDEX)
    last = None if options.page_size is None else last_page_len(kv_len, pages, size)
    return BatchLengths(q_bounds, kv_bounds, kv_len, last_page_len=last)


def _lengths(options: argparse.Namespace, name: str) -> list[int] | None:
    text = getattr(options, name)
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ArgumentError(f"--{name.replace('_', '-')} must be integers with commas, got {text!r}") from error
