from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings

import quick_processes

# Timing differs between machines. A slow example is not a failure.
# `make test-all` selects the second profile. A test that needs more examples than others states a
# multiple of the profile's. `make test` draws the same examples each time, so that a failure is due
# to the change under test. `make test-all` looks for new examples.
for _name, _examples in (("quick", 25), ("thorough", 200)):
    settings.register_profile(
        _name,
        deadline=None,
        max_examples=_examples,
        derandomize=_name == "quick",
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def quick_workers():
    """Fork the workers of sweeps in this module. tests/train/test_sweep.py tests spawned ones."""
    with quick_processes.for_sweeps():
        yield


@pytest.fixture
def short_texts(monkeypatch):
    """Shorten the texts on which language models are evaluated: they take most of a short run."""
    from gadam.train.data import text
    from gadam.train.tasks import language

    whole = text._toy_language()
    short = replace(whole, validation=whole.validation[:1000], test=whole.test[:1000])
    monkeypatch.setattr(text, "_toy_language", lambda: short)
    language._load_corpus.cache_clear()
    yield
    language._load_corpus.cache_clear()
