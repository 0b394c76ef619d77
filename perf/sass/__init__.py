"""Counts of executed machine instructions without a GPU: executions of each line of PTX on the emulator, mapped to the
SASS that ptxas makes of the same text."""
