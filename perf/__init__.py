"""Speed, measured so that it can be believed: run `perf.prefill`, `perf.decode`, `perf.overhead`, `perf.report`."""
