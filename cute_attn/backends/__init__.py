"""Backends: a module offers `prepare(settings) -> run`; `run(problem)` fills `problem.out` and `.lse`."""
