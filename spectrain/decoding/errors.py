"""The one exception that reaches the user as a sentence."""


class UserError(ValueError):
    """A mistake in what the user asked for, not in the code.

    The message is one sentence that names the value, what was expected and what to change.
    Commands print it without a traceback and exit with code 2; see `spectrain.cli`.
    """


class AllRanksError(UserError):
    """An error that every rank raises alike, so that one of them can print it for all."""


def check_whole(name: str, value: object, least: int) -> None:
    """Raise UserError unless the option `name` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name}={value} must be a whole number of at least {least}")
