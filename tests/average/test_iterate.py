"""The running average: sampling, applying, copying, saving."""

from __future__ import annotations

import copy
import gc
import io
import warnings

import pytest
import torch
from torch import nn

import gadam
from average_models import BATCHES, fit, small_model, snapshot
from contract import AVERAGING, BY_NAME, parameters, same, set_gradients, train
from gadam.average.progress import Progress

averaging_row = pytest.mark.parametrize("row", AVERAGING, ids=str)


# --------------------------------------------------------------------------------------- sampling


@averaging_row
@pytest.mark.parametrize("foreach", [False, True])
def test_is_the_mean_of_the_iterates(row, foreach):
    params = parameters(torch.float64)
    flags = {} if "fused" in row.keywords else {"foreach": foreach}
    optimizer = row(params, average=gadam.Averaging(start=4, every=3), **flags)
    iterates = train(optimizer, params, 14)
    expected = [
        torch.stack(column).mean(0) for column in zip(*(iterates[t - 1] for t in (4, 7, 10, 13)))
    ]
    assert optimizer.average.count == 4
    with optimizer.average.applied():
        torch.testing.assert_close([p.detach() for p in params], expected, rtol=1e-13, atol=1e-13)


def test_start_none_does_nothing_by_itself():
    params = parameters()
    optimizer = gadam.Gadam(params)
    train(optimizer, params, 3)
    assert optimizer.average.averaging == gadam.Averaging(start=None)
    assert (optimizer.average.count, optimizer.average.phase) == (0, "waiting")
    keys = {"step", "exp_avg", "exp_avg_sq", "average_progress"}
    assert optimizer.state[params[0]].keys() == keys


def test_begin_samples_from_the_next_step_on():
    params = parameters()
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=None, every=2))
    train(optimizer, params, 3)
    optimizer.average.begin()
    assert (optimizer.average.phase, optimizer.average.count) == ("averaging", 0)
    iterates = train(optimizer, params, 4, first=4)
    optimizer.average.begin()  # no effect: the sampled steps are still 4, 6, 8
    iterates += train(optimizer, params, 1, first=8)
    assert optimizer.average.count == 3
    with optimizer.average.applied():
        expected = torch.stack([iterates[i][0] for i in (0, 2, 4)]).mean(0)
        torch.testing.assert_close(params[0].detach(), expected)


def test_update_takes_one_sample_and_does_not_start_sampling():
    params = parameters(torch.float64)
    optimizer = gadam.GadamX(params)
    samples = []
    for epoch in range(3):
        samples.append(train(optimizer, params, 4, first=1 + 4 * epoch)[-1])
        assert optimizer.average.update()
    assert optimizer.average.count == 3
    assert optimizer.average.phase == "waiting"
    with optimizer.average.applied():
        torch.testing.assert_close(params[0].detach(), torch.stack([s[0] for s in samples]).mean(0))


def test_every_none_leaves_sampling_to_update():
    params = parameters()
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=2, every=None))
    train(optimizer, params, 5)
    assert (optimizer.average.phase, optimizer.average.count) == ("averaging", 0)
    optimizer.average.update()
    assert optimizer.average.count == 1


def test_two_averages_on_one_optimizer():
    params = parameters(torch.float64)
    sgd = torch.optim.SGD(params, lr=0.1)
    averages = [gadam.IterateAverage(sgd, gadam.Averaging(start=s)) for s in (1, 4)]
    iterates = train(sgd, params, 6)
    for average, first in zip(averages, (0, 3)):
        with average.applied():
            expected = torch.stack([i[0] for i in iterates[first:]]).mean(0)
            torch.testing.assert_close(params[0].detach(), expected)


def test_a_parameter_unfrozen_late_counts_as_constant_before():
    """The mean over all iterates includes the steps at which the parameter was frozen."""
    params = parameters(torch.float64)
    params[0].requires_grad_(False)
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=2))
    iterates = []
    for step in range(1, 9):
        if step == 6:
            params[0].requires_grad_(True)
        set_gradients(params, step)
        if not params[0].requires_grad:
            params[0].grad = None
        optimizer.step()
        iterates.append(params[0].detach().clone())
    with optimizer.average.applied():
        torch.testing.assert_close(params[0].detach(), torch.stack(iterates[1:]).mean(0))


def test_a_parameter_that_skips_steps_is_still_sampled():
    params = parameters(torch.float64)
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=1))
    iterates = []
    for step in range(1, 7):
        set_gradients(params, step)
        if step % 2:
            params[0].grad = None
        optimizer.step()
        iterates.append(params[0].detach().clone())
    with optimizer.average.applied():
        torch.testing.assert_close(params[0].detach(), torch.stack(iterates).mean(0))


def test_a_group_added_late_is_averaged_too():
    params = parameters(torch.float64)
    optimizer = gadam.Gadam(params[:2], average=gadam.Averaging(start=1))
    train(optimizer, params[:2], 3)
    constant = params[4].detach().clone()
    optimizer.add_param_group({"params": [params[4]]})
    iterates = [i[2] for i in train(optimizer, [*params[:2], params[4]], 2, first=4)]
    with optimizer.average.applied():
        expected = torch.stack([constant] * 3 + iterates).mean(0)
        torch.testing.assert_close(params[4].detach(), expected)


def test_lbfgs_with_gradients_from_its_closure():
    p = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
    lbfgs = torch.optim.LBFGS([p], lr=0.1, max_iter=1)
    average = gadam.IterateAverage(lbfgs, gadam.Averaging(start=2))
    iterates = []

    def closure():
        lbfgs.zero_grad()
        loss = (p - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        lbfgs.step(closure)
        iterates.append(p.detach().clone())
    with average.applied():
        torch.testing.assert_close(p.detach(), torch.stack(iterates[1:]).mean(0))


# --------------------------------------------------------------------------------------- applying


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_applied_restores_the_raw_weights_bit_for_bit(dtype):
    params = parameters(dtype)
    optimizer = gadam.Gadam(params, 0.3, average=gadam.Averaging(start=2))
    train(optimizer, params, 6)
    before = [p.detach().clone() for p in params]
    with optimizer.average.applied():
        assert not torch.equal(params[0], before[0])
        assert all(p.dtype == dtype for p in params)
    same([p.detach() for p in params], before)


def test_applied_restores_weights_and_buffers_after_an_exception():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
    fit(model, optimizer, 3)
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt), optimizer.average.applied(model, batchnorm=BATCHES):
        model(BATCHES[0])  # in train mode: updates the running statistics
        raise KeyboardInterrupt
    same(snapshot(model), before)
    with optimizer.average.applied(model, batchnorm=False):
        assert not torch.equal(model[0].weight, before["0.weight"])  # type: ignore[index]


def test_applied_refreshes_statistics_for_the_averaged_weights():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), 0.1, average=gadam.Averaging(start=1))
    fit(model, optimizer, 5)
    before = snapshot(model)
    twin = copy.deepcopy(model)
    twin.load_state_dict(optimizer.average.model_state_dict(model))
    gadam.refresh_batchnorm(twin, BATCHES)
    with optimizer.average.applied(model, batchnorm=BATCHES):
        same(snapshot(model), snapshot(twin))
    same(snapshot(model), before)


def test_applied_takes_a_callable_with_or_without_the_model():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
    fit(model, optimizer, 3)
    results = []
    for batchnorm in (
        BATCHES,
        lambda: [model(batch) for batch in BATCHES],
        lambda m: [m(batch) for batch in BATCHES],
    ):
        with optimizer.average.applied(model, batchnorm=batchnorm):
            results.append(snapshot(model))
    same(results[1], results[0])
    same(results[2], results[0])


def test_the_optimizers_state_dict_is_the_same_inside_applied():
    params = parameters()
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=1))
    train(optimizer, params, 3)
    outside = copy.deepcopy(optimizer.state_dict())
    with optimizer.average.applied():
        same(optimizer.state_dict(), outside)


def test_without_samples_applied_uses_raw_weights_and_warns_once():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=100))
    fit(model, optimizer, 1)
    before = snapshot(model)
    with pytest.warns(UserWarning, match="no sample yet") as record:
        with optimizer.average.applied(model):
            same(snapshot(model), before)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.average.applied(model, batchnorm=BATCHES):
            inside = snapshot(model)
    same(inside["0.weight"], before["0.weight"])
    assert not torch.equal(inside["1.running_mean"], before["1.running_mean"])
    same(snapshot(model), before)


def test_a_trigger_suppresses_the_warning_about_missing_samples(recwarn):
    optimizer = gadam.Gadam(parameters(), average=gadam.Averaging(start=gadam.Plateau()))
    with optimizer.average.applied():
        pass
    assert not recwarn.list


@averaging_row
def test_step_nesting_and_update_raise_inside_applied(row):
    params = parameters()
    optimizer = row(params, average=gadam.Averaging(start=1))
    iterates = train(optimizer, params, 3)
    with optimizer.average.applied():
        with pytest.raises(RuntimeError, match=r"step\(\) was called while the averaged"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="does not nest"):
            with optimizer.average.applied():
                pass
        with pytest.raises(RuntimeError, match=r"update\(\) was called while"):
            optimizer.average.update()
        with pytest.raises(RuntimeError, match="does not nest"):
            optimizer.average.copy_to()
    same([p.detach() for p in params], iterates[-1])
    assert optimizer.average.count == 3


def test_batchnorm_requires_the_model():
    optimizer = gadam.Gadam(parameters(), average=gadam.Averaging(start=1))
    with pytest.raises(ValueError, match="pass model="), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with optimizer.average.applied(batchnorm=BATCHES):
            pass


def test_applied_costs_one_copy_of_the_parameters():
    params = [nn.Parameter(torch.zeros(1000)) for _ in range(8)]
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=1))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()

    def storage_bytes() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        dense = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
        storages = {storage.data_ptr(): storage.nbytes() for storage in dense}
        return sum(storages.values())

    before = storage_bytes()
    with optimizer.average.applied():
        inside = storage_bytes()
    assert inside - before <= 8 * 1000 * 4 + 100
    assert storage_bytes() - before <= 100


def test_copy_to_is_permanent():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), 0.1, average=gadam.Averaging(start=1))
    fit(model, optimizer, 4)
    with optimizer.average.applied(model, batchnorm=BATCHES):
        expected = snapshot(model)
    optimizer.average.copy_to(model, batchnorm=BATCHES)
    same(snapshot(model), expected)
    fit(model, optimizer, 1)  # training can continue


def test_copy_to_that_fails_midway_changes_nothing():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), 0.1, average=gadam.Averaging(start=1))
    fit(model, optimizer, 4)
    before = snapshot(model)

    def broken():
        yield BATCHES[0]
        raise OSError("disk failure")

    with pytest.raises(OSError, match="disk failure"):
        optimizer.average.copy_to(model, batchnorm=broken())
    same(snapshot(model), before)
    fit(model, optimizer, 1)


def test_model_state_dict_holds_the_average_and_changes_nothing():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), 0.1, average=gadam.Averaging(start=1))
    fit(model, optimizer, 4)
    before = snapshot(model)
    averaged = optimizer.average.model_state_dict(model)
    same(snapshot(model), before)
    with optimizer.average.applied(model, batchnorm=False):
        same(averaged, snapshot(model))
        same(optimizer.average.raw_state_dict(model), before)
    same(optimizer.average.raw_state_dict(model), before)
    before = copy.deepcopy(averaged)
    fit(model, optimizer, 2)
    same(averaged, before)  # it has its own memory
    small_model().load_state_dict(averaged)


def test_tied_weights():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    optimizer = gadam.Gadam(model.parameters(), 0.1, average=gadam.Averaging(start=1))
    iterates = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(5)).square().mean().backward()
        optimizer.step()
        iterates.append(embedding.weight.detach().clone())
    expected = torch.stack(iterates).mean(0)
    averaged = optimizer.average.model_state_dict(model)
    torch.testing.assert_close(averaged["0.weight"], expected)
    torch.testing.assert_close(averaged["1.weight"], expected)
    with optimizer.average.applied(model):
        assert head.weight is embedding.weight
        torch.testing.assert_close(head.weight.detach(), expected)
    same(embedding.weight.detach(), iterates[-1])


# ------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("weighting", [gadam.Mean(), gadam.EMA(0.9), gadam.Window(3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_of_a_torch_optimizer_saves_and_resumes(weighting, dtype):
    plan = gadam.Averaging(start=3, every=2, weighting=weighting)
    runs = []
    for resume in (False, True):
        params = parameters(dtype)
        sgd = torch.optim.SGD(params, lr=0.01, momentum=0.9)
        average = gadam.IterateAverage(sgd, plan)
        train(sgd, params, 6)
        if resume:
            file = io.BytesIO()
            torch.save([p.detach() for p in params], file)
            states = {"sgd": sgd.state_dict(), "average": average.state_dict()}
            states = copy.deepcopy(states)
            params = parameters(dtype)
            file.seek(0)
            for p, saved in zip(params, torch.load(file, weights_only=True)):
                p.data.copy_(saved)
            sgd = torch.optim.SGD(params, lr=0.01, momentum=0.9)
            average = gadam.IterateAverage(sgd, plan)
            sgd.load_state_dict(states["sgd"])
            average.load_state_dict(states["average"])
        train(sgd, params, 7, first=7)
        runs.append((average.state_dict(), [p.detach() for p in params]))
    same(runs[1], runs[0])
    assert runs[0][0]["state"][0].popitem()[1].dtype == torch.float32


def test_loading_copies_the_state_dict():
    params = parameters()
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=1))
    train(optimizer, params, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(saved["state"][0]["average"])
    other = gadam.Gadam(parameters(), average=gadam.Averaging(start=1))
    other.load_state_dict(saved)
    train(other, other.param_groups[0]["params"], 2)
    same(saved["state"][0]["average"], before)


def test_a_state_dict_is_a_snapshot_of_the_progress():
    params = parameters()
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=1))
    train(optimizer, params, 2)
    saved = optimizer.state_dict()["state"][0]
    train(optimizer, params, 2)
    optimizer.state_dict()
    assert Progress.unpack(saved["average_progress"]).count == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("progress"), "not the state of an iterate average"),
        (lambda s: s.update(progress=s["progress"][:5]), "not the state of an iterate average"),
        (lambda s: s["state"].update({99: s["state"][0]}), "has a parameter 99"),
        (lambda s: s["state"][0].update(average=torch.zeros(2)), r"has shape \(2,\)"),
        (
            lambda s: s["state"][0].clear() or s["state"][0].update(average_0=torch.zeros(4, 3)),
            "no buffer",
        ),
        (lambda s: s["state"].clear(), "their mean was not restored"),
    ],
)
def test_a_damaged_state_is_rejected_before_anything_changes(damage, message):
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.1)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    train(sgd, params, 3)
    saved = copy.deepcopy(average.state_dict())
    before = copy.deepcopy(saved)
    damage(saved)
    with pytest.raises(ValueError, match=message):
        average.load_state_dict(saved)
    same(average.state_dict(), before)


def test_the_state_of_another_trigger_is_rejected_but_of_none_accepted():
    def make(start):
        return gadam.Gadam(parameters(), average=gadam.Averaging(start=start))

    saved = make(gadam.Plateau(2)).state_dict()
    with pytest.raises(ValueError, match="state of another trigger"):
        make(gadam.NonMonotone(5)).load_state_dict(copy.deepcopy(saved))
    make(None).load_state_dict(copy.deepcopy(saved))
    make(gadam.Plateau(2)).load_state_dict(copy.deepcopy(make(None).state_dict()))


def test_a_copied_average_follows_its_copied_optimizer():
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.1)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    train(sgd, params, 2)
    twin = copy.deepcopy(average)
    twins = twin.optimizer.param_groups[0]["params"]
    train(twin.optimizer, twins, 3, first=3)
    assert (average.count, twin.count) == (2, 5)
    with average.applied(), pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(average)


def test_only_torch_optimizers_can_be_averaged():
    with pytest.raises(TypeError, match="needs a torch optimizer, not Linear"):
        gadam.IterateAverage(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a gadam\.Averaging"):
        gadam.IterateAverage(torch.optim.SGD(parameters(), 0.1), 3)  # type: ignore[arg-type]


def test_repr_shows_the_progress():
    optimizer = BY_NAME["Gadam"](parameters(), average=gadam.Averaging(start=7))
    assert "phase='waiting', count=0" in repr(optimizer.average)


def test_the_raw_weights_are_known_while_another_average_is_applied(tmp_path):
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    first = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    second = gadam.IterateAverage(sgd, gadam.Averaging(start=1, weighting=gadam.EMA(0.5)))
    blocks = gadam.BlockAverages(sgd, tmp_path / "blocks", every=1)
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        sgd.step()
    raw = copy.deepcopy(model.state_dict())
    for applied in (first.applied(model), blocks.applied(model)):
        with applied:
            assert not torch.equal(model.weight, raw["weight"])
            for one in (first, second, blocks):
                assert torch.equal(one.raw_state_dict(model)["weight"], raw["weight"])


class Polyak(torch.optim.SGD):
    """An optimizer whose step takes a loss."""

    def step(self, loss):  # type: ignore[override]
        assert torch.is_tensor(loss)
        super().step()


@pytest.mark.parametrize("interpolation", [0.0, 0.9])
def test_an_argument_of_step_that_is_no_closure_stays(interpolation):
    weight = nn.Parameter(torch.ones(3))
    optimizer = Polyak([weight], lr=0.1)
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=1, interpolation=interpolation))
    loss = weight.square().sum()
    loss.backward()
    optimizer.step(loss)
    assert average.count == 1


def test_entries_of_the_optimizer_with_similar_names_are_not_the_averages():
    weight = nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.1)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    for _ in range(2):
        weight.grad = torch.ones(3)
        sgd.step()
    sgd.state[weight]["average_sq"] = torch.full((3,), 7.0)
    sgd.load_state_dict(copy.deepcopy(sgd.state_dict()))
    assert average.count == 2
    assert torch.equal(sgd.state[weight]["average_sq"], torch.full((3,), 7.0))
