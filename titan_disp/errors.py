"""The one exception for what the user can mend."""


class ConfigError(ValueError):
    """Bad configuration or input, found before training starts.

    The message says what was found, what was expected and what to change. The launchers print it once, without a
    traceback, and exit with ``EXIT_CODE``.
    """


class DataError(ConfigError):
    """Bad data met by one rank in the middle of a run; that rank says so, whichever it is."""


class InUseError(ConfigError):
    """Another job uses the run folder."""


EXIT_CODE = 2
IN_USE_EXIT_CODE = 3


class NonFiniteError(ConfigError):
    """Too many steps in a row without a finite loss or gradient."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be saved, or none that can be loaded."""
