"""SGLang's attention backend `cute_attn`: its hooks, its pools, its batches. Needs sglang.

Decode and the verification of drafts read page tables and lengths on the device; extends, and decode with a soft cap or
in deterministic mode, are planned once per step and kind of layer. Nothing of a pool is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool, NoOpMHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode

from cute_attn.errors import NotSupported, Refusal
from cute_attn.integrations.sglang import limits, planned
from cute_attn.integrations.sglang.limits import FP8_DTYPES, ServerFacts, layer_facts
from cute_attn.integrations.sglang.metadata import LayerKind, PageTables, as_pages, lengths
from cute_attn.integrations.sglang.planned import CacheFormat, GraphBuffers, PlannedAttention, Step
from cute_attn.integrations.sglang.tables import GraphTables, TableAttention, TableStep
from cute_attn.runtime import capture

Attention = TableStep | PlannedAttention


class CuteAttnBackend(AttentionBackend):
    """Attention on cute_attn's kernels over SGLang's token pools.

    Parameters
    ----------
    model_runner : SGLang's ModelRunner, its model loaded and its pools allocated.

    Raises
    ------
    NotSupported (a NotImplementedError) that lists every setting of the server and of the model that is refused.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size: int = model_runner.page_size
        self.device = model_runner.device
        self.max_context_len: int = self.req_to_token_pool.req_to_token.shape[1]
        pool = self.token_to_kv_pool
        self._window_pool = pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None
        facts = server_facts(model_runner)
        layers = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
        limits.check(facts, map(layer_facts, layers))
        self._kinds: dict[RadixAttention, LayerKind] = {layer: self._kind(layer) for layer in layers}
        layout = facts.kv_layouts[0].upper()
        self._format = CacheFormat(facts.dtype, facts.kv_dtype, layout, self.page_size, facts.deterministic)
        self._scaled = facts.kv_dtype in FP8_DTYPES
        self._branching = facts.draft_trees
        self._plans_decode = facts.deterministic or any(kind.soft_cap for kind in self._kinds.values())
        self.needs_cpu_seq_lens = self._plans_decode
        rows = self.req_to_token_pool.req_to_token
        self._pages = PageTables(rows, self.page_size)
        self._window_pages = None
        if self._window_pool is not None:
            self._window_pages = PageTables(rows, self.page_size, self._window_pool.translate_loc_from_full_to_swa)
        self._by_table = TableAttention(self.device, layout, self._pages, self._window_pages, self.max_context_len)
        self._workspace = torch.empty(planned.WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._extend = PlannedAttention(self._workspace, self._format, decode=False)
        self._decode = PlannedAttention(self._workspace, self._format, decode=True)
        self._graph_decodes: dict[int, PlannedAttention] = {}  # by batch size
        self._graph_tables: GraphTables | None = None
        self._graph_indices: dict[bool, torch.Tensor] = {}
        self._verify_mask: VerifyMask | None = None
        self._window_loc: torch.Tensor | None = None  # where the step writes keys of sliding-window layers
        self.forward_metadata: Attention | None = None

    # ---- a step without a CUDA graph

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe the batch of the next forward pass."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.forward_metadata = None
            return
        check_mode(forward_batch)
        if self._window_pool is not None and forward_batch.out_cache_loc is not None:
            self._window_loc = self._window_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        if mode.is_target_verify():
            self.forward_metadata = self._verify_step(forward_batch)
        elif not mode.is_decode():
            self.forward_metadata = self._begin_extend(forward_batch)
        elif self._plans_decode:
            self._decode.begin(self._decode_step(forward_batch))
            self.forward_metadata = self._decode
        else:
            longest = most_keys(forward_batch)
            self.forward_metadata = self._by_table.step(forward_batch.req_pool_indices, forward_batch.seq_lens, longest)

    def _verify_step(self, batch: Any) -> TableStep:
        q_len = batch.spec_info.draft_token_num
        longest = most_keys(batch)
        step = self._by_table.step(
            batch.req_pool_indices,
            batch.seq_lens + q_len,
            None if longest is None else longest + q_len,
            q_len,
        )
        visible = batch.spec_info.custom_mask
        if not self._branching or visible is None:
            return step
        return step.with_mask(visible, batch.seq_lens, self._mask_has_prefix(batch.spec_info))

    def _begin_extend(self, batch: Any) -> PlannedAttention:
        extended, cached = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        if extended is None or cached is None:  # batches that SGLang pads on the device alone: a synchronisation
            extended, cached = batch.extend_seq_lens.tolist(), batch.extend_prefix_lens.tolist()
        kv_lens = [new + old for new, old in zip(extended, cached, strict=True)]
        self._extend.begin(self._step(batch, lengths(extended, kv_lens, self.page_size)))
        return self._extend

    def _decode_step(self, batch: Any) -> Step:
        kv_lens = batch.seq_lens_cpu
        if kv_lens is None:
            kv_lens = batch.seq_lens.cpu()  # SGLang keeps the host's copy for backends with `needs_cpu_seq_lens`
        return self._step(batch, lengths([1] * len(kv_lens), kv_lens, self.page_size))

    def _step(self, batch: Any, planned_lengths: Any) -> Step:
        requests, kv_lens = batch.req_pool_indices, batch.seq_lens

        def page_indices(in_window_pool: bool) -> torch.Tensor:
            pages = self._window_pages if in_window_pool else self._pages
            assert pages is not None
            return pages.page_indices(requests, kv_lens, planned_lengths.num_pages)

        return Step(planned_lengths, page_indices)

    # ---- CUDA graphs

    @capture.lasting()
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured batches of up to `max_bs` requests and `max_num_tokens` query tokens read."""
        if self._plans_decode:
            most = max_bs * self._pages.max_pages
            for in_window_pool in {kind.in_window_pool for kind in self._kinds.values()}:
                self._graph_indices[in_window_pool] = torch.zeros(most, dtype=torch.int32, device=self.device)
        else:
            self._graph_tables = GraphTables(max_bs, self._pages, self._window_pages, self.device)
        if self._window_pool is not None:
            self._graph_window_loc = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)
        drafts = get_spec().speculative_num_draft_tokens
        if drafts:
            mode = TreeMaskMode.QLEN_ONLY
            cells = tree_mask_numel(mode, max_bs, drafts, self.max_context_len)
            buffer = torch.zeros(cells, dtype=torch.bool, device=self.device)
            self._verify_mask = VerifyMask(buffer, mode, max_bs, is_read=self._branching)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that pad a captured batch."""
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Where SGLang writes masks of drafts, with which layout."""
        return self._verify_mask

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a capture or a replay of decode or of verification: plans, and masks, whose addresses change."""
        check_mode(forward_batch)
        batch_size, spec_info = forward_batch.batch_size, forward_batch.spec_info
        if self._plans_decode:
            decode = self._graph_decodes.get(batch_size)
            if decode is None:
                decode = PlannedAttention(self._workspace, self._format, True, self._graph_buffers(batch_size))
                self._graph_decodes[batch_size] = decode
            decode.begin(self._decode_step(forward_batch), kinds=set(self._kinds.values()))
            self.forward_metadata = decode
            return
        assert self._graph_tables is not None
        q_len = spec_info.draft_token_num if forward_batch.forward_mode.is_target_verify() else 1
        branching = q_len > 1 and self._branching
        if branching:
            self._set_graph_mask(spec_info, forward_batch.seq_lens)
        self.forward_metadata = self._graph_tables.view(batch_size, q_len, branching)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Write page tables, lengths and slots on the device; captured and replayed with the model."""
        batch_size = forward_batch.batch_size
        if self._graph_tables is not None:
            verifies = forward_batch.forward_mode.is_target_verify()
            self._graph_tables.fill(
                forward_batch.req_pool_indices[:batch_size],
                forward_batch.seq_lens[:batch_size],
                forward_batch.spec_info.draft_token_num if verifies else 0,
            )
        if self._window_pool is not None:
            loc = forward_batch.out_cache_loc
            self._window_loc = self._graph_window_loc[: len(loc)]
            self._window_loc.copy_(self._window_pool.translate_loc_from_full_to_swa(loc))

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Take over a mask of drafts that was not known when the step was described."""
        step = self.forward_metadata
        if not self._branching or not isinstance(step, TableStep) or step.mask is None:
            return
        seq_lens = step.seq_lens - step.q_len
        step.write_mask(spec_info.custom_mask, seq_lens, self._mask_has_prefix(spec_info))

    def _graph_buffers(self, batch_size: int) -> Callable[[bool], GraphBuffers]:
        def buffers(in_window_pool: bool) -> GraphBuffers:
            @capture.lasting()
            def zeros(size: int) -> torch.Tensor:
                return torch.zeros(size, dtype=torch.int32, device=self.device)

            return GraphBuffers(
                zeros(batch_size + 1), zeros(batch_size + 1), self._graph_indices[in_window_pool], zeros(batch_size)
            )

        return buffers

    def _set_graph_mask(self, spec_info: Any, seq_lens: torch.Tensor) -> None:
        assert self._graph_tables is not None
        visible, q_len = spec_info.custom_mask, spec_info.draft_token_num
        self._graph_tables.set_mask(visible, seq_lens, q_len, self._mask_has_prefix(spec_info))

    def _mask_has_prefix(self, spec_info: Any) -> bool:
        """Tell whether rows of a mask begin with the keys before the drafts: n-gram drafts ignore `verify_mask`."""
        if self._verify_mask is not None and type(spec_info).__name__ != "NgramVerifyInput":
            return False
        return default_tree_mask_mode() == TreeMaskMode.FULL_MASK

    # ---- a layer

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
            those of another.
        sinks : `[heads]`, natural-log domain: a term of each softmax denominator.
        kwargs : refused unless None or False.

        Returns
        -------
        `[tokens, heads * head_dim]` of the server's dtype.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, kwargs)

    def forward_decode(
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
        """Compute attention of one new token of each request; arguments and result as of `forward_extend`."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, kwargs)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None,
        others: dict[str, Any],
    ) -> torch.Tensor:
        if others:
            refuse_arguments(others)
        if save_kv_cache and k is not None:
            location = KVWriteLoc.for_batch(batch, swa_loc=self._window_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
        kind = self._kinds.get(layer)
        if kind is None:
            kind = self._kinds[layer] = self._checked_kind(layer)
        step = self.forward_metadata
        assert step is not None, "init_forward_metadata describes a batch before its first layer"
        q = q.reshape(-1, kind.num_qo_heads, kind.head_dim)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        rows, tokens = len(q), step.num_tokens
        if tokens < rows:
            out[tokens:].zero_()
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        layout = self._format.layout
        cache = as_pages(keys, self.page_size, layout), as_pages(values, self.page_size, layout)
        k_scale, v_scale = self._scales(layer)
        if isinstance(step, TableStep):
            self._by_table.run(step, kind, q[:tokens], cache, out[:tokens], k_scale, v_scale, sinks)
        else:
            step.run(kind, q[:tokens], cache, out[:tokens], k_scale, v_scale, sinks)
        return out.view(rows, -1)

    def _scales(self, layer: RadixAttention) -> tuple[Any, Any]:
        """Return the scales of an fp8 pool: numbers where SGLang has them."""
        if not self._scaled:
            return None, None
        k_scale = layer.k_scale if layer.k_scale_float is None else layer.k_scale_float
        v_scale = layer.v_scale if layer.v_scale_float is None else layer.v_scale_float
        return k_scale, v_scale

    def _kind(self, layer: RadixAttention) -> LayerKind:
        pool = self._window_pool
        return LayerKind.of(layer, pool is not None and pool.layers_mapping[layer.layer_id][1])

    def _checked_kind(self, layer: RadixAttention) -> LayerKind:
        """Return the kind of a layer that is not a module of the model."""
        kind = self._kind(layer)
        limits.check(ServerFacts(self._format.q_dtype, self._format.kv_dtype), [layer_facts(layer)])
        if kind.soft_cap and not self._plans_decode:
            raise NotSupported(
                [Refusal(limits.BACKEND, "a soft cap", "the model's modules did not show it", limits.OTHER_BACKEND)]
            )
        return kind


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


def most_keys(batch: Any) -> int | None:
    """Return the most keys of a request if the host knows them without asking the device."""
    return None if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.max())


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
        raise NotSupported([Refusal(limits.BACKEND, *refused, limits.OTHER_BACKEND)])


def refuse_arguments(given: dict[str, Any]) -> None:
    """Refuse arguments of a layer that are given, whatever they are."""
    asked = [name for name, value in given.items() if value is not None and value is not False]
    if asked:
        reason = "RadixAttention of a model that needs them has other kernels"
        raise NotSupported([Refusal(limits.BACKEND, ", ".join(asked), reason, limits.OTHER_BACKEND)])
