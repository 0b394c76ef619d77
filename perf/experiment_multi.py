"""Variants of fa3's tiles on the last prefill rows. Prints TFLOP/s (median) and the ratio to the default."""

import dataclasses, functools, os, sys, time

START = time.monotonic()
LIMIT = float(os.environ.get("EXP_SECONDS", "100"))
from unittest import mock
import torch
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.host.persistent import variant
from cute_attn.kernels.host.persistent.batch import tiling
from cute_attn.kernels.programs import program
from cute_attn.runtime import artifacts
from cute_attn.runtime.artifact import Artifact
from cute_attn.kernels.fa3 import tiles
from perf import batch_peers, bench, search
from perf.batch_workloads import equal
from perf.harness import CudaGraphTimer, measure


def T(rows, cols, stages=2, q=1, pp=False, sm=1, qr=False):
    return HopperTile(rows, cols, stages, q, ping_pong=pp, per_sm=sm, q_registers=qr)


OLD = {64: T(192, 128, 3, 2, pp=True), 128: T(128, 128, 2, 2), 256: T(128, 64)}
NARROW = {64: T(64, 64, 3, 2, sm=3), 128: T(64, 64, sm=2)}
LONG = [
    T(192, 80, 3, pp=True),
    T(192, 80, 3, 2, pp=True),
    T(192, 80, 4, pp=True),
    T(192, 80, 3),
    T(192, 64, 4, pp=True),
    T(192, 64, 4, 2, pp=True),
]
L2 = LONG[:1] + LONG[4:5]
S64 = [T(64, 64, 3, 2, sm=3, qr=True), T(64, 64, 4, 2, sm=3, qr=True)]
F128 = [T(64, 64, sm=2), T(64, 64, 2, 2, sm=2), T(64, 64, sm=2, qr=True)]
ROWS = [
    (equal(4, 4096, 4096, (32, 8), 128, causal=True), LONG, False),
    (equal(4, 4096, 4096, (32, 8), 128, causal=False), LONG, False),
    (equal(16, 1024, 1024, (32, 32), 64, causal=True), S64, True),
    (equal(1, 1000, 1000, (32, 8), 128, causal=True), F128, True),
    (equal(1, 16384, 16384, (32, 8), 128, causal=True), LONG, True),
    (equal(4, 4096, 4096, (16, 16), 128, causal=True), L2, False),
    (equal(16, 1024, 1024, (32, 32), 64, causal=False), S64, False),
    (equal(4, 4096, 4096, (32, 32), 64, causal=True), S64[:1], False),
    (equal(1, 1000, 1000, (32, 8), 128, causal=False), F128[:1], False),
    (equal(1, 512, 512, (32, 8), 128, causal=True), F128[:1], False),
    (equal(1, 2048, 2048, (32, 8), 128, causal=True), [*F128[:1], *L2], False),
    (equal(1, 1000, 1000, (32, 32), 64, causal=True), S64[:1], False),
    (equal(4, 4096, 4096, (64, 8), 64, causal=True, window_left=127, sinks=True), S64[:1], False),
    (equal(4, 4096, 4096, (32, 8), 128, causal=True, window_left=127), [F128[2]], False),
    (equal(8, 2048, 2048, (64, 8), 128, causal=True), L2, False),
    (equal(1, 16384, 16384, (16, 16), 128, causal=False), L2, False),
    (equal(1, 16384, 16384, (32, 8), 128, causal=False), L2, False),
]


def default(w):
    return (OLD if w.window_left < 0 else NARROW)[w.head_dim]


def bind(what, w, sets):
    tile = what if isinstance(what, HopperTile) else default(w)
    section = what if isinstance(what, int) else variant.SECTION_BYTES
    tiling.cache_clear()
    try:
        with (
            mock.patch.object(variant.PersistentKernels, "tile", return_value=tile),
            mock.patch.object(variant, "SECTION_BYTES", section),
        ):
            return batch_peers.ours("fa3", w, sets)
    finally:
        tiling.cache_clear()


def name(what):
    if isinstance(what, int):
        return f"default, section {what // MB} MiB"
    return (
        f"{what.rows}x{what.cols} st{what.stages} q{what.q_stages}"
        + " pp" * what.ping_pong
        + f" sm{what.per_sm}" * (what.per_sm > 1)
        + " qregs" * what.q_registers
    )


def main():
    compile_only = "--compile" in sys.argv
    specs = {}
    for w, table, _ in ROWS:
        for what in [default(w), *table]:
            if isinstance(what, HopperTile):
                specs[w.head_dim, w.window_left >= 0, what] = Fa3Spec(
                    "bfloat16",
                    "bfloat16",
                    w.head_dim,
                    w.head_dim,
                    schedule="items",
                    mask="band" if w.window_left >= 0 else "stop",
                    tile=what,
                )
    made = artifacts.get_many({"sm_90a": list(specs.values())}, program)
    bad = set()
    for key, spec in specs.items():
        a = made["sm_90a", spec]
        if not isinstance(a, Artifact) or a.stack_bytes:
            bad.add(key)
            print("left out", key, a.stack_bytes if isinstance(a, Artifact) else str(a)[-300:])
    print(f"compiled {len(specs)} kernels, {time.monotonic() - START:.1f} s", flush=True)
    if compile_only:
        return
    device = torch.device("cuda")
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    print(torch.cuda.get_device_name(0))
    winners, winner_binds = {}, {}
    for w, table, peer in ROWS:
        if time.monotonic() - START > LIMIT:
            print("no time for", w.name)
            continue
        sets = [w.inputs(device, seed) for seed in range(w.num_sets(l2))]
        base = default(w)
        binds = {"default": functools.partial(bind, base)}
        for what in table:
            if not isinstance(what, HopperTile) or (w.head_dim, w.window_left >= 0, what) not in bad:
                binds[name(what)] = functools.partial(bind, what)
        calls, entries = bench.prepare(w, binds, sets)
        m = measure(calls, CudaGraphTimer(), 7 if w.qo_lens[0] > 8000 else 11)
        speed = {n: w.metric.value(t.median_us) for n, t in m.timings.items() if not isinstance(t, str)}
        print(f"{w.name}   [{m.sm_clock_mhz} MHz, {time.monotonic() - START:.0f} s]")
        for n in binds:
            if n in speed:
                t = m.timings[n]
                print(f"   {speed[n]:7.1f}  {speed[n] / speed['default']:.3f}  ({t.p20_us:.1f}-{t.p80_us:.1f} us)  {n}")
            else:
                print(f"   excluded {n}: {entries[n].get('reason') or m.timings.get(n)}")
        sys.stdout.flush()
        if peer:
            winners[w] = max(speed, key=speed.__getitem__)
            winner_binds[w] = binds[winners[w]]
        del sets, calls, m
        torch.cuda.empty_cache()
    if not os.environ.get("PEERS"):
        return
    for w in winners:
        if time.monotonic() - START > LIMIT - 8:
            break
        sets = [w.inputs(device, seed) for seed in range(w.num_sets(l2))]
        binds = {
            "default": functools.partial(bind, default(w)),
            "best " + winners[w]: winner_binds[w],
            "FA4": batch_peers.flash_attention_4,
        }
        calls, entries = bench.prepare(w, binds, sets)
        m = measure(calls, CudaGraphTimer(), 7)
        print(
            w.name,
            {n: round(w.metric.value(t.median_us), 1) if not isinstance(t, str) else t for n, t in m.timings.items()},
            f"{time.monotonic() - START:.0f} s",
            entries["FA4"].get("reason", ""),
            flush=True,
        )
        del sets, calls, m
        torch.cuda.empty_cache()


main()
