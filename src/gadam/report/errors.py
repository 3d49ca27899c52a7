"""The report's error."""

from gadam._errors import UserError

__all__ = ["ReportError"]


class ReportError(UserError, RuntimeError):
    """A report cannot be written. The message says why, and what to do."""
