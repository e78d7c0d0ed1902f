"""This package manages a run: its folder, checkpoints, logs, and the requests to stop."""
