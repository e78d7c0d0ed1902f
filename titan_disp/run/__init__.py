"""This package writes and reads a run's folder (``job.dump_folder``): what was run, where, and with what results."""
