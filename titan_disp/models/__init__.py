"""This package holds what all models share.

It imports none of them: each is a folder of its own, listed in ``registry``.
"""
