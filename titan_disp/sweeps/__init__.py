"""Sweeps: many runs from one file. (``run/sweep.py`` is something else: it deletes what unfinished saves left.)

    definition  the sweep's file, and the points that it stands for
    folder      a point's config, checked and written down, and what became of the point
    local       train the points on this machine
    submit      train them as an array of SLURM jobs
    table       compare them: statistics (sign_flip, comparison), numbers of a run (final), pictures (chart)
"""
