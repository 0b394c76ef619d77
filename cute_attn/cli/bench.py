"""`bench`: times our kernels and those of other libraries on this machine's GPU.

The benchmarks are the folder `perf` of a checkout, not part of the package: they know other libraries, and installing
cute_attn should not bring them along.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import cute_attn
from cute_attn.errors import ArgumentError, ArtifactError

ROUTINES = {
    "BatchPrefillWithRaggedKVCacheWrapper": "prefill",
    "BatchPrefillWithPagedKVCacheWrapper": "prefill",
    "BatchDecodeWithPagedKVCacheWrapper": "decode",
}
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


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time our kernels beside other libraries (needs a GPU and a checkout)",
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


def run(options: argparse.Namespace) -> int:
    for path in options.output_path:
        if path.suffix not in FORMATS:
            raise ArgumentError(f"--output_path must end in {', '.join(FORMATS)}, got {path}")
    root = Path(cute_attn.__file__).parents[1]
    if not (root / "perf" / "command.py").exists():
        raise ArtifactError(
            f"the benchmarks are not part of the installed package, and {root} is not a checkout of it. Clone the "
            "repository and run `python -m cute_attn bench` in its folder"
        )
    if importlib.util.find_spec("perf") is None:
        sys.path.append(str(root))
    return int(importlib.import_module("perf.command").run(options))
