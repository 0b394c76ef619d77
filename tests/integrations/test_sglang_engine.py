"""The SGLang backend in SGLang's own batches, pools and layers on a CPU, against its torch backend and an fp64 oracle.

Opt-in (`pytest -m engines`): docs/integrations/sglang.md has the environment.
"""

# ruff: noqa: E402  (imports of sglang follow the check that it is there)

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_attn.errors import NotSupported
from tests.support.dense_attention import attention, seen

pytestmark = pytest.mark.engines

pytest.importorskip("sglang", reason="needs SGLang: docs/integrations/sglang.md")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode

import cute_attn.integrations.sglang as plugin
from cute_attn.integrations.sglang import steps
from cute_attn.integrations.sglang.backend import CuteAttnBackend
from tests.support import sglang_runner
from tests.support.noted import noted
from tests.support.sglang_runner import HEAD_DIM, HEADS, Runner

HALF_STEP = 1 / 128  # of bfloat16 at 1, twice
WINDOW = 20
NUM_HEADS, NUM_KV_HEADS = HEADS


@pytest.fixture(autouse=True)
def server() -> Iterator[None]:
    with sglang_runner.settings():
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def new_tokens(batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = len(batch.out_cache_loc)
    k, v = torch.randn(2, tokens, NUM_KV_HEADS, HEAD_DIM).bfloat16()
    return torch.randn(tokens, NUM_HEADS * HEAD_DIM).bfloat16(), k, v


def forward(backend: Any, layer: Any, batch: Any, qkv: Any = None, **options: Any) -> torch.Tensor:
    """Describe a batch to a backend and run one layer."""
    q, k, v = new_tokens(batch) if qkv is None else qkv
    backend.init_forward_metadata(batch)
    return backend.forward(q, k, v, layer, batch, **options)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected.double(), rtol=HALF_STEP, atol=HALF_STEP)


def expected(
    runner: Runner,
    layer: Any,
    batch: Any,
    q: torch.Tensor,
    q_lens: list[int],
    among: torch.Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    **options: Any,
) -> torch.Tensor:
    """fp64 attention of a causal batch, of keys and values read from the pool slot by slot. `among`: which of a
    request's drafts, which its length does not count, see which.
    """
    rows, pool = [], runner.token_to_kv_pool
    mapping = getattr(pool, "layers_mapping", None)
    for i, part in enumerate(q.view(-1, NUM_HEADS, HEAD_DIM).split(q_lens)):
        kv_len = int(batch.seq_lens[i]) + (0 if among is None else len(among))
        slots = runner.req_to_token_pool.req_to_token[int(batch.req_pool_indices[i]), :kv_len].long()
        if mapping is not None and mapping[layer.layer_id][1]:
            slots = pool.translate_loc_from_full_to_swa(slots)
        buffers = pool.get_kv_buffer(layer.layer_id)
        if getattr(pool, "kv_cache_layout", "nhd") == "hnd":
            buffers = [x.transpose(1, 2).flatten(0, 1) for x in buffers]
        pairs = zip(buffers, scales, strict=True)
        keys, values = (x.view(torch.uint8)[slots].view(x.dtype).double() * scale for x, scale in pairs)
        visible = seen(len(part), kv_len, window_left=max(layer.sliding_window_size, 0) or -1)
        if among is not None:
            visible[:, kv_len - len(among) :] = among
        rows.append(attention(part, keys, values, visible, HEAD_DIM**-0.5, **options)[0].flatten(1))
    return torch.cat(rows)


# ---- against SGLang's torch backend


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_steps_of_a_server(page_size: int) -> None:
    """Extend, extend with cached prefix, decode with and without lengths on the host, and both mixed."""
    full, window = sglang_runner.layer(0), sglang_runner.layer(1, sliding_window_size=WINDOW)
    runner = Runner([full, window], page_size)
    ours, theirs = CuteAttnBackend(runner), TorchNativeAttnBackend(runner)
    assert not ours.needs_cpu_seq_lens
    for batch in (
        runner.extend([1, 2, 3], [37, 1, 70]),
        runner.extend([1, 3, 4], [5, 20, 9]),
        runner.decode([2, 1, 4]),
        runner.decode([3, 4], host_lengths=False),
        runner.extend([1, 3, 4], [33, 1, 1], ForwardMode.MIXED),
    ):
        for layer in (full, window):
            qkv = new_tokens(batch)
            assert_close(forward(ours, layer, batch, qkv), forward(theirs, layer, batch, qkv))


def test_an_encoder_sees_all_keys() -> None:
    layer = sglang_runner.layer(attn_type=AttentionType.ENCODER_ONLY)
    runner = Runner([layer], 16)
    batch = runner.extend([1, 2], [18, 5])
    qkv = new_tokens(batch)
    theirs = forward(TorchNativeAttnBackend(runner), layer, batch, qkv)
    assert_close(forward(CuteAttnBackend(runner), layer, batch, qkv), theirs)


# ---- against the oracle: what the torch backend ignores


def check_steps(
    runner: Runner, *layers: Any, scales: tuple[float, float] = (1.0, 1.0), **options: Any
) -> CuteAttnBackend:
    """An extend, one over cached prefixes, and a decode, each by a new backend's layers with these options."""
    backend = CuteAttnBackend(runner)
    for batch, q_lens in (
        (runner.extend([1, 2], [37, 5]), [37, 5]),
        (runner.extend([2, 1], [9, 21]), [9, 21]),
        (runner.decode([1, 2]), [1, 1]),
    ):
        for layer in layers:
            q, k, v = new_tokens(batch)
            out = forward(backend, layer, batch, (q, k.clone(), v.clone()), **options)
            rest = {"scales": scales, "soft_cap": layer.logit_cap, **options}
            assert_close(out, expected(runner, layer, batch, q, q_lens, **rest))
    return backend


@pytest.mark.parametrize("deterministic", [False, True])
def test_soft_cap_and_sinks(deterministic: bool) -> None:
    layer = sglang_runner.layer(logit_cap=2.0)
    with sglang_runner.settings(enable_deterministic_inference=deterministic):
        assert check_steps(Runner([layer], 16), layer, sinks=torch.randn(NUM_HEADS)).needs_cpu_seq_lens


def test_window_and_sinks() -> None:
    layer = sglang_runner.layer(sliding_window_size=WINDOW)
    assert not check_steps(Runner([layer], 1), layer, sinks=torch.randn(NUM_HEADS)).needs_cpu_seq_lens


@pytest.mark.parametrize("page_size", [1, 16])
def test_pools_of_a_model_with_sliding_windows(page_size: int) -> None:
    """Each kind of layer has a pool of its own, with slots of its own."""
    full, window = sglang_runner.layer(0), sglang_runner.layer(1, sliding_window_size=WINDOW)
    check_steps(Runner([full, window], page_size, sglang_runner.window_pool(page_size, [1], [0])), full, window)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_fp8_pools(dtype: torch.dtype, as_tensor: bool) -> None:
    layer = sglang_runner.layer()
    layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(2.0)
    if not as_tensor:
        layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    check_steps(Runner([layer], 16, sglang_runner.token_pool(16, 1, dtype)), layer, scales=(0.5, 2.0))


def test_head_major_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SGLANG_USE_HND_KVCACHE=1` orders pages by head."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    layer = sglang_runner.layer()
    runner = Runner([layer], 16)
    assert runner.token_to_kv_pool.kv_cache_layout == "hnd"
    check_steps(runner, layer)


# ---- what reaches the kernels


@pytest.mark.parametrize("page_size", [1, 16])
def test_nothing_is_copied(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls get the pool's memory with its strides, and every layer of a kind runs the plan of the first."""
    layers = [sglang_runner.layer(i) for i in range(3)]
    runner = Runner(layers, page_size)
    backend, wrapper = CuteAttnBackend(runner), steps.BatchPrefillWithPagedKVCacheWrapper
    plans, runs = (noted(monkeypatch, wrapper, name) for name in ("plan", "run"))
    decodes = noted(monkeypatch, steps, "xqa_batch_decode_with_kv_cache")
    for batch in (runner.extend([1, 2], [40, 3]), runner.decode([2, 1])):
        backend.init_forward_metadata(batch)
        for layer in layers:
            backend.forward(*new_tokens(batch), layer, batch)
    assert len(plans) == 1
    caches = [call.args[2] for call in runs] + [call.args[1] for call in decodes]
    for layer, cache in zip(layers * 2, caches, strict=True):
        for pages, buffer in zip(cache, runner.token_to_kv_pool.get_kv_buffer(layer.layer_id), strict=True):
            assert pages.data_ptr() == buffer.data_ptr()
            assert pages.shape[1:] == (page_size, NUM_KV_HEADS, HEAD_DIM)
            assert pages.stride()[2:] == buffer.stride()[1:]
            assert pages.stride(0) == page_size * buffer.stride(0)


def test_rows_without_keys_of_their_own() -> None:
    """Of a layer that shares keys, which it does not write; of padding; and of idle batches."""
    layer = sglang_runner.layer()
    runner = Runner([layer], 16)
    backend, batch = CuteAttnBackend(runner), runner.extend([1], [20])
    q, k, v = new_tokens(batch)
    out = forward(backend, layer, batch, (q, k, v))
    before = runner.token_to_kv_pool.k_buffer[0].clone()
    assert torch.equal(forward(backend, layer, batch, (q, None, None)), out)
    assert torch.equal(forward(backend, layer, batch, (q, -k, -v), save_kv_cache=False), out)
    assert torch.equal(runner.token_to_kv_pool.k_buffer[0], before)
    padded = torch.cat((q, torch.randn(4, q.shape[1]).bfloat16()))
    longer = forward(backend, layer, batch, (padded, None, None))
    assert torch.equal(longer[:20], out)
    assert not longer[20:].any()
    batch.forward_mode = ForwardMode.IDLE
    backend.init_forward_metadata(batch)
    assert backend.forward(q[:0], k[:0], v[:0], layer, batch).shape == (0, NUM_HEADS * HEAD_DIM)


# ---- speculative decoding

PARENTS = (-1, 0, 0, 1, 2, 2)  # of each draft token
DRAFTS = len(PARENTS)


def ancestors() -> torch.Tensor:
    """Bool `[DRAFTS, DRAFTS]`: a draft sees itself and those on its way to the root."""
    visible = torch.eye(DRAFTS, dtype=torch.bool)
    for token, parent in enumerate(PARENTS):
        if parent >= 0:
            visible[token] |= visible[parent]
    return visible


def speculating(topk: int) -> Any:
    """SGLang's settings of drafts with `topk` branches."""
    options = {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": DRAFTS}
    return sglang_runner.settings(speculative_algorithm="EAGLE", **options)


def drafts(mask: torch.Tensor | None, topk: int) -> Any:
    return SimpleNamespace(custom_mask=mask, draft_token_num=DRAFTS, topk=topk)


@pytest.mark.parametrize("with_prefix", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts_in_trees(page_size: int, with_prefix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import cute_attn.integrations.sglang.backend as module

    mode = TreeMaskMode.FULL_MASK if with_prefix else TreeMaskMode.QLEN_ONLY
    monkeypatch.setattr(module, "default_tree_mask_mode", lambda: mode)
    layer = sglang_runner.layer()
    runner = Runner([layer], page_size)
    with speculating(2):
        backend = CuteAttnBackend(runner)
        forward(backend, layer, runner.extend([1, 2], [40, 3]))
        lens, among = [3, 40], ancestors()
        ones = [torch.ones(DRAFTS, n if with_prefix else 0, dtype=torch.bool) for n in lens]
        mask = torch.cat([torch.cat((part, among), 1).flatten() for part in ones])
        batch = runner.verify([2, 1], drafts(mask, 2))
        qkv = new_tokens(batch)
        assert_close(forward(backend, layer, batch, qkv), expected(runner, layer, batch, qkv[0], [DRAFTS] * 2, among))
        # Overlapped planning brings the mask late.
        late = drafts(torch.zeros_like(mask), 2)
        batch.spec_info = late
        backend.init_forward_metadata(batch)
        backend.update_verify_buffers_to_fill_after_draft(drafts(mask, 2), None)
        out = backend.forward(*qkv, layer, batch)
        assert_close(out, expected(runner, layer, batch, qkv[0], [DRAFTS] * 2, among))


def test_drafts_in_chains() -> None:
    """Without branches the mask is causal, whatever SGLang writes into it."""
    layer = sglang_runner.layer()
    runner = Runner([layer], 16)
    with speculating(1):
        backend = CuteAttnBackend(runner)
        forward(backend, layer, runner.extend([1, 2], [40, 3]))
        batch = runner.verify([2, 1], drafts(None, 1))
        qkv = new_tokens(batch)
        out = forward(backend, layer, batch, qkv)
        assert_close(
            out, expected(runner, layer, batch, qkv[0], [DRAFTS] * 2, torch.ones(DRAFTS, DRAFTS).tril().bool())
        )


# ---- hooks of CUDA graphs, called in their order without a graph


def replayed(backend: Any, layer: Any, static: Any, view: Any, qkv: Any) -> torch.Tensor:
    """What a replay does: the host part on the view of a batch, then what the graph recorded on static buffers."""
    backend.init_forward_metadata_out_graph(view)
    backend.init_forward_metadata_in_graph(static)
    return backend.forward(*qkv, layer, static)


@pytest.mark.parametrize("case", ["table", "window_pool", "planned"])
def test_decode_hooks_keep_addresses(case: str) -> None:
    layers = [sglang_runner.layer(0, logit_cap=2.0 if case == "planned" else 0.0)]
    pool = None
    if case == "window_pool":
        layers = [sglang_runner.layer(0), sglang_runner.layer(1, sliding_window_size=WINDOW)]
        pool = sglang_runner.window_pool(16, [1], [0])
    runner = Runner(layers, 16, pool)
    layer, backend = layers[-1], CuteAttnBackend(runner)
    forward(backend, layer, runner.extend([1, 2, 3], [40, 3, 17]))
    backend.init_cuda_graph_state(4, 4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    captured = runner.decode([1, 2])
    captured.seq_lens[:], captured.seq_lens_cpu[:], captured.req_pool_indices[:] = fill, fill, 0
    captured.out_cache_loc[:] = 0
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    backend.init_forward_metadata_in_graph(captured)
    addresses = state_addresses(backend)
    for requests in ([1, 2], [3, 1]):
        batch = runner.decode(requests)
        for name in ("seq_lens", "seq_lens_cpu", "req_pool_indices", "out_cache_loc"):
            getattr(captured, name).copy_(getattr(batch, name))
        qkv = new_tokens(batch)
        out = replayed(backend, layer, captured, batch, qkv)
        assert_close(out, expected(runner, layer, batch, qkv[0], [1, 1], soft_cap=layer.logit_cap))
        assert state_addresses(backend) == addresses


def state_addresses(backend: CuteAttnBackend) -> list[int]:
    """Addresses that captured launches of a decode step read."""
    step = backend.forward_metadata
    if isinstance(step, steps.TableStep):
        used = [x for x in (*step.tables, step.seq_lens, step.mask) if x is not None]
    else:
        names = "_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"
        used = [getattr(wrapper, name) for wrapper in step.plans.wrappers.values() for name in names]
    if backend._window_loc is not None:
        used.append(backend._window_loc)
    return [x.data_ptr() for x in used]


def test_hooks_of_verification() -> None:
    layer = sglang_runner.layer()
    runner = Runner([layer], 16)
    with speculating(2):
        backend = CuteAttnBackend(runner)
        forward(backend, layer, runner.extend([1, 2], [40, 3]))
        backend.init_cuda_graph_state(4, 4 * DRAFTS)
        owned = backend.verify_mask
        assert owned.mode == TreeMaskMode.QLEN_ONLY
        assert owned.is_read
        assert owned.fits(4)
        among = ancestors()
        batch = runner.verify([2, 1], drafts(owned.buffer, 2))
        owned.buffer[: 2 * DRAFTS * DRAFTS] = among.flatten().repeat(2)
        qkv = new_tokens(batch)
        out = replayed(backend, layer, batch, batch, qkv)
        assert_close(out, expected(runner, layer, batch, qkv[0], [DRAFTS] * 2, among))


# ---- selection and refusals


def test_selected_by_name(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    plugin.register()
    plugin.register()
    assert choices.ATTENTION_BACKEND_CHOICES.count("cute_attn") == 1
    assert choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count("cute_attn") == 1
    assert choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.count("cute_attn") == 1
    runner = Runner([sglang_runner.layer()], 16)
    assert isinstance(ATTENTION_BACKENDS["cute_attn"](runner), CuteAttnBackend)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("options", "fields", "reason"),
    [
        ({"use_mla_backend": True}, {}, "latent attention with head dimensions"),
        ({"is_draft_worker": True}, {}, "--speculative-draft-attention-backend"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, {}, "--enable-unified-memory"),
        ({"dtype": torch.float32}, {}, "queries are 16-bit"),
        (
            {},
            {
                "enable_deterministic_inference": True,
                "speculative_algorithm": "EAGLE",
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": 4,
            },
            "splits depend on the batch",
        ),
    ],
)
def test_refused_when_built(options: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    runner = Runner([sglang_runner.layer()], 16, **options)
    with sglang_runner.settings(**fields), pytest.raises(NotSupported, match=reason):
        plugin.build(runner)


def test_refused_layers_and_pools() -> None:
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    with pytest.raises(NotSupported, match="cross attention"):
        plugin.build(Runner([sglang_runner.layer(is_cross_attention=True)], 16))
    pool = MHATokenToKVPool(
        *(64, 16, torch.uint8, NUM_KV_HEADS, HEAD_DIM, 1, "cpu", False),
        quant_method=NVFP4KVCacheMethod(1, "cpu", page_size=16),
    )
    with pytest.raises(NotSupported, match="nvfp4"):
        plugin.build(Runner([sglang_runner.layer()], 16, pool))


def test_refused_in_a_step() -> None:
    layer = sglang_runner.layer()
    runner = Runner([layer], 16)
    backend, batch = CuteAttnBackend(runner), runner.extend([1], [4])
    with pytest.raises(NotSupported, match="topk_indices"):
        forward(backend, layer, batch, topk_indices=torch.zeros(1))
    batch.multi_item_delimiter_indices = [torch.zeros(1)]
    with pytest.raises(NotSupported, match="multi-item"):
        backend.init_forward_metadata(batch)
