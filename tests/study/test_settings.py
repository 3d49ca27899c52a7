"""Settings out of range are refused."""

from __future__ import annotations

from typing import Any

import pytest

from gadam._errors import UserError
from gadam.study import Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probes": 1}, "probes must be at least 2, got 1"),
        ({"steps": 1}, "steps must be at least 2, got 1"),
        ({"grid": 2}, "grid must be at least 3, got 2"),
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"tolerance": 1.0}, "tolerance must be between 0 and 1, got 1.0"),
        ({"tolerance": 0.0}, "tolerance must be between 0 and 1, got 0.0"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        Settings(**changes)
