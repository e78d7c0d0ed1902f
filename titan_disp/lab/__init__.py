"""The lab reads the folders of runs, and starts runs in sweeps. The core never imports it."""
