"""The attention and mask functions of the transformers integration on single layers."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers import masking_utils

from cute_attn.emulator.settings import using
from cute_attn.errors import NotSupported
from cute_attn.integrations.transformers import descriptors, forward, masks, ops, patterns, register
from tests.support.dense_attention import attention

MODULE = SimpleNamespace(is_causal=True, training=False)
CLOSE = 2**-7  # of bf16 outputs of order 1


def layer(batch=2, heads=4, kv_heads=2, q_len=5, kv_len=12, dims=(16, 16), order="heads", seed=0):
    """q, k and v of a layer; `order` "tokens": k and v in memory as [batch, tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)

    def random(tokens, heads, width):
        x = torch.randn(batch, tokens, heads, width, generator=generator).bfloat16().transpose(1, 2)
        return x if order == "tokens" else x.contiguous()

    return random(q_len, heads, dims[0]), random(kv_len, kv_heads, dims[0]), random(kv_len, kv_heads, dims[1])


def expected(q, k, v, seen, scale=None, soft_cap=None, sinks=None):
    """Attention in fp64 under a boolean mask `[batch, q_len, kv_len]`; rows that see nothing are zero."""
    requests = zip(*(x.transpose(1, 2) for x in (q, k, v)), seen, strict=True)
    return torch.stack([attention(*request, scale, soft_cap or 0.0, sinks)[0] for request in requests])


def described(kv_len, q_len, q_offset, attention_mask=None, function=masking_utils.causal_mask_function, **more):
    """What the mask function returns, and the boolean mask `[batch, q_len, kv_len]` that transformers makes."""
    common = {"batch_size": 2, "q_length": q_len, "kv_length": kv_len, "q_offset": q_offset}
    common |= {"mask_function": function, "attention_mask": attention_mask, **more}
    exact = masking_utils.sdpa_mask(**common, allow_is_causal_skip=False)
    return masks.attention_mask(**common), exact.expand(2, 1, -1, -1)[:, 0]


def assert_sees(seen, qkv, mask, module=MODULE, near=CLOSE, **options):
    """A layer's attention under `mask` and options is that under `seen`; its output."""
    out, weights = forward.attention(module, *qkv, mask, **options)
    assert weights is None
    names = {"scaling": "scale", "softcap": "soft_cap", "s_aux": "sinks"}
    assert (out - expected(*qkv, seen, **{n: options[o] for o, n in names.items() if o in options})).abs().max() < near
    return out


def padded(kv_len, *ranges):
    kept = torch.zeros(2, kv_len, dtype=torch.bool)
    for row, (first, stop) in zip(kept, ranges, strict=True):
        row[first:stop] = True
    return kept


MASKS = {
    "causal": {},
    "static cache": {"q_offset": torch.tensor(4)},
    "left padding": {"attention_mask": padded(12, (3, 12), (0, 12))},
    "static and left padding": {"q_offset": torch.tensor(4), "attention_mask": padded(9, (3, 9), (1, 9))},
    "holes": {"attention_mask": padded(12, (3, 12), (0, 12)) & (torch.arange(12) != 8)},
    "window": {"function": masking_utils.sliding_window_causal_mask_function(4)},
    "window and padding": {
        "function": masking_utils.sliding_window_causal_mask_function(4),
        "attention_mask": padded(12, (9, 12), (0, 12)),
    },
    "chunks": {"function": masking_utils.chunked_causal_mask_function(5, torch.tensor([2, 0]))},
    "short of a chunk": {"function": masking_utils.chunked_causal_mask_function(64, torch.tensor([0, 0]))},
    "bidirectional": {"function": masking_utils.bidirectional_mask_function},
    "bidirectional and padding": {
        "function": masking_utils.bidirectional_mask_function,
        "attention_mask": padded(12, (2, 12), (0, 7)),
    },
    "both sides": {"function": masking_utils.sliding_window_bidirectional_mask_function(3)},
    "prefix": {
        "function": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, i, j: j < 9),
        "use_vmap": True,
    },
}


@pytest.mark.parametrize("q_len", [5, 1])
@pytest.mark.parametrize("order", ["heads", "tokens"])
@pytest.mark.parametrize("name", MASKS)
def test_a_layer_sees_what_the_mask_of_sdpa_says(name, order, q_len):
    """With caps (which decode plans for) and without, sinks, values of another width."""
    case = {"q_offset": 12 - q_len, **MASKS[name]}
    mask, seen = described(12, q_len, **case)
    scaled = {"scaling": 0.3, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    for more, dims in (({}, (16, 16)), ({"softcap": 2.0}, (16, 16)), (scaled, (24, 16)), ({}, (512, 512))):
        assert_sees(seen, layer(q_len=q_len, dims=dims, order=order), mask, near=2 * CLOSE, **more)


def test_right_padding_gives_zeros_where_a_query_is_padding():
    mask, seen = described(12, 12, 0, padded(12, (0, 12), (0, 7)))
    q, k, v = layer(q_len=12)
    out, _ = forward.attention(MODULE, q, k, v, mask)
    reference = expected(q, k, v, seen)
    assert (out[0] - reference[0]).abs().max() < CLOSE
    assert (out[1, :7] - reference[1, :7]).abs().max() < CLOSE
    assert (out[1, 7:] == 0).all()


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 4), (False, None), (False, 4)])
def test_without_a_mask_the_layer_says_what_is_seen(causal, window):
    i, j = torch.arange(7, 12)[:, None], torch.arange(12)
    seen = (j <= i) if causal else torch.ones(5, 12, dtype=torch.bool)
    if window:
        seen = seen & ((i - j).abs() < window)
    assert_sees(seen.expand(2, -1, -1), layer(), None, is_causal=causal, sliding_window=window)


def test_patterns_are_recognised_and_unknown_functions_are_not():
    make = masking_utils
    assert patterns.recognise(make.sliding_window_causal_mask_function(9)) == patterns.Pattern(True, window=9)
    zeros = torch.zeros(2, dtype=torch.long)
    chunked = make.chunked_causal_mask_function(9, zeros)
    assert patterns.recognise(chunked) == patterns.Pattern(True, chunk=9, left_padding=zeros)
    added = make.and_masks(make.causal_mask_function, lambda b, h, i, j: j != 0)
    assert patterns.recognise(added) is None


def test_blocks_beside_a_causal_mask_are_not_recognised():
    """Tokens of an image see one another, packed or not."""
    make, ids = masking_utils, torch.tensor([[0, 0, 1]])
    if not hasattr(make, "blockwise_overlay"):
        pytest.skip("this release of transformers has no blockwise masks")
    blocks = make.or_masks(make.causal_mask_function, make.blockwise_overlay(ids))
    packed = make.and_masks(blocks, make.packed_sequence_mask_function(ids))
    assert patterns.recognise(blocks) is patterns.recognise(packed) is None


@pytest.mark.parametrize("release", ["5.17", "5.23", "5.24"])
def test_packed_sequences_are_recognised(release):
    """Each release nests the parts of the mask in its own way."""
    make, ids, zeros = masking_utils, torch.tensor([[0, 0, 1]]), torch.zeros(2, dtype=torch.long)
    if release != "5.17" and not hasattr(make, "remap_positions_for_packed_sequence"):
        pytest.skip("this release of transformers does not count positions within a packed sequence")
    found = []
    for inner in make.sliding_window_causal_mask_function(9), make.chunked_causal_mask_function(9, zeros):
        segments = make.packed_sequence_mask_function(ids)
        if release != "5.17":
            inner = make.remap_positions_for_packed_sequence(inner, ids)
        found.append(patterns.recognise(make.and_masks(*(segments, inner)[:: 1 if release == "5.23" else -1])))
    positions = None if release == "5.17" else ids
    assert found[0] == patterns.Pattern(True, window=9, segment_ids=ids, positions=positions)
    chunked = patterns.Pattern(True, chunk=9, segment_ids=ids, positions=ids, left_padding=zeros)
    assert found[1] == (None if release == "5.17" else chunked)


PACKED = {
    "runs": ([[0, 0, 0, 1, 1, 2, 2, 2], [3, 3, 1, 1, 1, 1, 1, 0]], None),
    "a number comes again": ([[0, 0, 0, 1, 1, 0, 0, 2], [0] * 8], None),
    "positions start late": ([[0, 0, 0, 0, 0, 1, 1, 1]] * 2, [[5, 6, 7, 8, 9, 0, 1, 2], [4, 5, 6, 7, 8, 2, 3, 4]]),
    "positions skip": ([[0, 0, 0, 0, 0, 1, 1, 1]] * 2, [[0, 1, 2, 6, 7, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]]),
    "positions fall": ([[0, 0, 0, 0, 0, 1, 1, 1]] * 2, [[4, 3, 2, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]]),
}


@pytest.mark.parametrize("inner", ["causal", "window", "chunk", "shifted chunk"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_tokens_see_what_the_mask_of_sdpa_says(name, inner):
    make = masking_utils
    ids, positions = (None if x is None else torch.tensor(x) for x in PACKED[name])
    if positions is not None and not hasattr(make, "remap_positions_for_packed_sequence"):
        pytest.skip("this release of transformers does not count positions within a packed sequence")
    function = {
        "causal": make.causal_mask_function,
        "window": make.sliding_window_causal_mask_function(2),
        "chunk": make.chunked_causal_mask_function(8, torch.tensor([0, 0])),
        "shifted chunk": make.chunked_causal_mask_function(8, torch.tensor([3, -2])),
    }[inner]
    if positions is not None:
        function = make.remap_positions_for_packed_sequence(function, positions)
    mask, seen = described(8, 8, 0, function=make.and_masks(function, make.packed_sequence_mask_function(ids)))
    assert descriptors.is_rows(mask) == ((name == "runs" and "chunk" not in inner) or name == "positions start late"), (
        "the exact mask is for what runs do not describe"
    )
    assert_sees(seen, layer(q_len=8, kv_len=8), mask)


@pytest.mark.parametrize("kind", ["decode", "soft cap", "exact", "unmasked"])
def test_layers_are_traced_without_breaks(kind):
    mask, seen = described(12, 1 if kind in ("decode", "soft cap") else 5, 7, padded(12, (3, 12), (0, 12)))
    q, k, v = layer(q_len=1 if kind in ("decode", "soft cap") else 5)
    cap = 2.0 if kind == "soft cap" else None
    if kind == "exact":
        mask = seen[:, None]
    if kind == "unmasked":
        mask, seen = None, (torch.arange(12) <= torch.arange(7, 12)[:, None]).expand(2, -1, -1)

    def run(q, k, v):
        return forward.attention(MODULE, q, k, v, mask, softcap=cap)[0] * 2

    out = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
    assert torch.equal(out, run(q, k, v))
    assert (out - 2 * expected(q, k, v, seen, soft_cap=cap)).abs().max() < 4 * CLOSE


def test_ops_pass_opcheck():
    q, k, v = layer(q_len=1)
    lengths, tables = torch.tensor([3, 12], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
    namespace = getattr(torch.ops, ops.NAMESPACE)
    torch.library.opcheck(namespace.decode.default, (q, k, v, None, 0.25, 0.0, "auto", lengths, tables, []))
    q = layer(q_len=5)[0]
    torch.library.opcheck(namespace.planned.default, (q, k, v, None, 0.25, 0.0, "auto", None, True, -1))


def test_a_mask_that_changes_between_layers_is_read_again():
    mask = described(12, 5, 7)[1][:, None].clone()
    for i in range(2):
        assert_sees(mask[:, 0], layer(), mask, SimpleNamespace(is_causal=True, training=False, layer_idx=i))
        mask[:, :, :, :6] = False


@pytest.mark.parametrize("layer_idx", [None, 0])
@pytest.mark.parametrize("what", ["mask", "cu_seq_lens_q"])
def test_what_changes_uncounted_is_read_again(what, layer_idx):
    """Through numpy, which torch's count of changes does not see; layers of models have numbers, or have none."""
    q, k, v = layer(batch=1, q_len=12)
    array = np.tril(np.ones((1, 1, 12, 12), bool)) if what == "mask" else np.array([0, 4, 12], np.int32)
    given = torch.from_numpy(array)
    module = SimpleNamespace(is_causal=True, training=False, layer_idx=layer_idx)
    outs = []
    for bound in 4, 7:
        if what == "mask":
            array[:, :, bound:, :bound] = False
        else:
            array[1] = bound
        options = {"attention_mask": given} if what == "mask" else {"attention_mask": None, what: given}
        outs.append(forward.attention(module, q, k, v, **options)[0])
    number = torch.arange(12) >= 7
    seen = (number[:, None] == number).tril()
    if what == "mask":
        seen[4:, :4] = False
    assert (outs[1] - expected(q, k, v, seen[None])).abs().max() < CLOSE


def test_the_layers_of_a_pass_share_what_is_kept_on_a_mask():
    mask, modules = torch.ones(1, 1, 4, 4, dtype=torch.bool), [SimpleNamespace(layer_idx=i) for i in range(3)]
    kept = []
    for module in modules * 2:
        descriptors.renew(mask, module)
        kept.append(forward._kept(mask, "identity", object))
    assert kept[0] is kept[1] is kept[2] is not kept[3]
    assert kept[3] is kept[4] is kept[5]


def test_what_is_kept_on_a_descriptor_dies_with_it():
    """Also on a copy of one, as layers on another GPU get it in every step."""
    mask = descriptors.decode_of_lengths(torch.tensor([3, 12])).clone()
    forward.attention(MODULE, *layer(q_len=1, dims=(64, 64)), mask)
    [(_, tables)] = getattr(mask, descriptors.MEMO).found.values()
    tables = weakref.ref(tables)
    del mask
    assert tables() is None


SEQUENCES = {
    "causal": (None, {}),
    "bidirectional": (None, {"is_causal": False}),
    "window": (None, {"sliding_window": 3}),
    "both sides": (None, {"is_causal": False, "sliding_window": 3}),
    "mask of a window": (masking_utils.sliding_window_causal_mask_function(3), {}),
    "mask of both sides": (masking_utils.bidirectional_mask_function, {}),
    "chunks": (masking_utils.chunked_causal_mask_function(5, torch.tensor([0])), {}),
}


@pytest.mark.parametrize("bounds", [(0, 4, 4, 11, 12), (0, 12)])
@pytest.mark.parametrize("name", SEQUENCES)
def test_cu_seq_lens_part_what_every_mask_lets_see(name, bounds):
    function, options = SEQUENCES[name]
    i, j = torch.arange(12)[:, None], torch.arange(12)
    if function is None:
        mask, seen = None, j <= i if options.get("is_causal", True) else i == i
        if "sliding_window" in options:
            seen = seen & ((i - j).abs() < 3)
    else:
        mask, seen = described(12, 12, 0, function=function, batch_size=1)
        seen = seen[0]
    number = (i >= torch.tensor(bounds[1:])).sum(1)
    lens = torch.tensor(bounds, dtype=torch.int32)
    of_caller = torch.zeros(1, 1, 12, 12).masked_fill(~seen, -torch.inf)
    seen = (seen & (number[:, None] == number))[None]
    for given in mask, of_caller:
        lengths = {"cu_seq_lens_q": lens, "cu_seq_lens_k": lens.clone()}
        assert_sees(seen, layer(batch=1, q_len=12), given, **lengths, **options)


def test_cu_seq_lens_are_refused_where_they_cannot_be_obeyed():
    q, k, v = layer(batch=1, q_len=12)
    lens = torch.tensor([0, 4, 12], dtype=torch.int32)

    def run(mask, **options):
        return forward.attention(MODULE, q, k, v, mask, **options)[0]

    padding = described(12, 12, 0, torch.arange(12)[None] > 2, batch_size=1)[0]
    with pytest.raises(NotSupported, match="cu_seq_lens_q with padding in attention_mask"):
        run(padding, cu_seq_lens_q=lens)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must go from 0 .*12.*got \[0, 8, 4, 12\]"):
        run(None, cu_seq_lens_q=torch.tensor([0, 8, 4, 12]))
    with pytest.raises(ValueError, match=r"cu_seq_lens_k must be cu_seq_lens_q, \[0, 4, 12\].*got \[0, 5, 12\]"):
        run(None, cu_seq_lens_q=lens, cu_seq_lens_k=torch.tensor([0, 5, 12]))
    with pytest.raises(ValueError, match="cu_seq_lens_q must be given with cu_seq_lens_k"):
        run(None, cu_seq_lens_k=lens)
    for mask in None, torch.ones(1, 1, 12, 12, dtype=torch.bool):
        with pytest.raises(Exception, match=r"cu_seq_lens_q under torch\.compile"):
            torch.compile(run, backend="eager", fullgraph=True)(mask, cu_seq_lens_q=lens)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"dropout": 0.1}, NotSupported, r"dropout = 0.1: the kernels are for inference.*model.eval\(\)"),
        ({"output_attentions": True}, NotSupported, r"output_attentions=True.*eager"),
        ({"head_mask": torch.ones(4)}, NotSupported, "head_mask.*eager"),
        ({"position_bias": torch.ones(4)}, NotSupported, "position_bias.*eager"),
        ({"cache": object()}, NotSupported, r"paged cache of continuous batching.*generate"),
        ({"attention_mask": torch.ones(2, 4, 5, 12) > 0}, ValueError, r"\[2, 1, 5, 12\], the same for all heads"),
        ({"attention_mask": torch.full((1, 1, 5, 12), -2.0)}, ValueError, "the kernels add no bias.*eager"),
    ],
)
def test_what_is_refused_says_why_and_what_to_use(options, error, says):
    with pytest.raises(error, match=says):
        forward.attention(MODULE, *layer(), **{"attention_mask": None, **options})


def test_gradients_and_other_dtypes_are_refused():
    q, k, v = layer()
    with pytest.raises(NotSupported, match=r"with gradients: no backward pass exists.*torch.no_grad\(\)"):
        forward.attention(MODULE, q.requires_grad_(), k, v, None)
    with torch.no_grad():
        forward.attention(MODULE, q, k, v, None)
        with pytest.raises(NotSupported, match=r"torch.float32.*dtype=torch.bfloat16"):
            forward.attention(MODULE, q.float(), k.float(), v.float(), None)
        with pytest.raises(ValueError, match="one dtype"):
            forward.attention(MODULE, q, k.half(), v, None)


def test_the_mask_of_another_call_is_refused():
    q, k, v = layer()
    with pytest.raises(ValueError, match="a layer was given the mask of another call"):
        forward.attention(MODULE, q[:, :, :4], k, v, described(12, 5, 7)[0])


def test_register_refuses_bad_names_and_old_releases(monkeypatch):
    register()
    register()
    assert transformers.AttentionInterface()["cute_attn"] is forward.attention
    for name in ("cute_flash_attn", "a|b", "a/b", ""):
        with pytest.raises(ValueError, match="name must be without"):
            register(name)
    for name in ("sdpa", "eager"):
        with pytest.raises(ValueError, match="name must not be that of another implementation"):
            register(name)
    with pytest.raises(TypeError, match="name must be a str"):
        register(3)
    with pytest.raises(KeyError, match="backend"):
        register(backend="fastest")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(ImportError, match=r"needs transformers 5.0 or later, found 4.57.1"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers>=5"):
        register()


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("q_len", "padding"), [(1, None), (1, padded(40, (7, 40), (0, 40))), (33, padded(40, (7, 40), (0, 40)))]
)
def test_kernels_read_caches_in_place(q_len, padding, monkeypatch):
    """Hopper's kernels on the emulator: a page per request, and pages of one token, in a static cache of 48 tokens."""
    kept = None if padding is None else torch.nn.functional.pad(padding, (0, 8))
    mask, seen = described(48, q_len, torch.tensor(40 - q_len), kept)
    qkv = layer(heads=2, kv_heads=1, q_len=q_len, kv_len=48, dims=(64, 64))
    with using("sm_90a"):
        assert_sees(seen, qkv, mask, backend="emulator")
