"""What both of SGLang's attention backends share: facts of a server, steps, CUDA graphs. Needs sglang."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, NoOpMHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

from cute_attn.integrations.sglang import limits
from cute_attn.integrations.sglang.limits import ServerFacts
from cute_attn.integrations.sglang.metadata import LayerKind, PageTables, Scale
from cute_attn.integrations.sglang.steps import GraphTables, Operands, TableStep
from cute_attn.request import checks
from cute_attn.request.settings import FP8
from cute_attn.runtime import capture


class PagedBackend(AttentionBackend):
    """Attention over a token pool of SGLang. Lengths and page tables of decode stay on the device.

    Parameters
    ----------
    model_runner : SGLang's ModelRunner, its model loaded and its pools allocated.

    Raises
    ------
    NotSupported (a NotImplementedError) that lists every setting of the server and of the model that is refused.
    """

    needs_cpu_seq_lens = False
    _plans_decode = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size: int = model_runner.page_size
        self.device = model_runner.device
        self._facts = server_facts(model_runner)
        layers = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
        limits.check(self._facts, layers)
        self._kinds: dict[RadixAttention, LayerKind] = {layer: self._kind(layer) for layer in layers}
        # Of the pool, and where there is one, of the pool of sliding-window layers.
        self._pools = [PageTables(model_runner.req_to_token_pool.req_to_token, self.page_size)]
        self._graph_tables: GraphTables | None = None
        self.forward_metadata: Any = None

    def _kind(self, layer: RadixAttention) -> LayerKind:
        return LayerKind.of(layer)

    # ---- a step without a CUDA graph

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe the batch of the next forward pass."""
        if forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0:
            self.forward_metadata = None
            return
        check_mode(forward_batch)
        self.forward_metadata = self._describe(forward_batch)

    def _describe(self, batch: Any) -> Any:
        """Return the description of a batch that is not empty."""
        raise NotImplementedError

    def _table_step(self, batch: Any) -> TableStep:
        """Return a batch by its page tables: of decode, of drafts, or of extends, as if they had one token each."""
        drafts, pages = drafts_of(batch), None
        if batch.seq_lens_cpu is not None:  # tables as narrow as the longest request
            pages = -(-(int(batch.seq_lens_cpu.max()) + drafts) // self.page_size)
        tables = [pool.block_tables(batch.req_pool_indices, pages) for pool in self._pools]
        return TableStep(tables, (batch.seq_lens + drafts).to(torch.int32), max(drafts, 1))

    # ---- CUDA graphs

    @capture.lasting()
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured batches of up to `max_bs` requests and `max_num_tokens` query tokens read."""
        self._graph_tables = GraphTables(max_bs, self._pools, self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that pad a captured batch."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a capture or a replay of decode or of verification."""
        check_mode(forward_batch)
        self.forward_metadata = self._graph_step(forward_batch)

    def _graph_step(self, batch: Any) -> Any:
        """Return the description of a captured batch."""
        assert self._graph_tables is not None
        return self._graph_tables.view(batch.batch_size, max(drafts_of(batch), 1), with_mask=False)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Write page tables and lengths on the device; captured and replayed with the model."""
        if self._graph_tables is not None:
            requests, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
            size = forward_batch.batch_size
            self._graph_tables.fill(requests[:size], seq_lens[:size], drafts_of(forward_batch))

    # ---- a layer

    def _scales(self, layer: RadixAttention) -> tuple[Scale, Scale]:
        """Return the scales of an fp8 pool: numbers where SGLang has them."""
        if self._facts.kv_dtype not in FP8:
            return None, None
        k_scale = layer.k_scale if layer.k_scale_float is None else layer.k_scale_float
        v_scale = layer.v_scale if layer.v_scale_float is None else layer.v_scale_float
        return k_scale, v_scale

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention of new tokens, or of drafts, over all keys of their requests.

        Parameters
        ----------
        q : `[tokens, heads * head_dim]`. Rows past the batch's tokens, which pad it, have output 0.
        k, v : the new tokens' keys and values, written into the pool if `save_kv_cache`; None for a layer that reads
            those of another. Latent attention: rows of the pool where q is absorbed, else of every head, not written.
        sinks : `[heads]`, natural-log domain: a term of each softmax denominator. Refused by latent attention.
        kwargs : refused unless None or False.

        Returns
        -------
        `[tokens, heads * head_dim of the values]` of the server's dtype.
        """
        refuse_arguments(kwargs)
        kind, step = self._kinds.get(layer), self.forward_metadata
        if kind is None:
            kind = self._kinds[layer] = self._checked_kind(layer)
        assert step is not None, "init_forward_metadata describes a batch before its first layer"
        q, tokens = q.reshape(-1, kind.num_qo_heads, kind.head_dim), step.num_tokens
        out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        if tokens < len(q):
            out[tokens:].zero_()
        saved_with = forward_batch if save_kv_cache and k is not None else None
        self._attend(layer, Operands(kind, q[:tokens], (k, v), out[:tokens], sinks=sinks), saved_with)
        return out.view(len(q), -1)

    forward_decode = forward_extend

    def _attend(self, layer: RadixAttention, new: Operands, saved_with: Any) -> None:
        """Compute a layer over its cache. `new`: with the keys and values of its new tokens; `saved_with`: the batch at
        whose slots these are written, None if they are not.
        """
        raise NotImplementedError

    def _checked_kind(self, layer: RadixAttention) -> LayerKind:
        """Return the kind of a layer that is not a module of the model."""
        kind = self._kind(layer)
        limits.check(self._facts, [layer])
        if kind.soft_cap and not self._plans_decode:
            reason = "the model's modules did not show it"
            checks.refuse("a soft cap", reason, limits.OTHER_BACKEND, limits.BACKEND)
        return kind


def drafts_of(batch: Any) -> int:
    """Return the draft tokens of each request, which `seq_lens` does not count; 0 where none are verified."""
    return int(batch.spec_info.draft_token_num) if batch.forward_mode.is_target_verify() else 0


def server_facts(runner: Any) -> ServerFacts:
    """Read from a runner and SGLang's settings what decides whether the backend can serve."""
    pool, config, parallel, spec = runner.token_to_kv_pool, runner.model_config, get_parallel(), get_spec()
    parts = [getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)] or [pool]
    quantized = next((name for name in map(_own_recipe, parts) if name), None)
    translator = runner.kv_index_translator
    algorithm = spec.speculative_algorithm
    return ServerFacts(
        dtype=runner.dtype,
        kv_dtype=pool.dtype,
        page_size=runner.page_size,
        kv_layouts=tuple(dict.fromkeys(map(_layout, parts))),
        quantized_pool=quantized,
        mla=runner.use_mla_backend,
        encoder_decoder=config.is_encoder_decoder,
        attention_chunk_size=config.attention_chunk_size,
        draft_worker=runner.is_draft_worker,
        context_parallel=parallel.attn_cp_size,
        decode_context_parallel=parallel.attn_dcp_size,
        translated_slots=translator is not None and translator.is_translating,
        diffusion=get_exec().dllm.dllm_algorithm is not None,
        full_prefill_graphs=check_cuda_graph_backend(Phase.PREFILL, Backend.FULL),
        deterministic=get_exec().deterministic.enable_deterministic_inference,
        speculative=None if algorithm is None else str(algorithm),
        draft_trees=algorithm is not None and (spec.speculative_eagle_topk or 0) > 1,
    )


def _layout(pool: Any) -> str:
    """Return the layout of a pool; latent rows have no axis of heads to speak of."""
    return "nhd" if type(pool) is MLATokenToKVPool else getattr(pool, "kv_cache_layout", type(pool).__name__)


def _own_recipe(pool: Any) -> str | None:
    """Return the name of a pool's quantisation where it is more than a cast, else None."""
    name = getattr(pool.get_kv_cache_quant_method(), "name", "unquantized")
    if name != "unquantized":
        return str(name)
    scaled = getattr(pool, "k_scale_buffer", None) is not None or hasattr(pool, "get_kv_scale_buffer")
    if type(pool) is MLATokenToKVPool:  # others of its kind have rows of their own
        return None
    if scaled or isinstance(pool, MLATokenToKVPool | NoOpMHATokenToKVPool):
        return type(pool).__name__
    return None


def check_mode(batch: Any) -> None:
    """Refuse batches whose mask the backends have not."""
    refused = None
    if batch.forward_mode.is_dllm_extend():
        refused = "diffusion language models", "their block mask is not implemented"
    elif getattr(batch, "multi_item_delimiter_indices", None) is not None:
        refused = "multi-item scoring", "the backend does not pass its mask on"
    elif getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
        refused = "ragged verification of drafts", "every request must have the same number of drafts"
    if refused is not None:
        checks.refuse(*refused, limits.OTHER_BACKEND, limits.BACKEND)


def refuse_arguments(given: dict[str, Any]) -> None:
    """Refuse arguments of a layer that are given, whatever they are."""
    asked = [name for name, value in given.items() if value is not None and value is not False]
    if asked:
        reason = "RadixAttention of a model that needs them has other kernels"
        checks.refuse(", ".join(asked), reason, limits.OTHER_BACKEND, limits.BACKEND)
