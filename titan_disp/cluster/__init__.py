"""This package plans a run, checks its config and nodes, submits it, and stops it on request."""
