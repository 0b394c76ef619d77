"""The attention function: called by every layer, it runs the layer as the descriptor of its mask says."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from cute_attn.decode import xqa_batch_decode_with_kv_cache
from cute_attn.dispatch import capabilities
from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.integrations import workspaces
from cute_attn.integrations.transformers import descriptors, plans
from cute_attn.integrations.transformers.descriptors import Rows, Run
from cute_attn.integrations.transformers.plans import Operands, token_pages
from cute_attn.request import checks
from cute_attn.request.settings import HALF

T = TypeVar("T")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer. Called by transformers, which registered it under a name.

    What a query sees is what `attention_mask` says: windows, chunks and padding are in it. Only where it is None, with
    models that make no mask, do `is_causal` and `sliding_window` decide.

    Parameters
    ----------
    module : the layer; its `is_causal` (default True) is read where `is_causal` is None.
    query, key, value : `[batch, heads, q_len, head_dim]`, `[batch, kv_heads, kv_len, head_dim]` and `[batch, kv_heads,
        kv_len, head_dim_vo]`, float16 or bfloat16, any strides with 1 on the last axis; key and value are not copied.
    attention_mask : what the registered mask function returned; or a mask of the caller, `[batch or 1, 1, q_len,
        kv_len]`, boolean or additive with 0 and -inf (or the dtype's least number).
    dropout : must be 0.
    scaling : factor of the scores, default head_dim ** -0.5.
    sliding_window : number of keys that a query sees, its own included; read if `attention_mask` is None.
    softcap : soft cap of the scores; None (default): none.
    s_aux : `[heads]`, one more term of each softmax denominator, in the natural-log domain.
    backend : as for the batch wrappers.
    options : `cu_seq_lens_q` (int32 `[sequences + 1]`) says where packed sequences start, which then see only
        themselves, whatever the mask is; `cu_seq_lens_k` must be the same. `head_mask`, `output_attentions`,
        `position_bias` and `cache` are refused; others say nothing about attention.

    Returns
    -------
    (out `[batch, q_len, heads, head_dim_vo]`, None).

    Raises
    ------
    NotSupported (a NotImplementedError: gradients, dropout, attention weights, dtypes), ArgumentError (a ValueError).
    """
    check_call(module, (query, key, value), dropout, options)
    operands = Operands(
        query,
        key,
        value,
        s_aux,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        float(softcap or 0.0),
        backend,
    )
    causal, window_left = True, -1
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        window_left = sliding_window - 1 if sliding_window else -1
    packed = options.get("cu_seq_lens_q")
    if torch.compiler.is_compiling():
        if packed is not None:
            refuse("cu_seq_lens_q under torch.compile", "lengths are on the host", "position_ids")
        from cute_attn.integrations.transformers import ops

        return ops.traced(operands, attention_mask, causal, window_left), None
    if attention_mask is not None:
        descriptors.renew(attention_mask, module)
    bounds: tuple[int, ...] = ()
    if packed is not None:
        descriptors.renew(packed, module)
        sizes = query.shape[0], query.shape[2], key.shape[2]
        bounds = _kept(packed, sizes, lambda: packed_bounds(packed, options.get("cu_seq_lens_k"), *sizes))
    return run(operands, attention_mask, causal, window_left, bounds=bounds), None


def run(
    operands: Operands,
    mask: torch.Tensor | None,
    causal: bool,
    window_left: int,
    bounds: tuple[int, ...] = (),
) -> torch.Tensor:
    """Run a layer; `causal` and `window_left` are read without a mask. Returns `[batch, q_len, heads, head_dim_vo]`.

    What is computed from the mask is kept on it for the layers that follow. `bounds`: of several packed sequences,
    which see only themselves whatever the mask says.
    """
    q, k = operands.q, operands.k
    if mask is None:
        return _run_unmasked(operands, causal, window_left, bounds)
    if descriptors.is_rows(mask):
        packed = mask
        rows = _kept(packed, "rows", lambda: Rows.unpack(packed))
        _check_extent(rows, operands)
        return plans.run_rows(operands, _parted(rows, bounds) if bounds else rows)
    if not descriptors.is_decode(mask):
        check_mask(mask, q, k)
        if q.shape[2] > 1:
            return plans.run_mask(operands, mask, _kept(mask, "identity", object), bounds)
        exact = mask
        mask = _kept(exact, "decode", lambda: as_decode(exact, q.shape[0]))
    decode = mask
    if runs_on_xqa(operands):
        where = ("tables", k.shape, k.stride(), operands.v.stride())
        lengths, tables = _kept(decode, where, lambda: decode_tables(operands, decode))
        return run_decode(operands, lengths, tables)
    target = _kept(decode, "planned", lambda: _planned_decode(operands, decode))
    if isinstance(target, Rows):
        return plans.run_rows(operands, target)
    return plans.run_mask(operands, target, _kept(target, "identity", object))


def _run_unmasked(operands: Operands, causal: bool, window_left: int, bounds: tuple[int, ...]) -> torch.Tensor:
    """Run a layer whose queries are the newest tokens, if it is causal, of as many keys in every request."""
    (batch, _, q_len, _), kv_len = operands.q.shape, operands.k.shape[2]
    if causal or window_left < 0:
        rows = descriptors.whole(batch, q_len, (kv_len,) * batch, causal, window_left)
        return plans.run_rows(operands, _parted(rows, bounds) if bounds else rows)
    positions = torch.arange(kv_len, device=operands.q.device)
    band = (positions[kv_len - q_len :, None] - positions).abs() <= window_left
    return plans.run_mask(operands, band[None, None], ("band", window_left), bounds)


@functools.lru_cache(16)
def _parted(rows: Rows, bounds: tuple[int, ...]) -> Rows:
    """Part the runs of one row of tokens at the bounds of packed sequences, once for all layers."""
    if any((run.q_start, run.q_len) != (run.kv_start, run.kv_len) for run in rows.runs):
        refuse("cu_seq_lens_q with padding in attention_mask", "tokens are packed", "sequences without padding")
    starts = sorted({*bounds, *(run.q_start for run in rows.runs)})
    return rows._replace(runs=tuple(Run(a, b - a, 0, a, b - a) for a, b in itertools.pairwise(starts)))


def _check_extent(rows: Rows, operands: Operands) -> None:
    batch, _, q_len, _ = operands.q.shape
    last, end = rows.runs[-1], max(run.kv_start + run.kv_len for run in rows.runs)
    if last.q_start + last.q_len != batch * q_len or end > operands.k.shape[2]:
        raise ArgumentError(
            f"attention_mask describes {last.q_start + last.q_len} query rows and {end} keys, got query "
            f"{list(operands.q.shape)} and key {list(operands.k.shape)}: a layer was given the mask of another call"
        )


# ---- one query token per request


def runs_on_xqa(operands: Operands) -> bool:
    """Tell whether the decode kernel, which needs no plan, takes the layer; the batch wrappers take all of them."""
    width, name = operands.q.shape[3], operands.backend
    fits = operands.v.shape[3] == width and capabilities.is_head_dim(width, 8 * operands.k.element_size())
    return fits and operands.soft_cap == 0 and name in ("auto", "xqa", "reference", "emulator")


def as_decode(mask: torch.Tensor, batch: int) -> torch.Tensor:
    """Return the decode descriptor of an exact mask of one query token."""
    return descriptors.decode_of_mask(descriptors.visible(mask)[:, 0, 0].expand(batch, -1))


def decode_tables(operands: Operands, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key counts `[batch]` and page tables `[batch, width]`; with width 1 a page is a request, else a token."""
    batch, kv_len = operands.q.shape[0], operands.k.shape[2]
    lengths, tables = descriptors.split_decode(mask, batch)
    if tables.shape[1] == 1:
        return lengths, tables
    if tables.shape[1] != kv_len:
        raise ArgumentError(f"attention_mask describes {tables.shape[1]} keys, got key {list(operands.k.shape)}")
    pages = token_pages(operands.k, operands.v)
    first = torch.arange(batch, dtype=torch.int32, device=mask.device)[:, None] * pages.request
    return lengths, tables * pages.token + first


def run_decode(operands: Operands, lengths: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Run the decode kernel over what `decode_tables` returned."""
    q, k, v = operands.q, operands.k, operands.v
    if tables.shape[1] > 1:
        pages = token_pages(k, v)
        k, v = pages.k, pages.v
    out = xqa_batch_decode_with_kv_cache(
        q[:, :, 0],
        (k, v),
        workspaces.too_small(q.device),
        tables,
        lengths,
        operands.k.shape[2],
        operands.scale,
        sinks=operands.sinks,
        kv_layout="HND",
        backend=operands.backend,
    )
    assert isinstance(out, torch.Tensor)
    return out[:, None]


def _planned_decode(operands: Operands, mask: torch.Tensor) -> Rows | torch.Tensor:
    """Return what the batch wrappers plan for a decode descriptor. Costs a synchronisation on a GPU."""
    batch, kv_len = operands.q.shape[0], operands.k.shape[2]
    lengths, tables = descriptors.split_decode(mask.cpu(), batch)
    if tables.shape[1] == 1:
        return descriptors.whole(batch, 1, tuple(lengths.tolist()), False, -1)
    runs = []
    for b, (count, keys) in enumerate(zip(lengths.tolist(), tables.tolist(), strict=True)):
        first = keys[0] if count else 0
        if count and keys[count - 1] - first != count - 1:
            break
        runs.append(Run(b, 1, b, first, count))
    else:
        return Rows(False, -1, tuple(runs))
    seen = tables.new_zeros(batch, kv_len + 1, dtype=torch.bool)
    live = torch.arange(tables.shape[1], device=tables.device) < lengths[:, None]
    seen.scatter_(1, torch.where(live, tables, kv_len).long(), True)
    return seen[:, None, None, :-1].to(mask.device)


def _kept(tensor: torch.Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` computes from a tensor's values, kept on it until they change.

    Inference tensors do not count their changes: of them only those keep anything that the mask function has marked.
    """
    memo: descriptors.Memo | None = getattr(tensor, descriptors.MEMO, None)
    if memo is None and tensor.is_inference():
        return make()
    if memo is None or memo.version != descriptors.version(tensor):
        memo = descriptors.renewed(tensor)
    if key not in memo.found:
        memo.found[key] = make()
    found: T = memo.found[key]
    return found


# ---- what is refused, before anything runs: each with the reason and what to use instead


WEIGHTS = "attention weights are never in memory"
EAGER = 'attn_implementation="eager"'
REFUSED = {
    "head_mask": ("head_mask", WEIGHTS, EAGER),
    "position_bias": ("position_bias", "scores get no bias", EAGER),
    "cache": ("the paged cache of continuous batching", "transformers asks for a flash implementation", "generate()"),
}
refuse = functools.partial(checks.refuse, who="cute_attn")


def check_call(module: torch.nn.Module, tensors: Tensors, dropout: float, options: Any) -> None:
    """Refuse what the kernels cannot do: gradients, dropout, weights as output, biases, other dtypes."""
    if dropout:
        refuse(f"dropout = {dropout}", "the kernels are for inference", f"model.eval(), or {EAGER} to train")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        where = "in training mode" if module.training else "with gradients"
        refuse(f"a forward pass {where}", "no backward pass exists", f"torch.no_grad(), or {EAGER} to train")
    if options.get("output_attentions"):
        refuse("output_attentions=True", WEIGHTS, EAGER)
    for name, refusal in REFUSED.items():
        if options.get(name) is not None:
            refuse(*refusal)
    if options.get("cu_seq_lens_q") is None and options.get("cu_seq_lens_k") is not None:
        raise ArgumentError("cu_seq_lens_q must be given with cu_seq_lens_k, got None")
    q, k, v = tensors
    for name, x in (("query", q), ("key", k), ("value", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            raise ArgumentTypeError(f"{name} must be a tensor [batch, heads, tokens, head_dim]")
    if q.dtype not in HALF:
        refuse(f"query of {q.dtype}", "the matrix instructions take 16 bits", "from_pretrained(dtype=torch.bfloat16)")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ArgumentError(f"query, key and value must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")


def check_mask(mask: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Check the shape of an exact mask."""
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[1] != 1 or shape[0] not in (1, q.shape[0]) or shape[2:] != (q.shape[2], k.shape[2]):
        raise ArgumentError(
            f"attention_mask must have shape [batch or 1, 1, q_len, kv_len] = [{q.shape[0]}, 1, {q.shape[2]}, "
            f"{k.shape[2]}], the same for all heads, got {list(shape)}"
        )


def packed_bounds(q_lens: torch.Tensor, k_lens: Any, batch: int, q_len: int, kv_len: int) -> tuple[int, ...]:
    """Return the bounds of packed sequences: one row of tokens, without a cache; of a single one none."""
    found = tuple(q_lens.tolist())
    if (
        batch != 1
        or kv_len != q_len
        or not found
        or (found[0], found[-1]) != (0, q_len)
        or list(found) != sorted(found)
    ):
        raise ArgumentError(
            f"cu_seq_lens_q must go from 0 to the tokens of one row, {q_len}, without cached keys, got {list(found)} "
            f"for {batch} rows of {q_len} queries and {kv_len} keys"
        )
    if k_lens is not None and k_lens is not q_lens and tuple(k_lens.tolist()) != found:
        raise ArgumentError(f"cu_seq_lens_k must be cu_seq_lens_q, {list(found)}, or None, got {k_lens.tolist()}")
    return found if len(set(found)) > 2 else ()
