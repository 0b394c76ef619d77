"""Multi-item scoring beside FlashInfer's, and beside the same mask as a custom one: `python -m perf.multi_item`.

A request is a cached prefix and items of one length, each behind a delimiter, whose tokens are the queries.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import cute_attn
from cute_attn.reference.attention import Mask, attention
from perf.bench import save
from perf.check import TOLERANCE, checked_rows
from perf.harness import ROUNDS, Call, CudaGraphTimer, Timing, measure, reason
from perf.machine import command_line, environment, why_no_gpu
from perf.optional import flashinfer

HEADS, HEAD_DIM = (32, 8), 128
WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True)
class ItemWorkload:
    """Batch of equal requests of bf16 pages; every token behind the prefix is a query."""

    batch_size: int
    prefix_len: int
    items: int
    item_len: int  # tokens, without the delimiter
    page_size: int = 16

    @property
    def name(self) -> str:
        shape = f"d{HEAD_DIM} h{HEADS[0]}/{HEADS[1]} page{self.page_size} b{self.batch_size}"
        return f"{shape} prefix{self.prefix_len} items {self.items}x{self.item_len}"

    @property
    def positions(self) -> list[int]:
        return list(range(self.item_len + 1)) * self.items

    @property
    def qo_len(self) -> int:
        return len(self.positions)

    @property
    def kv_len(self) -> int:
        return self.prefix_len + self.qo_len

    def keep(self, device: torch.device) -> torch.Tensor:
        """Returns the boolean mask `[qo_len, kv_len]` of a request."""
        t = torch.tensor(self.positions, device=device)
        row, column = torch.meshgrid(*(torch.arange(n, device=device) for n in t.shape * 2), indexing="ij")
        own = (column <= row) & (column > row - t[:, None])
        return torch.cat((own.new_ones(self.qo_len, self.prefix_len), own), 1)

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Returns the arguments of `plan` that describe the items."""
        size = self.batch_size
        return {
            "prefix_len_ptr": torch.tensor([self.prefix_len] * size).to(torch.uint32).to(device),
            "token_pos_in_items_ptr": torch.tensor(self.positions * size).to(torch.uint16).to(device),
            "token_pos_in_items_len": self.qo_len,
            "max_item_len_ptr": torch.tensor([self.item_len] * size).to(torch.uint16).to(device),
        }


WORKLOADS = (
    ItemWorkload(1, 2048, 500, 15),
    ItemWorkload(4, 2048, 100, 40),
    ItemWorkload(16, 512, 50, 10),
    ItemWorkload(1, 16384, 100, 100),
    ItemWorkload(1, 1024, 8, 1000),
    ItemWorkload(4, 2048, 100, 40, page_size=1),
)


def bind(
    library: Any, w: ItemWorkload, arguments: dict[str, Any], tensors: tuple[torch.Tensor, ...], backend: str
) -> Call:
    """Returns a run of the paged prefill wrapper of `library`: FlashInfer or ours."""
    q, k, v, indices = tensors
    device = q.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    pages = len(indices) // w.batch_size
    qo_indptr, kv_indptr = (torch.arange(w.batch_size + 1, dtype=torch.int32) * n for n in (w.qo_len, pages))
    last = torch.full((w.batch_size,), (w.kv_len - 1) % w.page_size + 1, dtype=torch.int32)
    types = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    wrapper.plan(qo_indptr, kv_indptr, indices, last, *HEADS, HEAD_DIM, w.page_size, **types, **arguments)
    return functools.partial(wrapper.run, q, (k, v))


def inputs(w: ItemWorkload, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns q, k, v and page numbers in random order."""
    generator = torch.Generator(device).manual_seed(0)
    pages = -(-w.kv_len // w.page_size) * w.batch_size
    cache = pages, w.page_size, HEADS[1], HEAD_DIM
    shapes = (w.qo_len * w.batch_size, HEADS[0], HEAD_DIM), cache, cache
    q, k, v = (torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in shapes)
    return q, k, v, torch.randperm(pages, generator=generator, device=device, dtype=torch.int32)


def candidates(w: ItemWorkload, tensors: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], Call]]:
    """Returns what binds each candidate, by name."""
    device = tensors[0].device
    items = w.arguments(device)
    mask = {"custom_mask": w.keep(device).flatten().repeat(w.batch_size)}
    ours = functools.partial(bind, cute_attn, w, items, tensors)

    def theirs(backend: str) -> Call:
        return bind(flashinfer("flashinfer"), w, items, tensors, backend)

    return {
        "cute_attn": functools.partial(ours, "auto"),
        "cute_attn fa2": functools.partial(ours, "fa2"),
        "cute_attn custom_mask": functools.partial(bind, cute_attn, w, mask, tensors, "auto"),
        "flashinfer fa2": functools.partial(theirs, "fa2"),
        "flashinfer fa3": functools.partial(theirs, "fa3"),
    }


def error(w: ItemWorkload, tensors: tuple[torch.Tensor, ...], out: torch.Tensor) -> float:
    """Returns the root mean square of the difference to the fp64 reference, relative, for rows of the last request."""
    q, k, v, indices = tensors
    own = indices[-len(indices) // w.batch_size :].long()
    keys, values = (x[own].flatten(0, 1)[: w.kv_len] for x in (k, v))
    rows = torch.tensor(checked_rows(w.qo_len), device=q.device)
    expected, _ = attention(q[-w.qo_len :][rows], keys, values, mask=Mask(keep=w.keep(q.device)[rows]))
    difference = out[-w.qo_len :][rows].double() - expected
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(expected))


def measured(w: ItemWorkload, device: torch.device, rounds: int) -> dict[str, Any]:
    """Returns the record of a row: microseconds, or why there are none."""
    tensors = inputs(w, device)
    calls: dict[str, list[Call]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, make in candidates(w, tensors).items():
        try:
            call = make()
            entries[name] = {"error": error(w, tensors, call())}
            if not entries[name]["error"] <= TOLERANCE["bfloat16"]:
                raise ValueError(f"its error is {entries[name]['error']:.2g}")
        except Exception as failure:  # a failing peer must not end the run
            entries.setdefault(name, {})["reason"] = reason(failure)
        else:
            calls[name] = [call]
    for name, timing in measure(calls, CudaGraphTimer(), rounds).timings.items():
        entries[name] |= timing._asdict() if isinstance(timing, Timing) else {"reason": timing}
    return {"name": w.name, "workload": asdict(w), "candidates": entries}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.multi_item", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the record, written after every row")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"number of timed rounds (default {ROUNDS})")
    options = parser.parse_args()
    if absent := why_no_gpu():
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[dict[str, Any]] = []
    record = {"command": command_line("multi_item", sys.argv[1:]), "environment": environment(), "rows": rows}
    for w in WORKLOADS:
        rows.append(measured(w, device, options.rounds))
        cells = [
            f"{name} {entry['median_us']:.1f} us" if "median_us" in entry else f"{name} - ({entry['reason']})"
            for name, entry in rows[-1]["candidates"].items()
        ]
        print(f"{w.name}: {', '.join(cells)}", flush=True)
        if options.out:
            save(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
