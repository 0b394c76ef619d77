"""Ring attention over a sequence that is sharded by tokens (context parallelism): `ring_prefill`.

In step s a rank attends to the keys of rank r - s while those of rank r - s - 1 arrive. Under a causal mask the zig-zag
chunks make every step the same work on every rank, in one call without a mask (c: tokens of a chunk):

    step 0                 own keys, causal                            2 c * 2 c, half of it hidden
    keys of a lower rank   all queries, first chunk of the keys        2 c * c
    keys of a higher rank  second chunk of the queries, all keys       c * 2 c

All other pairs of chunks are hidden, and skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cute_attn.errors import ArgumentError
from cute_attn.integrations.distributed.ranks import Ranks, check_tokens, raw
from cute_attn.integrations.distributed.zigzag import chunk_lengths, halves, resolved_length
from cute_attn.prefill import single_prefill_with_kv_cache
from cute_attn.request import checks

KV = tuple[torch.Tensor, ...]

# One set that attention reads, one that is sent on, one that arrives. With two, messages could only start when the
# attention of a step has ended, and would find that of the next one on all SMs.
BUFFERS = 3


def ring_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    seq_len: int | None = None,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    group: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of this rank's query tokens over the keys of all ranks. One request, no gradients.

    Tokens are sharded as by `shard_zigzag`: rank r holds chunks r and 2 * world_size - 1 - r of the sequence, one after
    the other. Keys and values travel around the ring as they are, in batches of point-to-point messages from a stream
    of their own, beside the attention of the step. Partial results are fp32, and so is their merging (`lerp` of the
    outputs): the result is rounded once, to `o_dtype`.

    Parameters
    ----------
    q : `[tokens, num_qo_heads, head_dim_qk]`, tokens of this rank, as for `single_prefill_with_kv_cache`.
    k, v : `[tokens, num_kv_heads, head_dim]`, the same tokens; dtype and heads as on every other rank. Tensors that
        are not contiguous are copied.
    causal : default True: a token sees the keys up to its own position in the sequence. False: all keys.
    seq_len : tokens of all ranks. Default: as many on every rank, in two chunks of the same length. It is needed where
        2 * world_size does not divide it: chunks then differ by one token.
    sm_scale, logits_soft_cap : as for `single_prefill_with_kv_cache`.
    sinks : floating-point `[num_qo_heads]`, natural-log domain, the same on every rank: one more term of each
        denominator, once.
    o_dtype : dtype of the output: float16, bfloat16 or float32. Default: q's, and bfloat16 for fp8 q.
    return_lse : return `(out, lse)`. Default False.
    backend : as for `single_prefill_with_kv_cache`.
    group : process group, which must support messages on q's device. Default: all ranks.

    Sliding windows and position encodings are not offered: the attention of a step knows no positions in the sequence.
    `ulysses_attention` has windows; rotate q and k first, at the positions of `zigzag_positions`.

    Returns
    -------
    out `[tokens, num_qo_heads, head_dim_vo]`, or with `return_lse` the pair of it and the fp32 **base-2** lse
    `[tokens, num_qo_heads]`.

    Raises
    ------
    ArgumentTypeError, ArgumentError (shape, dtype, seq_len, group), and the errors of `single_prefill_with_kv_cache`.
    All are raised before a message is sent; on one rank only, they leave the others waiting.
    """
    ranks, causal = Ranks.of(group), checks.boolean("causal", causal)
    for name, x in (("q", q), ("k", k), ("v", v)):  # what the ring relies on; the attention call checks the rest
        check_tokens(name, x)
        if x.shape[0] != q.shape[0]:
            raise ArgumentError(f"{name} must have q's {q.shape[0]} tokens, got {checks.describe(x)}")
    chunks = chunk_lengths(resolved_length(seq_len, q.shape[0], ranks, "q"), ranks.world_size)
    options: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap, "backend": backend}
    out_dtype = _out_dtype(q, o_dtype)

    def attend(rows: slice, keys: slice, kv: KV, **own: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return single_prefill_with_kv_cache(  # type: ignore[return-value]
            q[rows], kv[0][keys], kv[1][keys], o_dtype=torch.float32, return_lse=True, **options, **own
        )

    nothing = slice(0, 0)
    attend(nothing, nothing, (k, v), causal=causal, sinks=sinks)  # raises what is wrong before messages are under way
    everything, tokens = slice(None), [sum(halves(chunks, rank)) for rank in range(ranks.world_size)]
    steps = around_the_ring((k.contiguous(), v.contiguous()), tokens, ranks)
    o, lse = attend(everything, everything, next(steps), causal=causal, sinks=sinks)  # a sink is a key of value 0
    for step, held in enumerate(steps, 1):
        rows, keys = visible(chunks, causal, ranks.rank, (ranks.rank - step) % ranks.world_size)
        if o[rows].shape[0] and held[0][keys].shape[0]:
            merge_in_place(o[rows], lse[rows], *attend(rows, keys, held))
    out = o.to(out_dtype)
    return (out, lse) if return_lse else out


def visible(chunks: list[int], causal: bool, rank: int, source: int) -> tuple[slice, slice]:
    """Return the query tokens of a rank that see keys of another one, `source`, and the keys that all of them see."""
    everything = slice(None)
    if not causal:
        return everything, everything
    if source < rank:
        return everything, slice(0, chunks[source])
    return slice(chunks[rank], None), everything


def merge_in_place(o: torch.Tensor, lse: torch.Tensor, o_other: torch.Tensor, lse_other: torch.Tensor) -> None:
    """Merge fp32 states over disjoint keys into (o, lse), whose rows all see a key.

    The formula of `merge_state_in_place`, which also takes rows without keys and for that passes over o several times;
    this does once: a merge of 32768 tokens, 32 heads and 128 dimensions moves 1.6 GB.
    """
    merged = torch.logaddexp2(lse, lse_other)
    o.lerp_(o_other, torch.exp2(lse_other - merged)[..., None])
    lse.copy_(merged)


def _out_dtype(q: torch.Tensor, o_dtype: Any) -> torch.dtype:
    accepted = (torch.float16, torch.bfloat16, torch.float32)
    if o_dtype is not None:
        checks.dtype("o_dtype", o_dtype, accepted)
        return o_dtype
    return q.dtype if q.dtype in accepted else torch.bfloat16


# ---- keys and values that travel while attention runs on those that are there


def around_the_ring(kv: KV, tokens: Sequence[int], ranks: Ranks) -> Iterator[KV]:
    """Yield the keys and values of this rank, then those of rank - 1, rank - 2 and so on, until those of all ranks.

    What the caller launches on the current stream before it asks for the next ones runs beside the messages that bring
    them: these wait on a stream of their own, and only for the buffer that they overwrite.

    `kv`: contiguous tensors with tokens on their first axis. `tokens`: of each rank.
    """
    buffers = [tuple(x.new_empty(max(tokens), *x.shape[1:]) for x in kv) for _ in range(ranks.world_size - 1)[:BUFFERS]]
    streams = Streams(kv[0].device)
    messages: list[Any] = []
    read: list[Any] = []  # events: the work of a step has been launched on the current stream
    for step in range(ranks.world_size):
        arriving: KV = ()
        with contextlib.nullcontext() if streams.side is None else torch.cuda.stream(streams.side):
            for message in messages:
                message.wait()  # on a GPU the side stream waits, not the host
            arrived = streams.mark()
            if step + 1 < ranks.world_size:
                if step >= BUFFERS:
                    streams.wait(read[step - BUFFERS + 1])
                count = tokens[(ranks.rank - step - 1) % ranks.world_size]
                arriving = tuple(x[:count] for x in buffers[step % BUFFERS])
                messages = exchange(kv, arriving, ranks)
        streams.wait(arrived)
        yield kv
        read.append(streams.mark())
        kv = arriving


def exchange(kv: KV, arriving: KV, ranks: Ranks) -> list[Any]:
    """Start to send `kv` to the next rank and to receive `arriving` from the previous one. Nothing empty is sent."""
    group, following, before = ranks.group, ranks.peer(ranks.rank + 1), ranks.peer(ranks.rank - 1)
    operations = [dist.P2POp(dist.isend, raw(x), following, group, tag) for tag, x in enumerate(kv) if x.numel()]
    operations += [dist.P2POp(dist.irecv, raw(x), before, group, tag) for tag, x in enumerate(arriving) if x.numel()]
    return dist.batch_isend_irecv(operations) if operations else []


class Streams:
    """The stream from which messages start, beside the current one, whose work until now it follows. On a CPU there is
    none: a wait blocks the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.side = device, None
        if device.type == "cuda":
            self.side = torch.cuda.Stream(device)
            self.side.wait_stream(torch.cuda.current_stream(device))

    def mark(self) -> Any:
        """Return an event at the end of the current stream."""
        return None if self.side is None else torch.cuda.current_stream(self._device).record_event()

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
