"""Micro-kernels: PTX of one form or family each, run on hardware (`record`) and held against the emulator."""
