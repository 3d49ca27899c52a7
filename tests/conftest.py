from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

# Timing differs between machines; a test that is slow once has not failed.
settings.register_profile(
    "gadam", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gadam")


@pytest.fixture(autouse=True)
def _same_every_time():
    torch.manual_seed(0)
