"""Attention kernels in CuTe DSL for NVIDIA GPUs, with FlashInfer's attention API.

Everything that users call is here; `cute_attn.prefill`, `.decode` and `.quantization` hold it under FlashInfer's
module names. CPU tensors run the same calls on a torch reference.
"""

try:
    from cute_attn.decode import (
        BatchDecodeWithPagedKVCacheWrapper,
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
        fast_decode_plan,
        single_decode_with_kv_cache,
    )
    from cute_attn.errors import (
        ArgumentError,
        ArgumentTypeError,
        ArtifactError,
        LayoutError,
        NotPlannedError,
        NotSupported,
        Refusal,
        RuntimeArgumentError,
    )
    from cute_attn.prefill import (
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
        single_prefill_with_kv_cache,
        single_prefill_with_kv_cache_return_lse,
    )
    from cute_attn.problem import Features
    from cute_attn.quantization import packbits, segment_packbits
    from cute_attn.select import explain
except ImportError as error:
    # Without torch there is no API, but `python -m cute_attn doctor` must live to say so, and artifacts are only data.
    _import_error = error

    def __getattr__(name: str) -> None:
        if name in __all__:
            raise ImportError(f"cute_attn.{name} is not available: {_import_error}") from _import_error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArtifactError",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "Features",
    "LayoutError",
    "NotPlannedError",
    "NotSupported",
    "Refusal",
    "RuntimeArgumentError",
    "explain",
    "fast_decode_plan",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
