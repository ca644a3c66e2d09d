"""Errors that a user can cause, each with the exit status of the command line."""

INTERRUPTED = 130
"""Exit status after Ctrl-C or a polite kill."""


class ArchsearchError(Exception):
    """Base of every error that ends a command with one clear line and no traceback."""

    exit_status = 1


class ConfigError(ArchsearchError):
    """The config (file, field, value) is wrong, or names a path where nothing lies; the message says what is allowed."""

    exit_status = 2


class EnvironmentFault(ArchsearchError):
    """The machine cannot do what the config asks: a missing or damaged model, package, GPU, disk or memory."""

    exit_status = 3


class FieldFault(EnvironmentFault):
    """The same, of one field of the config, with which the message begins."""


class RunFault(ArchsearchError):
    """The run went on to its end, but some trials failed."""

    exit_status = 4
