"""Speed, measured so to be believed: run `perf.prefill`, `perf.decode`, `perf.overhead`, `perf.plan`, `perf.report`."""
