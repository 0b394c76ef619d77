"""Backends: a module offers `prepare(features) -> run`; `run(problem)` fills `problem.out` and `.lse`."""
