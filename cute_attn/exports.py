"""The names of `import cute_attn`: those of the public modules, the errors, and what tells of a choice of backend."""

from cute_attn import attention, cascade, concat_ops, decode, errors, mla, page, prefill, quantization, sparse
from cute_attn.attention import *  # noqa: F403
from cute_attn.cascade import *  # noqa: F403
from cute_attn.concat_ops import *  # noqa: F403
from cute_attn.decode import *  # noqa: F403
from cute_attn.dispatch.explain import explain
from cute_attn.errors import *  # noqa: F403
from cute_attn.mla import *  # noqa: F403
from cute_attn.page import *  # noqa: F403
from cute_attn.prefill import *  # noqa: F403
from cute_attn.problem import Features
from cute_attn.quantization import *  # noqa: F403
from cute_attn.sparse import *  # noqa: F403
from cute_attn.utils import FP4Tensor, get_device_sm_count, get_trtllm_gen_multi_ctas_kv_counter_bytes

__all__ = [
    "FP4Tensor",
    "Features",
    "explain",
    "get_device_sm_count",
    "get_trtllm_gen_multi_ctas_kv_counter_bytes",
]
__all__ += attention.__all__
__all__ += cascade.__all__
__all__ += concat_ops.__all__
__all__ += decode.__all__
__all__ += errors.__all__
__all__ += mla.__all__
__all__ += page.__all__
__all__ += prefill.__all__
__all__ += quantization.__all__
__all__ += sparse.__all__
