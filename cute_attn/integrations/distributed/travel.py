"""Keys and values that travel around a ring of ranks while attention runs on those that are there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cute_attn.integrations.distributed.ranks import Ranks, raw

KV = tuple[torch.Tensor, ...]

# One set that attention reads, one that is sent on, one that arrives. With two, messages could only start when the
# attention of a step has ended, and would find that of the next one on all SMs.
BUFFERS = 3


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
