"""Attention under a mask of blocks whose sizes vary: `VariableBlockSparseAttentionWrapper`."""

from __future__ import annotations

import torch

from cute_attn.errors import ArgumentError
from cute_attn.request import batch_plan, block_sparse, checks
from cute_attn.request.batch_plan import PlanOptions
from cute_attn.request.batch_run import RunArguments
from cute_attn.request.plan_arguments import PlanRequest
from cute_attn.wrappers.base import DType, Result, makes_plan
from cute_attn.wrappers.block_sparse import BlocksWrapper


class VariableBlockSparseAttentionWrapper(BlocksWrapper):
    """Attention of one sequence under a mask of blocks whose sizes vary, each kv head with blocks of its own.

    A row of blocks of a kv head is one request of a paged batch; its pages are the keys of the blocks that it sees, so
    that only those are read. Pages are as large as divides the sizes of all blocks of columns, the faster the larger.
    Formulas: `single_prefill_with_kv_cache` with a custom mask per head.

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
        num_qo_heads, num_kv_heads, head_dim : at least 1; num_qo_heads must be a multiple of num_kv_heads, whose query
            heads share its blocks.
        causal : default False. True: token i sees keys j <= i + kv_len - qo_len of its blocks.
        pos_encoding_mode : refused unless "NONE".
        use_fp16_qk_reduction : a hint; scores are always accumulated in fp32.
        logits_soft_cap : soft cap of the logits; None (default), 0 or a negative number: none.
        sm_scale : any finite number. Default `head_dim ** -0.5`.
        rope_scale, rope_theta : > 0; without effect, as no position is encoded.
        non_blocking : a hint; copies are ordered on the current stream either way.
        q_data_type, kv_data_type : torch dtypes or their names. Default float16, and q's.

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
        options = PlanOptions(
            num_qo_heads=heads // kv_heads,
            num_kv_heads=1,
            head_dim_qk=head_dim,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        mask = block_sparse.variable_mask(causal, lengths, matrix, self.device)
        splits = batch_plan.splits(None, False, matrix.page_size)
        return PlanRequest(options, lengths, mask, splits, matrix.page_size, matrix=matrix)

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
        enable_pdl : False: no programmatic dependent launch. None (default) or True: where the GPU has it.

        Returns
        -------
        out `[num_qo_heads, qo_len, head_dim]`, or with `return_lse` the pair of it and the float32 lse `[num_qo_heads,
        qo_len]`, base 2. A token that sees no key has out 0 and lse -inf.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        plan = self._in_force()
        group, matrix = plan.settings.features.num_qo_heads, plan.request.matrix
        assert matrix is not None
        checks.apart((("out", out), ("lse", lse)), (("q", q), ("k", k), ("v", v)))  # before any is copied
        q, k, v = block_sparse.by_kv_head(q, k, v, group, matrix)
        result = self._run(RunArguments(q, (k, v), out=out, lse=lse, return_lse=return_lse, enable_pdl=enable_pdl))
        if isinstance(result, tuple):
            return block_sparse.by_query_head(result[0], matrix), block_sparse.by_query_head(result[1], matrix)
        return block_sparse.by_query_head(result, matrix)

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
        """Run with other options than the planned ones: FlashInfer's older form of `run`.

        Parameters
        ----------
        q, k, v : the tensors of `run`.
        pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta : options of `plan`,
            with the same defaults; they replace the planned ones.

        Returns
        -------
        What `run` returns.

        Raises
        ------
        NotPlannedError (no plan yet), and the errors of `plan` and `run`.
        """
        scales = {"sm_scale": sm_scale, "rope_scale": rope_scale, "rope_theta": rope_theta}
        self._run_with(pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap=logits_soft_cap, **scales)
        return self.run(q, k, v)
