"""FlashInfer's wrapper of causal masks with ranges of tokens that see each other, which is refused."""

from __future__ import annotations

from typing import Any

from cute_attn.errors import NotSupported, Refusal


class BatchPrefillWithCausalBidirectionalRangesWrapper:
    """Refuse FlashInfer's wrapper of causal attention whose tokens also see all keys of a range of their own.

    Its mask is an argument of `run`, which no kernel of this library reads. The same mask as `custom_mask` of
    `BatchPrefillWithPagedKVCacheWrapper.plan` gives the same result.

    Parameters
    ----------
    args, kwargs : any.

    Raises
    ------
    NotSupported (a NotImplementedError), always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotSupported(
            [
                Refusal(
                    "every backend",
                    "BatchPrefillWithCausalBidirectionalRangesWrapper",
                    "no kernel reads ranges of keys per query token",
                    "the same mask as custom_mask of BatchPrefillWithPagedKVCacheWrapper.plan",
                )
            ]
        )
