"""Scripts for measurements and experiments, each with its own options (python -m
benchmarks.NAME --help).
"""
