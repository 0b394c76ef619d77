"""Holds our classes against those of the vLLM that is imported here: `python -m tests.support.vllm_interfaces`.

Prints vLLM's version. Errors are assertions.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl, MLACommonMetadataBuilder
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from cute_attn.integrations import vllm as plugin
from cute_attn.integrations.vllm.support import Layer
from tests.support.vllm_case import Step

HOPPER = DeviceCapability(9, 0)


def check_signatures(ours: type, base: type) -> None:
    """Check that nothing abstract is left, and that every override takes the arguments of what it overrides."""
    assert not getattr(ours, "__abstractmethods__", None), ours.__abstractmethods__
    own = [cls for cls in ours.__mro__ if cls.__module__.startswith(plugin.__name__)]
    members = [(cls, *member) for cls in own for member in vars(cls).items()]
    for cls, name, value in members:
        theirs = getattr(base, name, None)
        if (name.startswith("__") and (cls, name) != (ours, "__init__")) or not callable(theirs):
            continue
        raw = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        kind = type(inspect.getattr_static(base, name))
        assert isinstance(inspect.getattr_static(ours, name), kind), f"{name} must be a {kind}"
        given, wanted = inspect.signature(raw).parameters, inspect.signature(theirs).parameters
        passed_on = any(x.kind is x.VAR_KEYWORD for x in given.values())
        names = [x for x, kind in given.items() if x not in ("self", "cls") and kind.kind is not kind.VAR_KEYWORD]
        needed = [x for x in wanted if x not in ("self", "cls")][: len(names) if passed_on else None]
        assert names[: len(needed)] == needed, f"{name}: {names} does not begin with {needed}"


def asked(**changes: Any) -> AttentionSelectorConfig:
    return AttentionSelectorConfig(128, torch.bfloat16, "auto", 16)._replace(**changes)


def reasons(backend: Any, capability: DeviceCapability = HOPPER, **changes: Any) -> list[str]:
    """What vLLM's CUDA platform asks before it takes a backend."""
    found: list[str] = backend.validate_configuration(device_capability=capability, **asked(**changes)._asdict())
    return found


def check_reasons(backend: Any, taken: Any, refused: Any, **common: Any) -> None:
    """Check which configurations are taken, and words of the reasons why others are not."""
    for changes in taken:
        assert reasons(backend, **common, **changes) == [], changes
    for changes, words in refused:
        found = reasons(backend, **{**common, **changes})
        assert any(words in reason for reason in found), (changes, found)


def check_validation(backend: Any) -> None:
    taken = (
        {},
        {"has_sink": True, "has_sliding_window": True, "kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "nvfp4", "dtype": torch.float16, "block_size": 64},
        {"kv_cache_dtype": "fp8_e5m2", "head_size": 80, "use_kv_connector": True},
        {"use_batch_invariant": True},
        {"attn_type": "encoder_only"},
        {"attn_type": "encoder_decoder"},
        {"use_non_causal": True},
        {"use_mm_prefix": True, "kv_cache_dtype": "fp8"},
    )
    refused = (
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "must have the model's dtype"),
        ({"use_per_head_quant_scales": True}, "per-head"),
        ({"use_dcp": True}, "DCP"),
        ({"use_pcp": True}, "PCP"),
        ({"use_adaptive_verification": True}, "query lens mismatch"),
        ({"head_size": 320}, "other head dimensions"),
        ({"block_size": 8}, "block_size"),
    )
    check_reasons(backend, taken, refused)
    assert any("7.5 is not supported" in reason for reason in reasons(backend, DeviceCapability(7, 5)))


def check_latent() -> None:
    """Check the backend of latent attention, and that of its prefill."""
    backend: Any = AttentionBackendEnum[plugin.MLA_NAME].get_class()
    assert backend.get_name() == plugin.MLA_NAME
    check_signatures(backend, AttentionBackend)
    check_signatures(backend.get_impl_cls(), MLACommonImpl)
    builder = backend.get_builder_cls()
    check_signatures(builder, AttentionMetadataBuilder)
    built = [inspect.signature(x._build_decode).parameters for x in (builder, MLACommonMetadataBuilder)]
    assert list(built[0]) == list(built[1])
    prefill: Any = MLAPrefillBackendEnum[plugin.MLA_NAME].get_class()
    assert prefill.get_name() == plugin.MLA_NAME
    check_signatures(prefill, MLAPrefillBackend)
    assert prefill.supports_compute_capability(HOPPER)
    assert not prefill.supports_compute_capability(None)
    taken = {}, {"kv_cache_dtype": "fp8"}, {"use_dcp": True, "dtype": torch.float16}, {"block_size": 32}
    refused = (
        ({"use_mla": False}, "non-MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"use_pcp": True}, "PCP"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_adaptive_verification": True}, "query lens mismatch"),
        ({"has_sliding_window": True}, "sliding window"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "must have the model's dtype"),
        ({"head_size": 320}, "head_size"),
    )
    check_reasons(backend, taken, refused, head_size=576, use_mla=True)
    assert backend.get_preferred_block_size(16) == 64


def check_caches(backend: Any) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    assert backend.customize_spec(spec) is spec
    packed = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=128, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4
    )
    packed = backend.customize_spec(packed)
    assert (packed.num_heads, packed.state_content_size_bytes) == (4, 72)
    assert all(layout.is_layer_compact for layout in backend.supported_kv_cache_layouts())


def made(impl_cls: Any, **options: Any) -> Any:
    """Make a layer's attention as vLLM does."""
    layer = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None}
    layer |= {"attn_type": "decoder", "kv_sharing_target_layer_name": None, **options}
    sinks = {"sinks": layer.pop("sinks")} if "sinks" in layer else {}
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    with mock.patch("cute_attn.integrations.vllm.backend.get_current_vllm_config", return_value=config):
        return impl_cls(4, 64, 0.125, 2, *layer.values(), **sinks)


def check_impl(impl_cls: Any) -> None:
    """Check a forward pass of a layer with a window and sinks that shares another's cache, and what is refused."""
    sinks = torch.linspace(-1, 2, 4).bfloat16()
    impl = made(impl_cls, sliding_window=9, sinks=sinks, kv_sharing_target_layer_name="first")
    impl.process_weights_after_loading(torch.bfloat16)
    layer = Layer(4, 64, 0.125, 2, window_left=8, sinks=True)
    case = Step([(1, 37), (20, 20)], layer, scales=(3.0, 3.0))  # scales are of fp8 caches only
    case.fill(impl)
    query, step = torch.cat(case.q), case.metadata()
    out = torch.empty_like(query)
    assert impl.forward(case, query, None, None, case.cache, step, out) is out
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-2, atol=1e-2)
    assert not impl.forward(case, query, None, None, case.cache, None, out).any()
    for words, call in (
        ("quantised output", lambda: impl.forward(case, query, None, None, case.cache, step, out, torch.ones(1))),
        ("no sliding_window", lambda: made(impl_cls, attn_type="encoder_only", sliding_window=8)),
        ("standard ones of 4 heads", lambda: made(impl_cls, alibi_slopes=[0.5, 0.25, 0.125, 0.0625])),
        ("kv_cache_dtype must be one of", lambda: made(impl_cls, kv_cache_dtype="int4_per_token_head")),
    ):
        with pytest.raises(NotImplementedError, match=words):
            call()


def main() -> None:
    plugin.register()
    backend: Any = AttentionBackendEnum[plugin.NAME].get_class()
    assert backend.get_name() == plugin.NAME
    check_signatures(backend, AttentionBackend)
    check_signatures(backend.get_impl_cls(), AttentionImpl)
    check_signatures(backend.get_builder_cls(), AttentionMetadataBuilder)
    check_validation(backend)
    check_caches(backend)
    check_latent()

    check_impl(backend.get_impl_cls())
    layers: dict[str, Any] = {"other": SimpleNamespace(impl=None)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    support_of = backend.get_builder_cls().get_cudagraph_support
    assert support_of(config, None) is AttentionCGSupport.UNIFORM_BATCH
    layers["capped"] = SimpleNamespace(impl=made(backend.get_impl_cls(), logits_soft_cap=30.0))
    assert support_of(config, None) is AttentionCGSupport.NEVER
    print(vllm.__version__)


if __name__ == "__main__":
    main()
