"""FlashInfer's hook that compiles a kernel for k and v of different strides, which every kernel here takes."""

from __future__ import annotations

from cute_attn.request import checks


class StrideVariants:
    """A wrapper of which callers may ask for that kernel."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: every kernel takes k and v of different strides. FlashInfer compiles another one for them.

        Parameters
        ----------
        variant : "independent".

        Raises
        ------
        LayoutError (another variant).
        """
        checks.choice("variant", variant, ("independent",))
