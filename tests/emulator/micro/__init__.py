"""Micro-kernels: PTX of one form or family each, run on hardware (`record`) and compared with the emulator."""
