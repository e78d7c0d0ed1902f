"""A run's config: keys as data, loading, and the reference page."""
