"""A run's config: keys as data, loading, checks, and the reference page."""

from titan_disp.config.load import load_config

__all__ = ["load_config"]
