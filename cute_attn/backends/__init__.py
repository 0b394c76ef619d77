"""Backends: a module offers `prepare(settings) -> run`; `run(problem)` fills `problem.out` and `.lse`.

For batches it offers `plan(settings, lengths, limits, staging) -> run`, which runs any number of `BatchProblem`s.
"""
