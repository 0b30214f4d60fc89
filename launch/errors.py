"""The one kind of error that a user of the launcher can cause."""


class ConfigurationError(ValueError):
    """Flags, files or an environment that cannot work; the message is one sentence that names the remedy."""
