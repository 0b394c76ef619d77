"""Layout of the int32 records of a batch's plan: written by the schedule, read by CTAs.

A work item is one query tile of one request against one range of its keys, for every kv head: a launch processes
`items * num_kv_heads` tiles, kv heads innermost. A merge item is one query tile with several splits. Records of zeros
mean "no work": a launch of fixed size (CUDA graphs) is padded with them to its capacity.

A slot for partials holds the normalised output and lse, in fp32, of the `tile.rows` packed rows of every kv head; row
r of kv head h in slot s is row `(s * num_kv_heads + h) * tile.rows + r` of the workspace's o, and of its lse.
"""

from __future__ import annotations

from typing import NamedTuple

ITEM_INTS = 16
MERGE_INTS = 8
NO_PARTIAL = -1
MAX_SPLITS = 128  # per merge: each lane of a warp of the combine kernel holds the weights of 4 splits


class Item(NamedTuple):
    """Fields of a work item, in order. Packed row = token * group + head within the GQA group."""

    qo_start: int  # row of q, out and lse that holds the request's token 0
    qo_len: int  # 0: no work
    kv_start: int  # ragged: row of k and v of its token 0; paged: index of its first page in kv_indices
    kv_len: int
    first_row: int  # first packed row of the query tile
    kv_begin: int  # keys of this item: tokens [kv_begin, kv_end); kv_begin is a multiple of the tile's columns
    kv_end: int
    partial: int  # slot of its partial; NO_PARTIAL: the item covers all visible keys and writes the output itself
    mask_low: int  # byte offset of the request's bits in the packed mask, low and high 32 bits
    mask_high: int
    request: int  # index in the batch


class Merge(NamedTuple):
    """Fields of a merge item, in order."""

    qo_start: int
    qo_len: int  # 0: no work
    first_row: int
    first_partial: int  # slots [first_partial, first_partial + num_splits)
    num_splits: int
