"""Forward kernels of the flash-attn-4 wheel without a GPU: compiled by the DSL, launched on the emulator."""
