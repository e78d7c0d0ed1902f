"""This package runs lm-evaluation-harness on models and compares them document by
document: ``titan-disp evaluate``.
"""
