"""Measurements and experiments: scripts, each with its own options (python -m benchmarks.NAME --help)."""
