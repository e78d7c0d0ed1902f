"""A run's config: the metadata of its keys, loading, and the reference page."""
