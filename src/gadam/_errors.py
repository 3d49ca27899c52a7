"""The base class of errors that a user can fix."""

__all__ = ["UserError"]


class UserError(Exception):
    """An error that the user can fix.

    The message is one sentence: what is wrong, and what to do. Commands print it without a
    traceback.
    """
