"""The one exception that reaches the user as a sentence."""


class UserError(ValueError):
    """A mistake in what the user asked for, not in the code.

    The message is one sentence that names the value, what was expected and what to change.
    Entry points print it without a traceback and exit with code 2; see `spectrain.cli`.
    """
