"""Benchmarks: named cases, one module that measures, and results that describe themselves.

    python -m benchmarks.run cpu        measure, write benchmarks/results/*.json
    python -m benchmarks.report         make tables and plots of them

Tables and figures of papers are in `reproductions`.
"""
