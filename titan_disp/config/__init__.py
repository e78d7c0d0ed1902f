"""A run's config: keys as data, loading, checks, and the reference page."""
