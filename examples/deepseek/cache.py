"""Pages of latent rows: 512 latent columns of each token, and 64 rotated ones."""

from __future__ import annotations

from torch import Tensor

from cute_attn import append_paged_mla_kv_cache
from examples.llama.cache import PagedCache, PageIndex

from .model import LATENT, ROPE


class LatentCache(PagedCache):
    """The rows of all layers, which all heads share."""

    def page_shape(self) -> tuple[int, ...]:
        """Return the shape of a page."""
        return self.page_size, LATENT + ROPE

    def parts(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's latent and rotated columns."""
        ckv, kpe = self.layers[layer].split([LATENT, ROPE], dim=-1)
        return ckv, kpe

    def append_latent(self, layer: int, latent: Tensor, k_pe: Tensor, index: PageIndex) -> None:
        """Write the new tokens' rows to their pages."""
        append_paged_mla_kv_cache(latent, k_pe, *index[:2], *self.parts(layer), *index[2:])
