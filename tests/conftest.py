from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

# Timing differs between machines. A slow example is not a failure.
settings.register_profile(
    "gadam", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gadam")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
