"""Benchmarks: one module a question, run as ``python -m perf NAME [--json] [--tiny]``. Figures: perf/RESULTS.md."""
