"""A run's config: keys as data, loading, checks, and the reference page."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import ``load_config`` when it is asked for: it needs TorchTitan, for which the reference page does not wait."""
    if name == "load_config":
        from titan_disp.config.load import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
