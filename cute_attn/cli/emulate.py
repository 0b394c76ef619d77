"""`emulate`: runs one problem on the emulator, from the PTX that a GPU would run; counts, times and draws it."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_attn.cli.explain import add_request, check_sizes
from cute_attn.cli.replay import TOLERANCE, errors
from cute_attn.cli.terminal import table
from cute_attn.errors import ArgumentError
from cute_attn.runtime import arch as archs

if TYPE_CHECKING:
    import torch

    from cute_attn.emulator.settings import Record

DTYPES = "float16", "bfloat16"
TOP = 12  # most frequent instructions that are listed


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "emulate",
        help="run one problem on the emulator: check it, count instructions, draw a timeline",
        description="Exits 0 if no check fails and the result is that of the reference, else 1.",
    )
    parser.add_argument(
        "--arch", default="sm_90a", help=f"one of {', '.join(archs.ARCHS)}, or a GPU's name (default sm_90a)"
    )
    parser.add_argument(
        "--kernels",
        choices=("auto", "fa2", "fa3", "fa4", "xqa"),
        default="auto",
        help="kernels to run (default auto: what such a GPU runs)",
    )
    add_request(parser, qo_len=128, kv_len=256, num_qo_heads=1, num_kv_heads=1, head_dim=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of all tensors (default bfloat16)")
    parser.add_argument(
        "--schedule",
        choices=("eager", "delayed", "adversarial", "lagging"),
        default="eager",
        help="order in which warps run and asynchronous operations complete (default eager)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs and of the schedule (default 0)")
    parser.add_argument(
        "--timeline",
        type=Path,
        help="write a timeline of what each warp waited for: HTML, or for a name in .svg a picture of the first launch",
    )
    parser.add_argument("--trace", type=Path, help="write one line per basic block that a warp ran")


def run(options: argparse.Namespace) -> int:
    from cute_attn.emulator import EmulatorError, Schedule, timeline, using

    options.arch = archs.of_gpu(options.arch).name
    check_sizes(options)
    for name in ("timeline", "trace"):  # found out before the work, not after it
        path = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise ArgumentError(f"--{name} {path}: there is no folder {path.parent}")
    schedule = Schedule(options.schedule, options.seed)
    events = options.timeline is not None or options.trace is not None
    with using(options.arch, schedule=schedule, events=events, kernels=options.kernels) as emulation:
        start = time.perf_counter()
        try:
            error = max_error(options)
        except EmulatorError as err:
            print(f"error found by the emulator: {err}")
            return 1
        seconds = time.perf_counter() - start
    for record in emulation.records:
        stats = record.stats
        print(f"{record.symbol} on {record.arch}, grid {' x '.join(map(str, record.grid))}:")
        print(f"  {stats.warp_instructions} warp instructions, virtual time {stats.cycles:.0f}, {record.seconds:.2f} s")
        print("  " + table(("instruction", "warps"), stats.instructions.most_common(TOP)).replace("\n", "\n  ") + "\n")
    accurate = error <= TOLERANCE[options.dtype]
    print(f"{seconds:.2f} s; largest error against fp64 {error:.1e}: {'ok' if accurate else 'WRONG'}")
    if options.timeline is not None:
        options.timeline.write_text(drawn(emulation.records, options.timeline.suffix == ".svg"))
    if options.trace is not None:
        options.trace.write_text("".join(timeline.trace(r.stats.events) for r in emulation.records))
    return 0 if accurate else 1


def drawn(records: Sequence[Record], svg: bool) -> str:
    """Draws timelines: of the first launch as SVG, or of all launches as HTML."""
    from cute_attn.emulator import timeline

    if svg:
        return timeline.drawing(records[0].stats.events, barrier_names(records[0])) + "\n"
    titles = [f"{r.symbol} on {r.arch}, grid {' x '.join(map(str, r.grid))}" for r in records]
    pages = zip(records, titles, strict=True)
    return "".join(timeline.picture(r.stats.events, title, barrier_names(r)) for r, title in pages)


def barrier_names(record: Record) -> dict[int, str]:
    """Returns names of mbarriers by address in shared memory: "k full 0". Empty for families without rings."""
    from cute_attn.emulator.memory import SHARED_START
    from cute_attn.kernels.catalog import from_dict
    from cute_attn.kernels.fa3.smem import HopperMemory
    from cute_attn.kernels.fa4.smem import BlackwellMemory

    layouts: dict[str, Any] = {"fa3": HopperMemory, "fa4": BlackwellMemory}
    layout = layouts.get(record.spec["kernel"])
    if layout is None:
        return {}
    smem = layout.of(from_dict(record.spec))
    found = {}
    for ring in smem.rings:
        names = [f"{ring.name} {state} {stage}" for state in ("full", "empty") for stage in range(ring.stages)]
        for i, name in enumerate(names):
            found[SHARED_START + smem.barriers(ring.name) + i * ring.barrier_bytes // len(names)] = name
    return found


def max_error(options: argparse.Namespace) -> float:
    """Solves the problem; returns the largest error relative to 1 + |output|, infinite if only one output is a NaN."""
    import torch

    from cute_attn import single_prefill_with_kv_cache

    generator = torch.Generator().manual_seed(options.seed)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        shape = (tokens, heads, options.head_dim)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return numbers.to(getattr(torch, options.dtype))

    kv = options.kv_len, options.num_kv_heads
    run = functools.partial(
        single_prefill_with_kv_cache,
        *(normal(options.qo_len, options.num_qo_heads), normal(*kv), normal(*kv)),
        causal=options.causal,
        window_left=options.window_left,
        logits_soft_cap=options.logits_soft_cap,
        pos_encoding_mode=options.pos_encoding_mode,
        return_lse=True,
    )
    out, _ = run(backend="emulator")
    truth, _ = run(backend="reference", o_dtype=torch.float32)
    return errors(out, truth)[1]
