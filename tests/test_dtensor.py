"""Checks that tensors are finite, without waiting for their device."""

from __future__ import annotations

import math

import pytest
import torch

from gadam import _dtensor
from gadam._dtensor import all_finite, finite_flag


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf])
def test_the_checks_for_the_host_and_for_devices_agree(dtype, bad):
    largest = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    tensors = [torch.randn(5).to(dtype), largest, torch.zeros((), dtype=dtype)]
    tensors[0][2] += bad
    for check in (_dtensor._finite_on_host, _dtensor._finite_on_device):
        flag = check(tensors)
        assert flag.dtype == torch.bool
        assert flag.dim() == 0
        assert bool(flag) == (bad == 0.0)
    assert bool(finite_flag([*tensors, torch.zeros(0, dtype=dtype)])) == (bad == 0.0)


def test_complex_empty_and_no_tensors():
    z = torch.ones(3, dtype=torch.complex64)
    assert all_finite([z])
    z[1] = torch.tensor(complex(0.0, math.nan))
    assert not all_finite([z])
    assert all_finite([])
    assert all_finite([torch.zeros(0)])
