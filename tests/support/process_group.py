"""Runs cases on the ranks of a process group, each rank a process on this machine: gloo on CPUs, NCCL on GPUs.

`run` starts one fresh interpreter, which imports everything once and then forks the ranks: imports cost seconds. CUDA
does not survive a fork: ranks on GPUs import for themselves. A rank stops at its first failure, and the others at what
they then miss; later cases count as not run.
"""

from __future__ import annotations

import datetime
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support import subprocesses

PASSED = "passed"
SECONDS = 120  # that a rank waits for another one

Case = Callable[[torch.device], None]  # called by every rank


def run(module: str, world_size: int, device_type: str) -> dict[str, str]:
    """Run what `cases` of a module returns; return what became of each: PASSED, or tracebacks by rank."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"{module!r}, {world_size}, {device_type!r}, {folder!r}"
        code = f"from tests.support import process_group; process_group.start_ranks({arguments})"
        done = subprocesses.python("-c", code, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    assert len(reports) == world_size, done.stderr
    names = list(dict.fromkeys(name for report in reports for name in report))
    return {name: _outcome([report.get(name, "not run") for report in reports]) for name in names}


def _outcome(by_rank: list[str]) -> str:
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if text != PASSED]
    return "\n".join(failed) or PASSED


def start_ranks(module: str, world_size: int, device_type: str, folder: str) -> None:
    """Start the ranks and wait for them. Called in an interpreter of its own."""
    importlib.import_module(module)
    context = multiprocessing.get_context("spawn" if device_type == "cuda" else "fork")
    arguments = (module, world_size, device_type, folder)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def _rank(rank: int, module: str, world_size: int, device_type: str, folder: str) -> None:
    cases: Mapping[str, Case] = importlib.import_module(module).cases(device_type)
    torch.set_num_threads(1)
    device = torch.device(device_type)
    if device_type == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not to be had on every host
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    report = dict.fromkeys(cases, "not run")
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    for name, case in cases.items():
        try:
            case(device)
            report[name] = PASSED
        except BaseException:
            report[name] = traceback.format_exc()
            break
    Path(folder, f"rank{rank}.json").write_text(json.dumps(report))
    if all(text == PASSED for text in report.values()):
        dist.destroy_process_group()
    sys.exit()
