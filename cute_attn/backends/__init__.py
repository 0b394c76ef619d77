"""Backends: a module offers `prepare(settings) -> run`; `run(problem)` fills `problem.out` and `.lse`.

For batches it offers `plan(settings, lengths, limits, staging) -> run`, which runs any number of `BatchProblem`s,
and `workspace(settings, lengths, limits)`, the bytes of workspace and records that such a plan would like to have.
"""
