"""What `python -m cute_attn bench` runs, and its outputs: a table, JSON, CSV, PNG."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cute_attn.cli import Parser
from cute_attn.cli.terminal import table
from cute_attn.errors import ArgumentError
from perf import run as runner
from perf.bench import save
from perf.machine import module, why_no_gpu
from perf.report import markdown
from perf.rows import ANCHORS, CURVES, Section
from perf.warm import warm
from perf.workloads import BatchWorkload, one_request

SUMMARY_SECONDS = 400.0
LIBRARIES = {"flash-attn-4": "flash_attn", "FlashInfer": "flashinfer"}  # by the first word of a peer's name
ROUTINES = [f"Batch{kind}KVCacheWrapper" for kind in ("PrefillWithRagged", "PrefillWithPaged", "DecodeWithPaged")]
DTYPES = {"float16": "float16", "bfloat16": "bfloat16", "fp8_e4m3": "e4m3", "nvfp4": "nvfp4"}
PEERS = {
    "flash-attn-4": "flash-attn-4",
    "cudnn": "torch cuDNN",
    "flashinfer-fa2": "FlashInfer fa2",
    "flashinfer-fa3": "FlashInfer fa3",
    "flashinfer-xqa": "FlashInfer XQA",
}
OURS = ("auto", "fa2", "fa3", "fa4", "xqa")
FORMATS = (".json", ".csv", ".png")
COLUMNS = ("case_tag", "routine", "backend", "median_ms", "tflops", "gb_per_s", "share_of_ceiling", "error", "reason")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m cute_attn bench",
        description=(
            "Without --routine: the anchors of prefill and decode and speed over length and batch size, in under 8 "
            "minutes. With it: one kind of call; several values of --batch_size, --s_qo and --s_kv make a table. "
            "Flags are those of FlashInfer's benchmark. Every candidate is checked against a float64 reference before "
            "it is timed (--refcheck is always on), by CUDA graphs, in random order, with inputs beyond the L2."
        ),
    )
    parser.add_argument("--routine", choices=ROUTINES, metavar="NAME", help=f"one of {', '.join(ROUTINES)}")
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1], help="requests (default 1)")
    parser.add_argument("--s_qo", type=int, nargs="+", help="query tokens per request (default: 1, in prefill --s_kv)")
    parser.add_argument("--s_kv", type=int, nargs="+", default=[4096], help="keys per request (default 4096)")
    parser.add_argument("--num_qo_heads", type=int, default=32, help="query heads (default 32)")
    parser.add_argument("--num_kv_heads", type=int, default=8, help="kv heads (default 8)")
    parser.add_argument("--head_dim_qk", type=int, default=128, help="head dimension of q and k (default 128)")
    parser.add_argument("--head_dim_vo", type=int, help="head dimension of v (default, and in batches: --head_dim_qk)")
    parser.add_argument("--page_size", type=int, default=16, help="tokens per page of paged caches (default 16)")
    parser.add_argument("--q_dtype", choices=list(DTYPES)[:3], default="bfloat16", help="dtype of q (default bfloat16)")
    parser.add_argument("--kv_dtype", choices=DTYPES, help="dtype of k and v (default: --q_dtype)")
    parser.add_argument("--causal", action="store_true", help="causal mask of prefill")
    parser.add_argument("--window_left", type=int, default=-1, help="keys before a row's own (default -1: no window)")
    parser.add_argument("--sinks", action="store_true", help="one more term of the softmax per head")
    parser.add_argument("--random_actual_seq_len", action="store_true", help="random lengths up to --s_qo and --s_kv")
    parser.add_argument("--random_seed", type=int, default=42, help="seed of random lengths (default 42)")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=(*OURS, *PEERS),
        metavar="NAME",
        default=["auto", *PEERS],
        help=f"ours: {', '.join(OURS)}; others: {', '.join(PEERS)} (default: auto and the others)",
    )
    parser.add_argument("--refcheck", action="store_true", help="always on: wrong results are never timed")
    parser.add_argument("--num_iters", type=int, help="timed rounds (default 21; curves 7)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="fewer rounds where time gets short")
    parser.add_argument("--warm_peers", action="store_true", help="first build FlashInfer's modules (minutes, nvcc)")
    parser.add_argument("--case_tag", default="", help="a word for the outputs")
    parser.add_argument(
        "--output_path",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="files that are written after the run: .json, .csv, or .png (needs matplotlib, the extra `bench`)",
    )
    options, unknown = parser.parse_known_args(argv)
    parser.refuse(unknown)
    for path in options.output_path:
        if path.suffix not in FORMATS:
            raise ArgumentError(f"--output_path must end in {', '.join(FORMATS)}, got {path}")
    return options


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that the command line asks for. Returns 0, or 2 with what is missing on stderr."""
    options = parse(argv)
    chosen = chosen_sections(options)
    rows = [w for section in chosen.values() for w in section.workloads]
    names = [PEERS[name] for name in options.backends if name in PEERS]
    if lines := missing(options, names):
        print("\n".join(lines), file=sys.stderr)
    if why_no_gpu():
        print(f"Nothing was measured; {len(rows)} rows would have been.", file=sys.stderr)
        return 2
    if options.warm_peers:
        warm(rows, names)
    budget = options.budget or (None if options.routine else SUMMARY_SECONDS)
    settings = argparse.Namespace(budget=budget, rounds=options.num_iters, peers=names, out=None, resume=False)
    record = runner.run("bench", chosen, settings)
    record["command"] = " ".join(["python -m cute_attn", *sys.argv[1:]])
    print(text(record))
    for path in options.output_path:
        write(record, path, options.case_tag, options.routine or "")
    return 0


def chosen_sections(options: argparse.Namespace) -> dict[str, Section]:
    """Returns the section of the routine, or those of the summary."""
    if options.routine:
        ours = tuple(name for name in options.backends if name in OURS)
        return {"bench": Section(workloads(options), ours)}
    return {**{name: ANCHORS[name] for name in ("prefill", "decode")}, **CURVES}


def workloads(options: argparse.Namespace) -> list[BatchWorkload]:
    """Returns a problem for every batch size and length of the options."""
    decode = "Decode" in options.routine
    found: list[BatchWorkload] = []
    for batch_size, s_kv in itertools.product(options.batch_size, options.s_kv):
        for s_qo in options.s_qo or ([1] if decode else [s_kv]):
            if min(batch_size, s_kv, s_qo) < 1:
                raise ArgumentError("--batch_size, --s_qo and --s_kv must be at least 1")
            found.append(_workload(options, batch_size, s_qo, s_kv))
    return found


def _workload(options: argparse.Namespace, batch_size: int, s_qo: int, s_kv: int) -> BatchWorkload:
    decode, ragged = "Decode" in options.routine, "Ragged" in options.routine
    q_dtype, kv_dtype = DTYPES[options.q_dtype], DTYPES[options.kv_dtype or options.q_dtype]
    heads = options.num_qo_heads, options.num_kv_heads
    qk, vo = options.head_dim_qk, options.head_dim_vo or options.head_dim_qk
    if qk != vo:
        if batch_size > 1 or not ragged or kv_dtype != q_dtype or options.window_left >= 0 or options.sinks:
            raise ArgumentError("--head_dim_vo other than --head_dim_qk is measured for one plain ragged request")
        return one_request(s_qo, s_kv, *heads, qk, vo, options.causal, q_dtype)
    lengths = (s_qo,) * batch_size, (s_kv,) * batch_size
    if options.random_actual_seq_len:
        lengths = _random_lengths(options.random_seed, batch_size, s_qo, s_kv)
    causal = s_qo > 1 if decode else options.causal
    page_size, window = 0 if ragged else options.page_size, options.window_left
    try:
        return BatchWorkload(*lengths, *heads, qk, page_size, causal, q_dtype, kv_dtype, window, options.sinks)
    except ValueError as error:
        raise ArgumentError(f"--window_left of a prefill needs --causal: {error}") from error


def _random_lengths(seed: int, batch_size: int, s_qo: int, s_kv: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns lengths up to the given ones; those of keys are not below those of queries."""
    draw = random.Random(seed)
    qo = [draw.randint(1, s_qo) for _ in range(batch_size)]
    kv = qo if s_qo == s_kv else [draw.randint(min(own, s_kv), s_kv) for own in qo]
    return tuple(qo), tuple(kv)


def missing(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Returns what this machine lacks of what was asked for, one line each."""
    lines = []
    if absent := why_no_gpu():
        lines.append(f"No GPU to measure on: {absent}.")
    for first, package in LIBRARIES.items():
        if any(name.startswith(first) for name in names) and importlib.util.find_spec(package) is None:
            lines.append(f"Without {first}: {package} is not installed.")
    if any(path.suffix == ".png" for path in options.output_path) and importlib.util.find_spec("matplotlib") is None:
        lines.append("Without pictures: matplotlib is not installed (pip install matplotlib).")
    return lines


def text(record: Mapping[str, Any]) -> str:
    """Returns the tables of a run, their columns aligned for a terminal."""
    parts = markdown(record).strip().split("\n\n")
    return "\n\n".join(_aligned(part) if part.startswith("|") else part for part in parts)


def _aligned(text: str) -> str:
    header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return table(header, lines)


def write(record: Mapping[str, Any], path: Path, tag: str, routine: str) -> None:
    """Writes a file in the format that its name asks for."""
    if path.suffix == ".json":
        save(record, path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*COLUMNS, "problem"])
            writer.writeheader()
            writer.writerows(csv_lines(record, tag, routine))
    else:
        module("matplotlib")
        from perf.pictures import bars

        bars(record, path)


def csv_lines(record: Mapping[str, Any], tag: str, routine: str) -> list[dict[str, Any]]:
    """Returns one line per row and candidate."""
    lines = []
    for row in record["rows"]:
        for name, entry in row["candidates"].items():
            named = {"TFLOP/s": "tflops", "GB/s": "gb_per_s"}[row["unit"]]
            columns = {named: "speed", "share_of_ceiling": "share", "error": "error", "reason": "reason"}
            found = {column: entry.get(key, "") for column, key in columns.items()}
            found["median_ms"] = entry["median_us"] / 1e3 if "median_us" in entry else ""
            where = {"case_tag": tag, "routine": routine or row.get("section", ""), "problem": row["name"]}
            lines.append({**where, "backend": name, **found})
    return lines
