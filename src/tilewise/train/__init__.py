"""The training system: configuration, data, models, the loop, evaluation, checkpoints, the report.

Nothing in the library imports this package. Its command line is ``tilewise`` (see `tilewise.train.cli`).
"""
