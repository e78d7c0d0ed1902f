"""Sweeps: many runs from one file. (``run/sweep.py`` is something else: it deletes what unfinished saves left.)

definition  the sweep's file, and the points that it stands for
folder      a point's config, checked and written down before it runs
state       what became of a point
local       train the points on this machine
submit      train them as an array of SLURM jobs
comparison  conditions and their differences, from single numbers of runs (final) and a test (sign_flip)
table       the comparison as Markdown, CSV and a picture (chart)
"""
