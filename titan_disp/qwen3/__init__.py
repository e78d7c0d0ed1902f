"""Qwen3 that returns intermediate activations, and its parallelization."""
