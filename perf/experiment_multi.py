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

def T(rows, cols, stages=2, q=1, pp=False, sm=1, c=1, qc=0):
    return HopperTile(rows, cols, stages, q, ping_pong=pp, per_sm=sm, ctas=c, q_columns=qc)

MB = 1 << 20
D256 = [T(256,64,c=2), T(256,80,c=2), T(128,80), T(256,48,3,c=2), T(256,64,pp=True,c=2), T(128,64,qc=1), T(128,64,qc=2), T(256,64,c=2,qc=2), T(256,80,c=2,qc=1), T(256,48,3,c=2,qc=2)]
D128L = [T(256,128,2,2,c=2), T(256,128,2,2,pp=True,c=2), T(256,160,c=2), T(256,176,c=2), T(192,80,3,pp=True), T(384,64,4,pp=True,c=2), T(128,128,2,2,qc=2), T(128,144,qc=2), T(256,128,2,2,c=2,qc=2), T(256,160,c=2,qc=1), T(256,144,c=2,qc=2), 8*MB, 16*MB]
D128S = [T(256,128,2,2,c=2), T(64,64,sm=2), T(64,80,sm=2), T(64,96,sm=2), T(128,80,sm=2,c=2), T(128,96,sm=2,c=2), T(128,64,4,2), T(128,96,2,2), T(192,80,3,pp=True), T(128,128,2,2,qc=2), T(64,80,sm=2,qc=2), T(128,96,sm=2,c=2,qc=2)]
D64S = [T(128,128,3,2,pp=True), T(128,128,3,2), T(192,96,3,2,pp=True), T(192,64,4,2,pp=True), T(64,64,3,2,sm=3), T(64,128,sm=2), T(64,96,sm=3), T(128,64,4,2,pp=True), T(128,128,3,2,pp=True,qc=1), T(64,64,3,2,sm=3,qc=1)]
ROWS = [
    (equal(1,16384,16384,(8,8),256,causal=False), D256, True),
    (equal(1,1000,1000,(32,8),128,causal=True), D128S, True),
    (equal(1,16384,16384,(32,8),128,causal=False), D128L, True),
    (equal(4,4096,4096,(8,8),256,causal=False), D256, False),
    (equal(16,1024,1024,(32,32),64,causal=True), D64S, False),
    (equal(16,1024,1024,(16,16),128,causal=True), D128S, False),
    (equal(1,16384,16384,(8,8),256,causal=True), D256, False),
    (equal(1,16384,16384,(32,8),128,causal=True), D128L, False),
]

def default(dim):
    return tiles.choose((dim, dim), True, "dense")

def bind(what, w, sets):
    tile = what if isinstance(what, HopperTile) else default(w.head_dim)
    section = what if isinstance(what, int) else variant.SECTION_BYTES
    tiling.cache_clear()
    try:
        with mock.patch.object(variant.PersistentKernels, "tile", return_value=tile), mock.patch.object(variant, "SECTION_BYTES", section):
            return batch_peers.ours("fa3", w, sets)
    finally:
        tiling.cache_clear()

def name(what):
    if isinstance(what, int):
        return f"default, section {what // MB} MiB"
    return f"{what.rows}x{what.cols} st{what.stages} q{what.q_stages}" + " pp" * what.ping_pong + f" sm{what.per_sm}" * (what.per_sm > 1) + f" qregs{what.q_columns}" * (what.q_columns > 0) + " PAIR" * (what.ctas > 1)

def main():
    compile_only = "--compile" in sys.argv
    specs = {}
    for w, table, _ in ROWS:
        for what in [default(w.head_dim), *table]:
            if isinstance(what, HopperTile):
                specs[w.head_dim, what] = Fa3Spec("bfloat16", "bfloat16", w.head_dim, w.head_dim, schedule="items", tile=what)
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
    if "--smoke" in sys.argv:
        for w in (equal(2,700,700,(4,2),256,causal=True), equal(2,1000,1000,(4,2),128,causal=True), equal(2,3000,3000,(8,8),128,causal=False)):
            sets = [w.inputs(device, 0)]
            for tile in dict.fromkeys(what for _, table, _ in ROWS for what in table if isinstance(what, HopperTile) and what.ctas > 1):
                if (w.head_dim, tile) in specs and (w.head_dim, tile) not in bad:
                    _, entries = bench.prepare(w, {"x": functools.partial(bind, tile)}, sets)
                    torch.cuda.synchronize()
                    print("smoke", w.name, name(tile), entries["x"], flush=True)
        return
    import subprocess
    try:
        smoke = subprocess.run([sys.executable, __file__, "--smoke"], timeout=50, capture_output=True, text=True)
        print("\n".join(smoke.stdout.splitlines()[1:]), smoke.stderr[-600:] if smoke.returncode else "")
        pairs_work = smoke.returncode == 0
    except subprocess.TimeoutExpired as hung:
        print("SMOKE HANGS:", (hung.stdout or b"")[-1500:])
        pairs_work = False
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    print(torch.cuda.get_device_name(0))
    winners, winner_binds = {}, {}
    for w, table, peer in ROWS:
        if time.monotonic() - START > LIMIT:
            print("no time for", w.name)
            continue
        sets = [w.inputs(device, seed) for seed in range(w.num_sets(l2))]
        base = default(w.head_dim)
        binds = {"default": functools.partial(bind, base)}
        for what in table:
            if not isinstance(what, HopperTile) or ((w.head_dim, what) not in bad and (pairs_work or what.ctas == 1)):
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
        binds = {"default": functools.partial(bind, default(w.head_dim)), "best " + winners[w]: winner_binds[w], "FA4": batch_peers.flash_attention_4}
        calls, entries = bench.prepare(w, binds, sets)
        m = measure(calls, CudaGraphTimer(), 7)
        print(w.name, {n: round(w.metric.value(t.median_us), 1) if not isinstance(t, str) else t for n, t in m.timings.items()}, f"{time.monotonic() - START:.0f} s", entries["FA4"].get("reason", ""), flush=True)
        del sets, calls, m
        torch.cuda.empty_cache()


main()
