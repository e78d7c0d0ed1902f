"""A run's config: keys as data, loading, and the reference page."""

from typing import Any


def __getattr__(name: str) -> Any:
    # ``load_config`` is imported when it is asked for, because it needs TorchTitan.
    if name != "load_config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from titan_disp.config.load import load_config

    return load_config
