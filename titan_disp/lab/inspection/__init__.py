"""This package measures the condensation of trained models: ``titan-disp
condensation``.
"""
