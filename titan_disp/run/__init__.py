"""This package keeps a run: its folder, its checkpoints, and what happens to it."""
