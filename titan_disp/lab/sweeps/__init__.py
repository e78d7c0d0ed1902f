"""A sweep trains many runs from one file. Each run is a point. Points that differ only in their seeds are a condition.

definition  reads the sweep's file and lists its points
folder      checks and writes the config of each point before it runs
state       finds out whether a point has finished
local       trains the points on this machine
submit      trains them as an array of SLURM jobs
comparison  compares conditions by one number per run (final_metric) and a test (sign_flip)
table       writes the comparison as Markdown, CSV and a picture (chart)
"""
