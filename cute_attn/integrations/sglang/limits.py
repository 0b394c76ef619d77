"""What the SGLang backend refuses, with reasons: pure functions of facts about server and model. Needs torch alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from cute_attn.errors import NotSupported, Refusal
from cute_attn.problem import short
from cute_attn.request.settings import FP8, HALF

BACKEND = "cute_attn's SGLang backend"
LAYOUTS = ("nhd", "hnd")
OTHER_BACKEND = "another --attention-backend"
ABSORBED, DECOMPRESSED = (576, 512), (192, 128)  # head dimensions of keys and values of latent attention


class ServerFacts(NamedTuple):
    """What decides whether the backend can serve a model, read from SGLang's runner and settings."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int = 1
    kv_layouts: tuple[str, ...] = ("nhd",)  # of the pool, or of its parts
    quantized_pool: str | None = None  # name of a pool's own 4-bit or block-scaled recipe
    mla: bool = False
    encoder_decoder: bool = False
    attention_chunk_size: int | None = None
    draft_worker: bool = False
    context_parallel: int = 1
    decode_context_parallel: int = 1
    translated_slots: bool = False  # the unified memory pool
    diffusion: bool = False
    full_prefill_graphs: bool = False
    deterministic: bool = False  # results of a request must not depend on the rest of the batch
    speculative: str | None = None  # the algorithm
    draft_trees: bool = False  # drafts may branch

    @property
    def layout(self) -> str:
        """The order of axes of the pool's pages as wrappers name it."""
        return self.kv_layouts[0].upper()


def window_of(layer: Any) -> int:
    """Return window_left: SGLang's layers see the keys from q - sliding_window_size on, and none of -1 or None."""
    window = layer.sliding_window_size
    return -1 if window is None or window < 0 else int(window)


def soft_cap_of(layer: Any) -> float:
    """Return the soft cap of a layer's logits, 0 for none."""
    cap = layer.logit_cap
    return 0.0 if cap is None or cap <= 0 else float(cap)


def attn_type_of(layer: Any) -> str:
    """Return the kind of a layer's mask by the name that SGLang has for it."""
    return str(getattr(layer.attn_type, "value", layer.attn_type))


def check(server: ServerFacts, layers: Iterable[Any]) -> None:
    """Raise NotSupported with all reasons against serving a model with some RadixAttention layers, if there are any."""
    layers = tuple(layers)
    refusals = [*_of_server(server), *_of_pool(server), *_of_speculation(server, layers)]
    for layer in layers:
        refusals += [refusal for refusal in _of_layer(layer, server.mla) if refusal not in refusals]
    if refusals:
        raise NotSupported(refusals)


def _no(feature: str, reason: str, instead: str = OTHER_BACKEND) -> Refusal:
    return Refusal(BACKEND, feature, reason, instead)


def _of_server(server: ServerFacts) -> Iterator[Refusal]:
    if server.dtype not in HALF:
        yield _no(f"--dtype {short(server.dtype)}", "queries are 16-bit", "--dtype bfloat16 or float16")
    if server.mla and server.deterministic:
        yield _no("--enable-deterministic-inference with latent attention", "its splits depend on the batch", "fa3")
    if server.mla and server.draft_trees:
        yield _no("draft trees with latent attention", "its mask is causal", "--speculative-eagle-topk 1")
    if server.mla and server.kv_dtype == torch.float8_e5m2:
        yield _no("--kv-cache-dtype fp8_e5m2 with latent attention", "no kernel reads it", "--kv-cache-dtype fp8_e4m3")
    if server.encoder_decoder:
        yield _no("encoder-decoder models", "cross attention is not implemented")
    if server.attention_chunk_size is not None:
        yield _no(
            f"attention_chunk_size {server.attention_chunk_size}",
            "the mask of chunked attention is not implemented",
            "fa3",
        )
    if server.draft_worker:
        yield _no(
            "the draft model of speculative decoding",
            "SGLang builds the backends of draft steps from a list of its own",
            "--speculative-draft-attention-backend triton or fa3; the target model may use cute_attn",
        )
    if server.context_parallel > 1:
        yield _no(f"--attn-cp-size {server.context_parallel}", "sequences are not sharded", "--attn-cp-size 1")
    if server.decode_context_parallel > 1:
        yield _no(f"--dcp-size {server.decode_context_parallel}", "caches are not sharded by tokens", "--dcp-size 1")
    if server.diffusion:
        yield _no("diffusion language models", "their block mask is not implemented")
    if server.full_prefill_graphs:
        reason = "plans of captured extends would need a bound on every length"
        yield _no("--cuda-graph-backend-prefill full", reason, "--cuda-graph-backend-prefill breakable")


def _of_pool(server: ServerFacts) -> Iterator[Refusal]:
    if server.translated_slots:
        yield _no("--enable-unified-memory", "its slots must be translated on every read", "the default pools")
    if server.quantized_pool is not None:
        yield _no(
            f"the KV cache recipe {server.quantized_pool}",
            "SGLang allocates its block scales only for backends that it names itself",
            "--kv-cache-dtype fp8_e4m3, fp8_e5m2 or auto",
        )
    elif server.kv_dtype not in (server.dtype, *FP8):
        yield _no(
            f"a KV cache of {short(server.kv_dtype)} under {short(server.dtype)}",
            "caches have the model's dtype or fp8",
            "--kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2",
        )
    for layout in server.kv_layouts:
        if layout not in LAYOUTS:
            yield _no(f"the pool layout {layout!r}", "its pages are not rows of tokens", "the default layout")


def _of_speculation(server: ServerFacts, layers: tuple[Any, ...]) -> Iterator[Refusal]:
    if server.speculative is None:
        return
    verified = f"verification of drafts ({server.speculative})"
    if any(map(soft_cap_of, layers)):
        yield _no(f"{verified} with a logit soft cap", "the kernel that verifies drafts has no soft cap")
    if server.deterministic:
        yield _no(f"{verified} with --enable-deterministic-inference", "its splits depend on the batch", "fa3")
    if server.draft_trees and any(window_of(layer) >= 0 for layer in layers):
        yield _no(
            "draft trees with sliding windows",
            "the window would count draft tokens in their order instead of along branches",
            "--speculative-eagle-topk 1",
        )


def _of_layer(layer: Any, latent: bool) -> Iterator[Refusal]:
    dims, attn_type = (layer.qk_head_dim, layer.v_head_dim), attn_type_of(layer)
    soft_cap = soft_cap_of(layer)
    if latent:
        if dims not in (ABSORBED, DECOMPRESSED):
            yield _no(
                f"latent attention with head dimensions {dims}", f"it has {ABSORBED} and {DECOMPRESSED}", "triton"
            )
        if window_of(layer) >= 0 or soft_cap:
            yield _no("a window or a soft cap in latent attention", "its kernel has none", "triton")
    if layer.is_cross_attention:
        yield _no("cross attention", "it is not implemented")
    if attn_type not in ("decoder", "encoder_only"):
        yield _no(f"attention of type {attn_type}", "its mask depends on the server's mode", "triton")
    if not latent and dims[0] != dims[1]:
        yield _no(
            f"value heads of dimension {dims[1]} under keys of {dims[0]}",
            "the decode kernels have one head dimension",
        )
    if layer.pos_encoding_mode != "NONE":
        yield _no(f"pos_encoding_mode {layer.pos_encoding_mode!r}", "the cache holds keys already rotated")
    if soft_cap and layer.logit_capping_method != "tanh":
        yield _no(f"logit_capping_method {layer.logit_capping_method!r}", "the soft cap is a tanh")
    if layer.xai_temperature_len > 0:
        yield _no("a temperature by position (xai_temperature_len)", "it is not implemented", "triton")
