"""A run's folder (``job.dump_folder``): what was run, where, and with what results."""
