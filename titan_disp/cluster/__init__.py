"""This package plans a run, checks its nodes, and starts it on this machine or submits
it to SLURM.
"""
