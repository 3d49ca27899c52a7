"""Averages of models under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import gadam
from average_models import BATCHES, fit, small_model


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_compiled_forward_sees_the_averaged_weights(backend):
    """Compiled before, inside or after the block, and without compiling again."""
    torch.compiler.reset()
    model = small_model().eval()
    counter = CompileCounterWithBackend(backend)
    compiled: Any = torch.compile(model, backend=counter)
    optimizer = gadam.Gadam(model.parameters(), 0.05, average=gadam.Averaging(start=1))
    fit(model, optimizer, 5)
    model.eval()
    x = BATCHES[0]
    with torch.no_grad():
        raw = compiled(x)
        compilations = counter.frame_count
        for wrapper in (model, compiled):
            with optimizer.average.applied(wrapper, batchnorm=False):
                inside = compiled(x)
                torch.testing.assert_close(inside, model(x))
            assert not torch.allclose(inside, raw)
            torch.testing.assert_close(compiled(x), raw, rtol=0, atol=0)
        assert counter.frame_count == compilations
        optimizer.average.copy_to(compiled, batchnorm=False)
        torch.testing.assert_close(compiled(x), inside)


def test_batchnorm_is_refreshed_through_the_compiled_model():
    model = small_model()
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = gadam.Gadam(model.parameters(), 0.05, average=gadam.Averaging(start=1))
    fit(model, optimizer, 3)
    with torch.no_grad(), optimizer.average.applied(compiled, batchnorm=BATCHES):
        through = model.state_dict()["1.running_var"].clone()
    with torch.no_grad(), optimizer.average.applied(model, batchnorm=BATCHES):
        assert torch.equal(model.state_dict()["1.running_var"], through)


def test_names_under_compile(tmp_path):
    """A state dict fits the model it was asked for. A file has the names of the bare model."""
    from safetensors.torch import load_file

    def inner() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

    layer: Any = torch.compile(inner(), backend="eager")
    model = nn.Sequential(layer, nn.Linear(1, 1))
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = gadam.Gadam(model.parameters(), 0.05, average=gadam.Averaging(start=1))
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    average = optimizer.average
    for module in (model, compiled):
        state = average.model_state_dict(module)
        assert state.keys() == module.state_dict().keys()
        module.load_state_dict(state)
    path = tmp_path / "model.safetensors"
    average.save_model(compiled, path)
    bare = nn.Sequential(inner(), nn.Linear(1, 1))
    assert load_file(path).keys() == bare.state_dict().keys()
    bare.load_state_dict(load_file(path))
    for p, q in zip(bare.parameters(), model.parameters()):
        assert torch.equal(p, q)
