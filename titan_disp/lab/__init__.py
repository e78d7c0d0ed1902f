"""The lab reads the folders of runs, starts runs in sweeps, and writes data and its
index. The core never imports the lab.
"""
