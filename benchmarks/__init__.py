"""Benchmarks: each script writes one JSON into ``results/``; ``render.py`` makes RESULTS.md from them."""
