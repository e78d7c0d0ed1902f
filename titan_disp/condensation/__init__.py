"""This package measures and draws how condensed embeddings are.

The package does not import TorchTitan.
"""
