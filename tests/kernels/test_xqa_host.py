"""The decode kernel's host code on CPU tensors, without a kernel: when it loads, and the parameters that it passes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn.emulator import using
from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.host import gpu as gpus
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.prepared import prepared as prepared_kernel
from cute_attn.kernels.rules import Rule
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.host import variant
from cute_attn.kernels.xqa.host.family import FAMILY, DecodeRun
from cute_attn.kernels.xqa.host.variant import launch_config
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec, is_head_dim
from cute_attn.problem import UNLIMITED, DecodeProblem, Extras, Features, Scratch, Settings
from cute_attn.runtime.arch import ARCHS, TYPICAL_SMS, Arch, for_capability, named
from cute_attn.runtime.counters import SEMAPHORES
from cute_attn.runtime.launch import CPU
from perf import rings
from tests.support import batch_case
from tests.support.batch_case import decode, heads
from tests.support.named_launches import NamedLaunch, recorded

BF16 = torch.bfloat16
GPU = Gpu(named("sm_90a"), CPU, 2)
FEATURES = Features(
    *(torch.device("cpu"), BF16, BF16, BF16, 4, 2, 64, 64), kv_source="paged", decode=True, device_lengths=True
)
MOST_SMS = {"sm_90a": 144, "sm_100a": 160, "sm_103a": 160, "sm_120a": 192}
BATCH = decode((40, 3), page_size=4, **heads(4, 2))


@pytest.fixture
def launches() -> Iterator[type[NamedLaunch]]:
    with recorded() as named:
        yield named


def plan() -> Any:
    inputs = batch_case.make(BATCH)
    with using("sm_90a", kernels="xqa", sms=2):
        made = batch_case.wrapper(BATCH, inputs.q.device, backend="emulator")
        made.plan(**batch_case.plan_arguments(BATCH, inputs))
    return made


def test_a_plan_loads_its_kernel(launches: type[NamedLaunch]) -> None:
    """The first run may be captured in a CUDA graph, where modules cannot be loaded."""
    made = plan()
    assert launches.loaded == [made._planned().launch.planned.config.spec]


def test_a_plan_without_its_kernel_leaves_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> None:
        raise RuntimeError("no kernel")

    uploads: list[Any] = []
    monkeypatch.setattr(gpus, "load", missing)
    monkeypatch.setattr("cute_attn.runtime.staging.Staging.upload", lambda staging, ints: uploads.append(ints))
    prepared_kernel.cache_clear()
    with pytest.raises(RuntimeError, match="no kernel"):
        plan()
    assert not uploads


CLUSTERS = (  # kv heads, requests, warps, CTAs of a cluster, whatever the keys are
    *((1, 1, 4, 8), (2, 1, 8, 6), (8, 1, 8, 6), (9, 1, 4, 8), (1, 2, 4, 8), (4, 3, 4, 8)),
    *((1, 13, 8, 6), (4, 4, 8, 6), (1, 17, 8, 4), (4, 6, 8, 4), (1, 25, 8, 2), (1, 64, 8, 2), (1, 65, 8, 1)),
)


@pytest.mark.parametrize(
    ("num_kv_heads", "requests", "warps", "size", "keys"),
    [
        *((*few, keys) for few in CLUSTERS for keys in (None, 8193)),
        *((8, 1, 4, 8, 8192), (8, 3, 4, 4, 1024), (8, 8, 4, 2, 1024)),
    ],
)
def test_few_segments_have_clusters(num_kv_heads: int, requests: int, warps: int, size: int, keys: int | None) -> None:
    settings = even_settings(BF16, num_kv_heads)
    ring, *_ = variant.rule_of(settings, GPU.arch, requests, 1, keys).value
    assert (ring.warps, ring.cluster_size) == (warps, size)


@pytest.mark.parametrize("kv_heads", [1, 4, 12])
@pytest.mark.parametrize("window", [-1, 100, 600])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_80"])
def test_one_request_follows_its_rule_whatever_its_keys(arch: str, window: int, kv_heads: int) -> None:
    """A schedule serves all numbers of keys for which one rule holds: those around every number that a rule names."""
    gpu, settings = Gpu(named(arch), CPU, 132), even_settings(BF16, kv_heads)._replace(window_left=window)
    scheduled = FAMILY.scheduler(settings, gpu.arch, gpu.sms)
    edges = (144, 145, 512, 513, 1024, 1025, 8192, 8193, 100_000)
    for kv_len in sorted({max(1, edge + i) for edge in edges for i in (-6, -1, 0, 1)}):
        rule = variant._rule_of(settings.features, window, gpu.arch, 1, 1, kv_len)
        assert variant.rule_of(settings, gpu.arch, 1, 1, kv_len) is rule
        assert scheduled(1, kv_len).tile == launch_config(settings.features, 1, rule, gpu.arch, gpu.sms)


def decode_problem(**changes: Any) -> DecodeProblem:
    """A call without a plan whose scratch is exactly large enough, unless `changes` say otherwise."""
    q, cache = torch.zeros(2, 4, 64).bfloat16(), torch.zeros(3, 16, 2, 64).bfloat16()
    tables, seq_lens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([40, 3], dtype=torch.int32)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    scratch = Scratch(buffer, buffer, buffer.data_ptr(), buffer.data_ptr() + 4096, 4096, buffer.nbytes - 4096)
    settings = Settings(FEATURES, sm_scale=0.5, window_left=700, page_size=16)
    problem = DecodeProblem(settings, 1, q, cache, cache, q.clone(), None, tables, seq_lens, 48, scratch)
    return problem._replace(**changes)


def test_a_call_without_a_plan_is_one_launch_that_reads_its_lengths_itself(launches: type[NamedLaunch]) -> None:
    problem = decode_problem(seq_lens=torch.empty(2, dtype=torch.int32, device="meta"))  # has no numbers to read
    runner = DecodeRun(problem.settings, GPU)
    runner(problem)
    (launch,) = launches.fired
    assert launch.spec in FAMILY.specs(FEATURES, GPU.arch)
    assert (launch.params.table, launch.params.page_starts) == (problem.block_tables.data_ptr(), 0)
    runner(problem._replace(q=problem.q[:0]))
    assert len(launches.fired) == 1


def test_addresses_of_one_call_are_not_those_of_the_next(launches: type[NamedLaunch]) -> None:
    """What a block has in common with others is kept, and nothing else."""
    some = torch.zeros(4, dtype=torch.int32)
    blocks, one = torch.zeros(3, 16, 2, 4), torch.ones(1)
    extras = Extras(one, v_scale=one, sinks=torch.zeros(4), k_scales=blocks, v_scales=blocks)
    full = decode_problem(qo_indptr=some[:3], draft_mask=some, lse=torch.zeros(2, 4), extras=extras)
    nvfp4 = full.settings._replace(features=FEATURES._replace(kv_block_scales=True))
    runner = DecodeRun(nvfp4, GPU)
    runner(full._replace(settings=nvfp4))
    runner(decode_problem(settings=nvfp4, extras=Extras(k_scales=blocks, v_scales=blocks)))
    DecodeRun(full.settings, GPU)(decode_problem())
    first, second, third = (vars(launch.params) for launch in launches.fired)
    optional = ("q_indptr", "mask", "sinks", "lse", "v_scale_ptr", "scale0")
    of_scales = ("k_scales", "v_scales", "k_scales_stride_page", "k_scales_stride_n", "k_scales_stride_h")
    assert all(first[name] for name in optional + of_scales)
    assert not any(second[name] for name in optional)
    assert not any(third[name] for name in optional + of_scales)


@pytest.mark.parametrize(("short", "field"), [("counter_bytes", "counters"), ("partial_bytes", "partials")])
def test_a_buffer_that_is_too_small_is_not_used(launches: type[NamedLaunch], short: str, field: str) -> None:
    problem = decode_problem()
    runner = DecodeRun(problem.settings, GPU)
    rule = variant.rule_of(problem.settings, GPU.arch, 2, 1, problem.max_kv_len)
    config = launch_config(problem.settings.features, 1, rule, GPU.arch, GPU.sms)
    needed = problem.scratch._replace(counter_bytes=config.counter_bytes, partial_bytes=config.partial_bytes)
    runner(problem._replace(scratch=needed))
    runner(problem._replace(scratch=needed._replace(**{short: getattr(needed, short) - 1})))
    enough, less = (vars(launch.params) for launch in launches.fired)
    assert {name for name in enough if enough[name] != less[name]} == {field}
    assert enough[field] == getattr(needed, field)


@pytest.mark.parametrize("arch", TYPICAL_SMS)
def test_counters_of_a_launch_fit_those_of_a_stream(arch: str) -> None:
    """Also on the GPU of that architecture with the most multiprocessors."""
    sms = MOST_SMS.get(arch, TYPICAL_SMS[arch])
    caches = FEATURES, even_settings(torch.float8_e4m3fn, 8).features, even_settings(BF16, 8).features
    specs = [spec for features in caches for spec in FAMILY.specs(features, named(arch))]
    assert all(4 * sms * spec.ctas <= SEMAPHORES.bytes_per_launch for spec in specs if not spec.whole)


@pytest.mark.parametrize("qo_len", [1, 5])
def test_a_window_that_is_short_takes_a_cta_per_request_and_unit(qo_len: int, launches: type[NamedLaunch]) -> None:
    """And no memory for partial results: a workspace of no bytes will do."""
    problem = decode_problem(qo_len=qo_len)
    for window, whole in ((144 - qo_len, True), (145 - qo_len, False), (-1, False)):
        settings = problem.settings._replace(window_left=window)
        rule = variant.rule_of(settings, GPU.arch, 2, qo_len)
        config = launch_config(settings.features, qo_len, rule, GPU.arch, 132, 0)
        assert config.spec.whole == whole
        if config.spec.whole:
            assert config.grid_of(2) == (2, 1, 2)
            assert config.partial_bytes == config.counter_bytes == 0
            DecodeRun(settings, GPU)(problem._replace(settings=settings))
            assert launches.fired[-1].grid == (2, 1, 2)


@pytest.mark.parametrize(
    ("window", "requests", "ring"),
    [
        *((142, 32, (4, "whole", 3)), (143, 1, (4, "cluster", 1)), (143, 16, (8, "whole", 1))),
        *((143, 32, (8, "whole", 1)), (1022, 8, (4, "cluster", 1)), (1023, 8, (8, "cluster", 1))),
        *((511, 16, (8, "shares", 1)), (142, 33, (4, "whole", 1)), (142, 67, (2, "heads", 1))),
        *((143, 66, (4, "whole", 1)), (510, 255, (4, "whole", 0)), (510, 256, (2, "heads", 1))),
    ],
)
def test_short_windows_are_distinguished_by_their_number(
    window: int, requests: int, ring: tuple[int, str, int]
) -> None:
    """The keys of a segment are those of the window and of a draft token."""
    settings = even_settings(torch.float8_e4m3fn, 8)._replace(window_left=window)
    found = variant.rule_of(settings, GPU.arch, requests, 2).value[0]
    assert (found.warps, found.work, found.prefetch) == ring


@pytest.mark.parametrize("qo_len", [1, 5])
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn], ids=str)
def test_numbers_that_no_rule_tells_apart_share_what_is_kept(kv_dtype: torch.dtype, qo_len: int) -> None:
    """Also within windows; numbers of requests and of keys are many, and must not drive kernels out."""
    lengths = (0, *(n + i for n in tiles.STEPS["keys"][1:-1] for i in (-2, -1, 0)), 1 << 30, None)
    for window, kv_heads in itertools.product((-1, 143, 511, 3000), (1, 3, 8)):
        prepared_kernel.cache_clear()
        settings = even_settings(kv_dtype, kv_heads)._replace(window_left=window)
        for requests, longest in itertools.product((*range(600), 2048, 2049, 65535, 65536), lengths):
            found = variant.rule_of(settings, GPU.arch, requests, qo_len, longest)
            if requests < 20 or requests % 64 < 2 or requests > 600:
                assert found is variant._rule_of(settings.features, window, GPU.arch, requests, qo_len, longest)
        assert prepared_kernel.cache_info().currsize < 100


@pytest.mark.parametrize(
    "arch", [for_capability((8, 6)), named("sm_90a"), named("sm_100a")], ids=lambda arch: arch.name
)
def test_every_rule_is_followed_and_every_launch_has_one(arch: Arch) -> None:
    every: Rule[tiles.Rings] = Rule((), {})
    of_dims = {
        bits: [tiles.rules(arch, bits, dim, rows) for dim in range(8, 513, 8) for rows in (None, 64)]
        for bits in (16, 8, 4)
    }
    followed = {rule for of_bits in of_dims.values() for rules in of_bits for rule in rules}
    assert followed == {rule for bits in of_dims for rule in tiles.rules_of(arch, bits)}
    assert all(
        rules[-1].covers(every, ("head_dim", "row", "rows")) for of_bits in of_dims.values() for rules in of_bits
    )


def even_settings(kv_dtype: torch.dtype, num_kv_heads: int) -> Settings:
    heads = {"num_qo_heads": 4 * num_kv_heads, "num_kv_heads": num_kv_heads}
    return Settings(FEATURES._replace(kv_dtype=kv_dtype, head_dim_qk=128, head_dim_vo=128, **heads), page_size=16)


def many(settings: Settings, qo_len: int = 1) -> Rule[tiles.Rings]:
    return variant.rule_of(settings, GPU.arch, 512, qo_len, 2048)


@pytest.mark.parametrize(
    ("kv_dtype", "num_kv_heads", "qo_len", "grid", "work"),
    [
        (torch.float8_e4m3fn, 8, 1, (4, 264, 1), "even"),
        (torch.float8_e4m3fn, 16, 2, (8, 132, 1), "even"),
        (torch.float8_e4m3fn, 16, 4, (16, 16, 1), "shares"),
        (torch.float8_e4m3fn, 5, 1, (5, 105, 1), "shares"),
        (BF16, 8, 1, (8, 33, 1), "shares"),
        (BF16, 256, 1, (256, 1, 1), "shares"),  # of 264 CTAs
    ],
)
def test_warps_have_units_of_their_own_where_they_divide_the_heads(
    kv_dtype: torch.dtype, num_kv_heads: int, qo_len: int, grid: tuple[int, int, int], work: str
) -> None:
    settings = even_settings(kv_dtype, num_kv_heads)
    config = launch_config(settings.features, qo_len, many(settings, qo_len), GPU.arch, 132)
    assert config.spec.work == work
    assert config.grid_of(512) == config.grid == grid
    assert config.min_share == (1 if grid[1] == 1 else config.spec.teams)
    states = 2 * config.spec.heads * config.spec.rows
    assert config.partial_bytes == config.ctas * states * (128 + 2) * 4


@pytest.mark.parametrize(
    ("sms", "workspace", "size", "grid", "counters"),
    [
        (132, UNLIMITED, 8, (4, 24, 1), 96),
        (132, UNLIMITED, 6, (8, 12, 1), 96),
        (132, UNLIMITED, 2, (8, 16, 1), 132),
        (132, 140 << 10, 8, (2, 8, 1), 16),
        (132, 0, 8, (1, 8, 1), 8),
    ],
)
def test_clusters_have_as_many_ctas_as_run_at_a_time(
    sms: int, workspace: int, size: int, grid: tuple[int, int, int], counters: int
) -> None:
    settings = even_settings(BF16, 8)
    rule = Rule((tiles.Ring(4, 3, 1, 8192).in_clusters(size),), {})
    config = launch_config(settings.features, 1, rule, GPU.arch, sms, workspace)
    assert config.grid_of(1) == config.grid_of(64) == grid
    with pytest.raises(ValueError, match="at most 64 requests, got 65"):
        config.grid_of(65)
    assert config.counter_bytes == 4 * counters
    assert config.partial_bytes <= workspace


def test_a_small_workspace_has_fewer_warps() -> None:
    settings = even_settings(torch.float8_e4m3fn, 8)
    config = launch_config(settings.features, 1, many(settings), GPU.arch, 132, 100 << 10)
    assert (config.spec.work, config.grid) == ("even", (2, 3, 1))
    assert config.partial_bytes <= 100 << 10


def test_warps_that_do_not_divide_the_heads_are_refused() -> None:
    eight, five = (even_settings(torch.float8_e4m3fn, n) for n in (8, 5))
    spec = launch_config(eight.features, 1, many(eight), GPU.arch, 132).spec
    assert isinstance(spec, XqaSpec)
    with rings.force_spec(spec), pytest.raises(ValueError, match="2 kv heads a CTA, which do not divide 5"):
        launch_config(five.features, 1, many(five), GPU.arch, 132)


SHAPES = [  # one request of 1, 4 and 8 units, of few keys and more; few pairs and many, windows
    *(tiles.Shape(1, units, keys) for units in (1, 4, 8) for keys in (2048, 8192, 1 << 17)),
    *(tiles.Shape(requests, 4, 1024) for requests in (2, 4, 8, 16)),
    *(tiles.Shape(2, 8), tiles.Shape(255, 8), tiles.Shape(512, 8)),
    *(tiles.Shape(requests, 8, keys) for requests in (16, 32, 64, 65, 256) for keys in (128, 501)),
]


spec_of = functools.cache(tiles.choose)  # many shapes have the same rule


def chosen(arch: Arch, kv: str, rows: int, shape: tiles.Shape, tree: bool) -> Iterator[tuple[int, XqaSpec]]:
    """The kernels of a launch, by head dimension."""
    for head_dim in (dim for dim in range(8, 1024, 8) if is_head_dim(dim, KV_BITS[kv])):
        rule = tiles.find(arch, KV_BITS[kv], head_dim, shape)
        yield head_dim, spec_of("bfloat16", kv, "bfloat16", head_dim, rows, tree, rule, arch)


@pytest.mark.parametrize("arch", [*map(named, ARCHS), for_capability((8, 6))], ids=lambda arch: f"{arch.capability}")
def test_every_head_dim_has_a_kernel(arch: Arch) -> None:
    """In the shared memory of the GPU. Where that has 163 KB, partial scores take no slots of caches that are bound by
    memory: as many bytes are in flight at 512 as at 256.
    """
    in_flight = {}
    for kv, rows, shape in itertools.product(KV_BITS, (4, 8, 16), SHAPES):
        for head_dim, spec in chosen(arch, kv, rows, shape, tree=True):
            memory = XqaMemory(spec)
            assert memory.bytes <= arch.smem_limit
            assert spec.team * spec.warp_dim == head_dim
            assert spec.warp_dim <= spec.tile_dim < 2 * max(32, spec.warp_dim)
            in_flight[kv, rows, shape, head_dim] = (
                spec.warps * spec.ctas * memory.prefetch_distance * spec.cols * memory.source_bytes
            )
        if arch.smem_limit > 1 << 17 and KV_BITS[kv] > 4:
            assert in_flight[kv, rows, shape, 512] >= in_flight[kv, rows, shape, 256]


@pytest.mark.parametrize("arch", [named("sm_100a"), named("sm_103a")], ids=lambda arch: arch.name)
def test_rings_that_hold_what_fast_memory_delivers(arch: Arch) -> None:
    """8 TB/s over 148 SMs for 1 us, and some more; rows of 16 bytes are padded to twice that."""
    for kv, rows, shape, tree in itertools.product(KV_BITS, (4, 8, 16), SHAPES, (True, False)):
        for head_dim, spec in chosen(arch, kv, rows, shape, tree):
            padded = head_dim * KV_BITS[kv] == 128
            assert tiles.in_flight(spec) >= (32 << 10 if padded else 64 << 10), (kv, rows, shape, tree, head_dim)


def test_single_calls_share_their_page_table() -> None:
    """Captured graphs read it, so that it must outlive the runner, of which only so many are remembered."""
    single = Settings(FEATURES._replace(kv_source="dense", device_lengths=False))
    runs = [FAMILY.prepare(single._replace(sm_scale=sm_scale), GPU) for sm_scale in (1.0, 2.0)]
    first, second = (run.records.data_ptr() for run in runs)
    assert first == second
