"""A sweep trains many runs from one file.

Each run is a point. Points that differ only in seeds are a condition.
"""
