"""BatchNorm statistics, compared with those of one giant batch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import update_bn

import gadam
from average_models import BATCHES, fit, small_model
from contract import same


def giant_batch(layer: nn.Module, data: torch.Tensor) -> Any:
    """Return a copy of the layer after it has seen all data as one batch."""
    one = copy.deepcopy(layer)
    one.momentum = 1.0  # type: ignore[assignment]
    one.train()
    one(data)
    return one


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1),
    shift=st.sampled_from([0.0, 3.0, 100.0]),
    kind=st.sampled_from(["1d", "1d-long", "2d", "3d"]),
    seed=st.integers(0, 1000),
)
def test_equals_one_giant_batch(sizes, shift, kind, seed):
    """Use ragged batches, down to one sample, and means that drift between batches."""
    torch.manual_seed(seed)
    layer: Any
    layer, trailing = {
        "1d": (nn.BatchNorm1d(3), ()),
        "1d-long": (nn.BatchNorm1d(3), (5,)),
        "2d": (nn.BatchNorm2d(3), (2, 3)),
        "3d": (nn.BatchNorm3d(3), (2, 1, 2)),
    }[kind]
    layer.double()
    batches = [
        torch.randn(size, 3, *trailing, dtype=torch.float64) + shift * i
        for i, size in enumerate(sizes)
    ]
    expected = giant_batch(layer, torch.cat(batches))
    gadam.refresh_batchnorm(layer, batches)
    torch.testing.assert_close(layer.running_mean, expected.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.running_var, expected.running_var, rtol=1e-6, atol=1e-6)
    assert layer.num_batches_tracked == len(sizes)


def test_float32_is_accurate_to_one_millionth():
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(4)
    batches = [torch.randn(n, 4, 8, 8) * 2 + 5 + 0.1 * n for n in (64, 64, 64, 7)]
    expected = giant_batch(nn.BatchNorm2d(4).double(), torch.cat(batches).double())
    gadam.refresh_batchnorm(layer, batches)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    torch.testing.assert_close(
        layer.running_mean.double(), expected.running_mean, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        layer.running_var.double(), expected.running_var, rtol=1e-6, atol=1e-6
    )
    naive = nn.BatchNorm2d(4)
    update_bn(batches, naive)
    assert naive.running_var is not None
    error = (naive.running_var.double() - expected.running_var).abs().max()
    assert error > 1e-3  # it averages averages and loses the variance between batches


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm1 = nn.BatchNorm1d(6, momentum=0.3)
        self.dropout = nn.Dropout(0.5)
        self.norm2 = nn.BatchNorm1d(6, momentum=None)
        self.frozen = nn.Identity()
        self.unused = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = F.dropout(self.norm1(self.first(x)), 0.5, self.training)
        return self.norm2(self.dropout(x)) * scale


def batches_for(net: nn.Module) -> list[torch.Tensor]:
    return [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (8, 8, 3)]


def test_layers_normalize_by_batch_and_dropout_is_off():
    torch.manual_seed(0)
    net = Net()
    net.train()
    inputs: list[torch.Tensor] = []
    for batch in batches_for(net):
        hidden = net.first(batch)
        inputs.append(F.batch_norm(hidden, None, None, net.norm1.weight, net.norm1.bias, True))
    expected = giant_batch(nn.BatchNorm1d(6), torch.cat(inputs).detach())
    gadam.refresh_batchnorm(net, batches_for(net))
    torch.testing.assert_close(net.norm2.running_mean, expected.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.norm2.running_var, expected.running_var, rtol=1e-5, atol=1e-6)


def test_modes_momentum_weights_and_unused_layers_do_not_change():
    net = Net()
    net.train()
    net.frozen.eval()
    net.norm2.eval()
    net.unused.running_mean.fill_(7.0)  # type: ignore[union-attr]
    modes = [m.training for m in net.modules()]
    weights = copy.deepcopy(dict(net.named_parameters()))
    gadam.refresh_batchnorm(net, batches_for(net))
    assert [m.training for m in net.modules()] == modes
    assert (net.norm1.momentum, net.norm2.momentum) == (0.3, None)
    same(dict(net.named_parameters()), weights)
    assert torch.equal(net.unused.running_mean, torch.full((6,), 7.0))  # type: ignore[arg-type]
    assert net.unused.num_batches_tracked == 0
    assert not net.norm1._forward_pre_hooks


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_refresh_leaves_the_model_unchanged(error):
    net = Net()
    net(torch.randn(16, 4))
    before = copy.deepcopy(net.state_dict())

    def interrupted():
        yield torch.randn(8, 4)
        raise error

    with pytest.raises(error):
        gadam.refresh_batchnorm(net, interrupted())
    same(net.state_dict(), before)
    assert all(m.training for m in net.modules())
    assert not net.norm1._forward_pre_hooks
    assert torch.is_grad_enabled()


def test_all_kinds_of_batches_agree():
    plain = batches_for(Net())
    results = []
    for batches, forward in (
        (plain, None),
        ([(x, torch.zeros(len(x))) for x in plain], None),
        ([[x, torch.zeros(len(x))] for x in plain], None),
        ([{"x": x, "label": torch.zeros(len(x))} for x in plain], None),
        (iter(plain), None),
        ([{"pixels": x} for x in plain], lambda model, batch: model(batch["pixels"])),
        (lambda model: [model(x) for x in plain], None),
    ):
        torch.manual_seed(0)
        net = Net()
        gadam.refresh_batchnorm(net, batches, forward=forward)
        results.append(net.state_dict())
    for result in results[1:]:
        same(result, results[0])


def test_dict_batches_for_a_forward_with_var_keywords():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            return self.norm(batch["a"] + batch["b"])

    model = Wrapper()
    a, b = torch.randn(5, 4), torch.randn(5, 4)
    gadam.refresh_batchnorm(model, [{"a": a, "b": b}])
    torch.testing.assert_close(model.norm.running_mean, (a + b).mean(0))


def test_max_batches():
    results = []
    for batches, limit in ((batches_for(Net()), 2), (batches_for(Net())[:2], None)):
        torch.manual_seed(0)
        net = Net()
        gadam.refresh_batchnorm(net, batches, max_batches=limit)
        results.append(net.state_dict())
    same(results[1], results[0])


def test_batches_that_cannot_run_raise_clear_errors():
    net = Net()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="an exhausted iterator"):
        gadam.refresh_batchnorm(net, [])
    with pytest.raises(
        TypeError, match=r"takes none of the batch's entries \['pixels'\].*forward="
    ):
        gadam.refresh_batchnorm(net, [{"pixels": torch.randn(3, 4)}])
    with pytest.raises(TypeError, match=r"not str.*forward="):
        gadam.refresh_batchnorm(net, ["text"])
    same(net.state_dict(), before)


def test_a_model_without_batchnorm_is_not_run():
    def explode(*_: object) -> None:
        raise AssertionError("There is nothing to refresh.")

    gadam.refresh_batchnorm(nn.Linear(2, 2), [torch.randn(3, 2)], forward=explode)
    gadam.refresh_batchnorm(nn.BatchNorm1d(2, track_running_stats=False), explode)


def test_half_precision_models():
    layer = nn.BatchNorm1d(4).bfloat16()
    data = torch.randn(64, 4).bfloat16()
    gadam.refresh_batchnorm(layer, data.split(20))
    torch.testing.assert_close(
        layer.running_mean, data.float().mean(0).bfloat16(), rtol=1e-2, atol=1e-2
    )


def test_dict_batches_through_a_wrapper():
    net = Net()
    wrapped = torch.compile(net, backend="eager")
    gadam.refresh_batchnorm(wrapped, [{"x": torch.randn(6, 4), "label": torch.zeros(6)}])  # type: ignore[arg-type]
    assert net.norm1.num_batches_tracked == 1
    gadam.refresh_batchnorm(nn.DataParallel(net), [{"x": torch.randn(6, 4), "label": 0}])


def test_a_layer_called_by_keyword():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(input=x)

    model, data = Model(), torch.randn(9, 3)
    gadam.refresh_batchnorm(model, data.split(4))
    torch.testing.assert_close(model.norm.running_mean, data.mean(0))


def test_a_callable_excludes_the_other_arguments():
    net = Net()
    with pytest.raises(ValueError, match="only with an iterable of batches"):
        gadam.refresh_batchnorm(net, lambda: None, max_batches=2)
    gadam.refresh_batchnorm(net, lambda data=torch.randn(5, 4): net(data))  # noqa: B008
    assert net.norm1.num_batches_tracked == 1


@pytest.mark.slow
def test_a_compiled_model():
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    compiled = torch.compile(net)
    compiled(torch.randn(8, 4))
    twin.load_state_dict(net.state_dict())
    gadam.refresh_batchnorm(compiled, batches_for(net))  # type: ignore[arg-type]
    gadam.refresh_batchnorm(twin, batches_for(net))
    torch.compiler.reset()
    same(net.state_dict(), twin.state_dict())


# ------------------------------------------------------------------------- without batchnorm=


def averaged(model: nn.Module, steps: int = 3) -> gadam.IterateAverage:
    optimizer = gadam.Gadam(model.parameters(), 0.05, average=gadam.Averaging(start=1))
    fit(model, optimizer, steps)
    return optimizer.average


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["bare", "wrapped"])
@pytest.mark.parametrize("use", ["applied", "copy_to"])
def test_statistics_of_the_raw_weights_are_noticed_once(use, wrap):
    model = small_model()
    average, wrapped = averaged(model), wrap(model)

    def run(**kwargs: Any) -> None:
        if use == "applied":
            with average.applied(wrapped, **kwargs):
                pass
        else:
            average.copy_to(wrapped, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(batchnorm=False)  # says "I know"
        run(batchnorm=BATCHES)
    with pytest.warns(UserWarning, match="Pass batchnorm=loader to recompute them, or batchnorm=F"):
        run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


def test_the_warning_points_at_the_caller():
    model = small_model()
    with pytest.warns(UserWarning, match="BatchNorm") as caught, averaged(model).applied(model):
        pass
    with pytest.warns(UserWarning, match="BatchNorm") as copied:
        averaged(model).copy_to(model)
    assert [w.filename for w in (*caught, *copied)] == [__file__] * 2


def test_models_without_statistics_in_use_are_not_warned_about():
    untracked: Any = small_model()
    untracked[1] = nn.BatchNorm2d(4, track_running_stats=False)
    normalized: Any = small_model()
    normalized[1] = nn.GroupNorm(2, 4)
    frozen: Any = small_model()
    for model in (untracked, normalized):
        with averaged(model).applied(model):
            pass
    for p in frozen.parameters():
        p.requires_grad_(p.dim() > 1)
    average = averaged(frozen)
    for buffer in (frozen[1].running_mean, frozen[1].num_batches_tracked):
        buffer.zero_()  # as if training had never updated them
    with average.applied(frozen):
        pass
    with averaged(small_model()).applied():  # no model to look at
        pass


def test_an_average_without_samples_has_the_statistics_of_its_weights():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=gadam.Plateau()))
    fit(model, optimizer, 2)
    with optimizer.average.applied(model):
        pass


def test_batchnorm_true_is_rejected():
    model = small_model()
    average = averaged(model)
    with pytest.raises(ValueError, match="False or None, got True"):
        with average.applied(model, batchnorm=True):  # type: ignore[arg-type]
            pass
    with average.applied(batchnorm=False):  # needs no model
        pass
