"""This package measures and draws how condensed embeddings are.

It does not import TorchTitan.
"""
