"""The one exception for what the user can mend."""


class ConfigError(ValueError):
    """Bad configuration or input, found before training starts.

    The message says what was found, what was expected and what to change. The launchers print it once, without a
    traceback, and exit with ``EXIT_CODE``.
    """


EXIT_CODE = 2
