"""Named cases, one place that measures, results that describe themselves.

python -m benchmarks.run cpu        measures, writes benchmarks/results/*.json
python -m benchmarks.report         turns them into tables and plots
"""
