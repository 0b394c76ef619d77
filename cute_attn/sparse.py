"""Attention under block-sparse masks: the wrappers of FlashInfer's module of this name."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.request import batch_plan, block_sparse, checks
from cute_attn.request.batch_plan import PlanOptions, PlanRequest
from cute_attn.request.batch_run import RunArguments
from cute_attn.request.block_sparse import Matrix, convert_bsr_mask_layout
from cute_attn.wrappers.base import BatchWrapper, DType, Result, makes_plan, older_form
from cute_attn.wrappers.calls import Before

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]

ONE_KERNEL = "it belongs to a kernel of FlashInfer's that is not part of this library"
OF_ONE_KERNEL = (  # arguments of it, and what to use instead
    (
        ("block_mask", "q2k_indices", "q2k_num", "kv_block_lens"),
        "indptr and indices, or VariableBlockSparseAttentionWrapper",
    ),
    (("kv_splits", "use_clc", "q_scale", "k_scale", "v_scale"), ""),
)


class BlocksWrapper(BatchWrapper):
    """What the wrappers of block-sparse masks share: each row of blocks is a request of a paged batch."""

    kv_source = "paged"

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "NHD", False, backend)

    @property
    def _matrix(self) -> Matrix:
        matrix = self._in_force().request.matrix
        assert matrix is not None
        return matrix

    def _replan(self, **options: Any) -> None:
        block_sparse.refuse_positions(options["pos_encoding_mode"])
        super()._replan(**options)


class BlockSparseAttentionWrapper(BlocksWrapper):
    """Attention of one sequence under a block-sparse mask `[M, N]`, stored as SciPy's `bsr_matrix` stores one.

    The mask has blocks of R rows (query tokens) and C columns (keys); a query token sees the keys of the blocks that
    its row of blocks lists. Each row of blocks is one request of a paged batch whose pages are the blocks of keys, so
    that only listed blocks are read. Formulas: `single_prefill_with_kv_cache` with the mask as `custom_mask`.

    Parameters
    ----------
    float_workspace_buffer : as for `BatchPrefillWithPagedKVCacheWrapper`.
    backend : "auto" (default), "fa4", "fa3", "fa2", "reference" or "emulator".

    Raises
    ------
    The errors of `BatchPrefillWithPagedKVCacheWrapper`.
    """

    @makes_plan
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,  # noqa: N803
        N: int,  # noqa: N803
        R: int,  # noqa: N803
        C: int,  # noqa: N803
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType = "float16",
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
        kv_block_lens: torch.Tensor | None = None,
        q2k_indices: torch.Tensor | None = None,
        q2k_num: torch.Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> PlanRequest:
        """Schedule the rows of blocks. Index arrays on a GPU each cost a synchronisation, on the CPU none.

        Parameters
        ----------
        indptr : int32 or int64 `[ceil(M / R) + 1]`: row i of blocks lists `indices[indptr[i]:indptr[i + 1]]`.
        indices : int32 or int64, 1-D: columns of blocks, within 0..N / C - 1. An int32 tensor on the wrapper's device
            is not copied: it must not change until the last run.
        M, N : rows and columns of the mask; N must be a multiple of C. The last row of blocks may be shorter than R.
        R, C : rows and columns of a block, at least 1.
        num_qo_heads, num_kv_heads, use_fp16_qk_reduction, logits_soft_cap, sm_scale, non_blocking : as for
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        q_data_type, kv_data_type : torch dtypes or their names. Default float16, and q's.
        head_dim : of q, k, v and the output, at least 1.
        mask : bool `[blocks, R, C]`, which elements of the listed blocks are kept. Default: all.
        packed_mask : uint8, the bits of `convert_bsr_mask_layout(mask, indptr)`, in little bit order, each row of
            blocks from a new byte on, as `segment_packbits` packs them. Replaces `mask`.
        causal : default False. True: row i sees columns j <= i + N - M of its blocks. Without effect under a mask.
        pos_encoding_mode : refused unless "NONE".
        rope_scale, rope_theta : > 0; without effect, as no position is encoded.
        o_data_type : of the output: default float16, whatever q's.
        block_mask, kv_block_lens, q2k_indices, q2k_num, kv_splits, use_clc, q_scale, k_scale, v_scale : refused unless
            None: they belong to other kernels of FlashInfer's.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.plan`. After an error the previous plan is still in force.
        """
        given = locals()
        for names, instead in OF_ONE_KERNEL:
            checks.refuse_given(ONE_KERNEL, instead, None, **{name: given[name] for name in names})
        block_sparse.refuse_positions(pos_encoding_mode)
        checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
        checks.boolean("non_blocking", non_blocking)
        matrix = block_sparse.matrix(M, N, R, C)
        lengths = block_sparse.bsr(indptr, indices, matrix)
        options = PlanOptions.of(given, head_dim_qk=head_dim, causal=False)
        packed = block_sparse.bsr_mask(mask, packed_mask, causal, lengths, matrix, self.device)
        return PlanRequest(options, page_size=C, matrix=matrix, lengths=lengths, mask=packed)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Compute the attention of the planned mask.

        Parameters
        ----------
        q : `[M, num_qo_heads, head_dim]` of the planned dtype.
        k, v : `[N, num_kv_heads, head_dim]` of the planned dtype. Any strides with unit stride on the last axis.
        scale_q, scale_k, scale_v : per-head scales of fp8 attention: floating-point `[num_qo_heads]`,
            `[num_kv_heads]` and `[num_kv_heads]`. Default: ones.
        out, lse, enable_pdl : as for `BatchPrefillWithPagedKVCacheWrapper.run`.
        return_lse : return `(out, lse)`.

        Returns
        -------
        out `[M, num_qo_heads, head_dim]` of `o_data_type`, or with `return_lse` the pair of it and the float32 lse
        `[M, num_qo_heads]`, base 2. A token that sees no key has out 0 and lse -inf.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        scales = None if scale_q is scale_k is scale_v is None else (scale_q, scale_k, scale_v)
        return self._run(
            RunArguments(q, (k, v), None, None, None, out, lse, return_lse, enable_pdl, head_scales=scales)
        )

    def _launched(self, arguments: RunArguments) -> tuple[RunArguments, None]:
        k, v = arguments.kv_cache
        return arguments._replace(kv_cache=block_sparse.pages(k, v, self._matrix)), None

    @older_form
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """Run with other options than the planned ones: FlashInfer's older form of `run`."""
        return self._forward(locals())


class VariableBlockSparseAttentionWrapper(BlocksWrapper):
    """Attention of one sequence under a mask of blocks whose sizes vary, each kv head with blocks of its own.

    A row of blocks of a kv head is one request of a paged batch; its pages are the keys of the blocks that it sees, so
    that only those are read. Pages are as large as divides the sizes of all blocks of columns, the faster the larger.
    Formulas: `single_prefill_with_kv_cache` with a custom mask per head.

    Parameters
    ----------
    float_workspace_buffer, backend : as for `BlockSparseAttentionWrapper`.

    Raises
    ------
    The errors of `BatchPrefillWithPagedKVCacheWrapper`.
    """

    @makes_plan
    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> PlanRequest:
        """Schedule the rows of blocks of all kv heads. Arrays on a GPU cost synchronisations.

        Parameters
        ----------
        block_mask_map : `[num_kv_heads, blocks of rows, blocks of columns]`, bool or numbers: which blocks are seen.
        block_row_sz, block_col_sz : int32 or int64 `[num_kv_heads, blocks]`: query tokens and keys of each block. Every
            kv head has the same sums, qo_len and kv_len.
        num_qo_heads, num_kv_heads, head_dim, pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale,
            rope_scale, rope_theta, non_blocking, q_data_type, kv_data_type : as for `BlockSparseAttentionWrapper.plan`.
            Query heads of a kv head share its blocks.
        causal : default False. True: token i sees keys j <= i + kv_len - qo_len of its blocks.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.plan`. After an error the previous plan is still in force.
        """
        block_sparse.refuse_positions(pos_encoding_mode)
        checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
        checks.boolean("non_blocking", non_blocking)
        heads, kv_heads = batch_plan.count("num_qo_heads", num_qo_heads), batch_plan.count("num_kv_heads", num_kv_heads)
        if heads % kv_heads:
            raise ArgumentError(f"num_qo_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}")
        matrix, lengths = block_sparse.variable(block_mask_map, block_row_sz, block_col_sz, kv_heads)
        sizes = {"num_qo_heads": heads // kv_heads, "num_kv_heads": 1, "head_dim_qk": head_dim}
        options = PlanOptions.of(locals(), **sizes, causal=False)
        flat = block_sparse.causal_mask(lengths, matrix) if checks.boolean("causal", causal) else None
        mask = batch_plan.mask(flat, None, lengths, self.device)
        return PlanRequest(options, page_size=matrix.page_size, matrix=matrix, lengths=lengths, mask=mask)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Compute the attention of the planned mask.

        Parameters
        ----------
        q : `[num_qo_heads, qo_len, head_dim]` of the planned dtype. Copied where query heads share a kv head.
        k, v : `[num_kv_heads, kv_len, head_dim]` of the planned dtype. Copied unless their first two axes are one.
        out, lse : written instead of new tensors, in the order of the kernel: `[num_kv_heads * qo_len, group,
            head_dim]` and float32 `[num_kv_heads * qo_len, group]`, with group = num_qo_heads / num_kv_heads.
        return_lse : return `(out, lse)`.
        enable_pdl : as for `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        out `[num_qo_heads, qo_len, head_dim]`, or with `return_lse` the pair of it and the float32 lse `[num_qo_heads,
        qo_len]`, base 2. A token that sees no key has out 0 and lse -inf.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        result = self._run(RunArguments(q, (k, v), out=out, lse=lse, return_lse=return_lse, enable_pdl=enable_pdl))
        matrix = self._matrix
        if isinstance(result, tuple):
            return block_sparse.by_query_head(result[0], matrix), block_sparse.by_query_head(result[1], matrix)
        return block_sparse.by_query_head(result, matrix)

    def _launched(self, arguments: RunArguments) -> tuple[RunArguments, Before]:
        (q, (k, v), *_), matrix = arguments, self._matrix
        checks.apart((("out", arguments.out), ("lse", arguments.lse)), (("q", q), ("k", k), ("v", v)))
        group = self._in_force().settings.features.num_qo_heads
        cache = block_sparse.by_kv_head(q, k, v, group, matrix)
        by_kv_head = functools.partial(block_sparse.rows_by_kv_head, group, matrix)
        return arguments._replace(q=by_kv_head(q, ())[0], kv_cache=cache), by_kv_head

    @older_form
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """Run with other options than the planned ones: FlashInfer's older form of `run`."""
        return self._forward(locals())
