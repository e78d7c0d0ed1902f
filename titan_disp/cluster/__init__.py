"""This package plans a run, checks its nodes, and starts the run on this machine or
submits the run to SLURM.
"""
