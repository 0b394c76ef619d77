"""`explain` of a batch: what its wrapper would plan."""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING

from cute_attn.errors import ArgumentError
from cute_attn.runtime.arch import Arch

if TYPE_CHECKING:
    from cute_attn.kernels.host.batch import BatchSchedule
    from cute_attn.problem import BatchLengths, Settings

WORKSPACE_BYTES = 128 << 20  # what callers are told to bring


def wanted(options: argparse.Namespace) -> bool:
    given = options.batch, options.qo_lens, options.kv_lens, options.page_size
    return any(value is not None for value in given)


def run(options: argparse.Namespace, arch: Arch | None, sms: int) -> int:
    """Exit codes as those of single requests."""
    from cute_attn.cli import explain
    from cute_attn.dispatch import select
    from cute_attn.dispatch.families import FAMILIES
    from cute_attn.problem import BatchLimits
    from cute_attn.schedule import batch as batch_schedule

    batch = tokens(options)
    q_len = newest(options, batch)
    settings = described(options, q_len is not None, on_gpu=arch is not None)
    limits = BatchLimits(WORKSPACE_BYTES, max_qo_len=q_len)
    features = settings.features
    qo_len = batch_schedule.typical_qo_len(batch, limits)
    load = select.load_of(settings, qo_len, batch.batch_size)
    keys = f"{batch.total_kv} keys"
    where = f"{keys} in pages of {options.page_size}" if options.page_size else keys
    on = f"on {sms} multiprocessors of {arch and arch.name}"

    def launches() -> explain.Planned:
        assert arch is not None
        backend = select.choose(features, "auto", arch, load)
        plan, found = FAMILIES[backend.name].batch_launches(settings, batch, limits, arch, sms)
        return schedule(plan) if plan else "  no schedule: CTAs find equal shares of all keys", found

    count = f"{_count(batch.batch_size, 'request')}, {_count(batch.rows, 'query token')}"
    title = f"{count}, {where} {on}"
    return explain.answer(options, features, arch, load, title, launches)


def schedule(plan: BatchSchedule[object]) -> str:
    """Tile, work items, cuts and workspace of a plan."""
    from cute_attn.schedule.records import Item, Merge

    work, params = plan.work, plan.tiling.params
    begin, end = (work.items[:, Item._fields.index(name)] for name in ("kv_begin", "kv_end"))
    splits = work.merges[:, Merge._fields.index("num_splits")]
    longest = int((end - begin).max(initial=0))
    lines = [
        f"  tile: {params.rows} packed rows ({_count(params.group_size, 'head')} of each token) x {params.cols} keys",
        f"  {_count(len(work.items), 'work item')} x {params.num_kv_heads}, the longest of {longest} keys",
    ]
    if len(splits) == 0:
        return "\n".join((*lines, "  no query tile is cut"))
    fewest, most = int(splits.min()), int(splits.max())
    cut = f"{_count(len(splits), 'query tile')} cut into {fewest if fewest == most else f'{fewest} to {most}'} splits"
    workspace, _ = plan.workspace()
    return "\n".join((*lines, f"  {cut}: {work.num_partials} partials, {workspace / 2**20:.1f} MiB of workspace"))


def newest(options: argparse.Namespace, batch: BatchLengths) -> int | None:
    """Query tokens of every request, if a decode wrapper could plan this."""
    from cute_attn.dispatch import select

    q_len, heads = batch.equal_qo, (options.num_qo_heads, options.num_kv_heads)
    if q_len is None or options.page_size is None or options.custom_mask:
        return None
    return q_len if select.are_newest(q_len, heads, options.causal) else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def tokens(options: argparse.Namespace) -> BatchLengths:
    """Lengths of the requests, checked as a plan checks them."""
    import torch

    from cute_attn.request import batch_plan
    from cute_attn.request.index_arrays import IndexArrays

    qo_lens, kv_lens = (_lengths(options, name) for name in ("qo_lens", "kv_lens"))
    if options.batch is not None and options.batch < 1:
        raise ArgumentError(f"--batch must be at least 1, got {options.batch}")
    count = options.batch if options.batch is not None else max(len(qo_lens or ()), len(kv_lens or ()), 1)
    qo_lens, kv_lens = qo_lens or [options.qo_len] * count, kv_lens or [options.kv_len] * count
    for name, lengths in (("--qo-lens", qo_lens), ("--kv-lens", kv_lens)):
        if len(lengths) != count:
            raise ArgumentError(f"{name} must have a length for each of {count} requests, got {len(lengths)}")

    def bounds(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64, device="cpu")

    if options.page_size is None:
        return IndexArrays(("qo_indptr", "kv_indptr"), bounds(qo_lens), bounds(kv_lens)).on_host()
    size = batch_plan.count("page_size", options.page_size)
    pages = [-(-n // size) for n in kv_lens]
    tails = [n - (count - 1) * size if count else 0 for n, count in zip(kv_lens, pages, strict=True)]
    last = torch.tensor(tails, dtype=torch.int64, device="cpu")
    indices = torch.arange(sum(pages), device="cpu")
    names = ("--qo-lens", *["--kv-lens"] * 3)
    return IndexArrays(names, bounds(qo_lens), bounds(pages), indices, last, size).on_host()


def _lengths(options: argparse.Namespace, name: str) -> list[int] | None:
    text = getattr(options, name)
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ArgumentError(f"--{name.replace('_', '-')} must be integers with commas, got {text!r}") from error


def described(options: argparse.Namespace, decode: bool, on_gpu: bool) -> Settings:
    """Settings of the plan that the options describe."""
    import torch

    from cute_attn.request import batch_plan

    kv_dtype = "uint8" if options.kv_dtype == "nvfp4" else options.kv_dtype
    planned = batch_plan.PlanOptions(
        *(options.num_qo_heads, options.num_kv_heads, options.head_dim, options.head_dim_vo),
        *(options.dtype, kv_dtype, options.o_dtype, options.pos_encoding_mode, options.causal),
        *(options.window_left, options.logits_soft_cap),
    )
    settings = batch_plan.plan_settings(
        planned,
        options.kv_layout,
        options.page_size or 1,
        device=torch.device("cpu"),
        kv_source="ragged" if options.page_size is None else "paged",
        custom_mask=options.custom_mask,
        decode=decode,
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    return settings._replace(features=settings.features._replace(device=device, sinks=options.sinks))
