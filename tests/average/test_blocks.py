"""Block averages: exact means over windows, merging, resuming, files, and composed weightings."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import os
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gadam
from average_models import BATCHES, fit, small_model, snapshot
from gadam import _torch
from gadam._errors import UserError
from gadam.average import BlockError, block_files
from gadam.average.block_files import pair_to_merge
from gadam.average.block_weights import block_weights, misplaced_weight


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: only a power failure would show the difference."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def linear(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    data = torch.randn(6, 5, generator=generator).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 1
) -> list[list[Tensor]]:
    iterates = []
    for number in range(first, first + steps):
        step(model, optimizer, number)
        iterates.append([p.detach().clone() for p in model.parameters()])
    return iterates


def mean(iterates: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack([t.double() for t in column]).mean(0) for column in zip(*iterates)]


def weights(model: nn.Module, state_dict: dict[str, Tensor]) -> list[Tensor]:
    return [state_dict[name] for name, _ in model.named_parameters()]


def assert_means_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error <= 1e-6, error


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "padam": lambda params: gadam.Padam(params, lr=0.1),
    "gadam": lambda params: gadam.Gadam(params, lr=1e-2),
    "gadam that averages": lambda params: gadam.Gadam(
        params, lr=1e-2, average=gadam.Averaging(start=3)
    ),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


# ------------------------------------------------------------------------------------------ windows


@each_optimizer
@pytest.mark.parametrize("stride", [1, 5])
def test_every_window_is_the_mean_of_its_iterates(make, stride, tmp_path):
    model = linear()
    optimizer = make(model.parameters())
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=10, stride=stride)
    iterates = train(model, optimizer, 45)
    assert blocks.boundaries == [0, 10, 20, 30, 40]
    raw = snapshot(model)
    for start in range(0, 40, 10):
        for stop in range(start + 10, 50, 10):
            expected = mean(iterates[start:stop][stride - 1 :: stride])
            found = blocks.model_state_dict(model, start, stop)
            assert_means_equal(weights(model, found), expected)
            with blocks.applied(model, start, stop):
                assert_means_equal([p.detach() for p in model.parameters()], expected)
    assert all(torch.equal(raw[name], value) for name, value in model.state_dict().items())


def test_blocks_do_not_change_training_or_the_optimizers_own_average(tmp_path):
    plain, observed = linear(), linear()
    plan = gadam.Averaging(start=4)
    alone = gadam.Gadam(plain.parameters(), lr=1e-2, average=plan)
    optimizer = gadam.Gadam(observed.parameters(), lr=1e-2, average=plan)
    gadam.BlockAverages(optimizer, tmp_path / "blocks", every=7)
    train(plain, alone, 25)
    train(observed, optimizer, 25)
    assert gadam.average_of(optimizer) is optimizer.average
    for p, q in zip(plain.parameters(), observed.parameters()):
        assert torch.equal(p, q)
    for one, other in zip(
        alone.average.model_state_dict(plain).values(),
        optimizer.average.model_state_dict(observed).values(),
    ):
        assert torch.equal(one, other)


def test_it_is_not_the_average_of_its_optimizer(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gadam.BlockAverages(optimizer, tmp_path / "blocks")
    assert gadam.average_of(optimizer) is None


def test_the_kernel_folds_iterates_in_its_own_pass(tmp_path, monkeypatch):
    if gadam.backends()["cpu"] is None:
        pytest.skip("there is no kernel")
    model = linear()
    optimizer = gadam.Gadam(model.parameters(), lr=1e-2)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=10)
    passes = []
    original = _torch.foreach_lerp_

    def counted(*args):
        passes.append(args)
        original(*args)

    monkeypatch.setattr(_torch, "foreach_lerp_", counted)
    iterates = train(model, optimizer, 20)
    # The first two samples of a mean have weights that could not be taken out again.
    assert len(passes) == 2
    assert_means_equal(weights(model, blocks.model_state_dict(model, 10)), mean(iterates[10:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types(dtype, tmp_path):
    model = linear(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=10)
    iterates = train(model, optimizer, 30)
    found = weights(model, blocks.model_state_dict(model, 10))
    kept = torch.float32 if dtype == torch.bfloat16 else torch.float64
    assert {t.dtype for t in found} == {kept}
    assert_means_equal(found, mean(iterates[10:]))
    narrow = blocks.model_state_dict(model, 10, dtype=torch.float16)
    assert {t.dtype for t in narrow.values()} == {torch.float16}
    wide = weights(model, blocks.model_state_dict(model, 10, dtype=torch.float64))
    assert {t.dtype for t in wide} == {torch.float64}


def test_complex_parameters(tmp_path):
    p = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    optimizer = torch.optim.SGD([p], lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)
    iterates = []
    for number in range(10):
        p.grad = torch.full_like(p, complex(1, number))
        optimizer.step()
        iterates.append([p.detach().clone()])
    with blocks.applied(None, 5):
        torch.testing.assert_close(p.detach(), torch.stack([i[0] for i in iterates[5:]]).mean(0))


@pytest.mark.parametrize("every", [100, 1000])
@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["gadam"]])
def test_steady_drift_stays_within_the_largest_error(make, every, tmp_path):
    """The worst case: all roundings of an entry go in one direction."""
    p = nn.Parameter(torch.linspace(-1, 3, 500))
    optimizer = make([p])
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=every)
    drift = torch.rand(500, generator=torch.Generator().manual_seed(0))
    total, largest = torch.zeros(500, dtype=torch.float64), torch.zeros(500)
    for _ in range(2 * every):
        p.grad = drift.clone()
        optimizer.step()
        total += p.detach()
        largest = largest.maximum(p.detach().abs())
    expected = total / (2 * every)
    with blocks.applied(None):
        error = p.detach() - expected
    assert bool((error.abs() <= (every / 2 + 8) * 2**-24 * largest).all())
    assert every > 100 or error.norm() <= 1e-6 * expected.norm()


def test_long_blocks_of_random_iterates_stay_within_the_error_of_short_ones(tmp_path):
    p = nn.Parameter(torch.randn(2000))
    optimizer = torch.optim.SGD([p], lr=1e-3)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=1000, max_blocks=2)
    total = torch.zeros(2000, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2000):
        p.grad = torch.randn(2000, generator=generator)
        optimizer.step()
        total += p.detach()
    with blocks.applied(None):
        assert_means_equal([p.detach()], [total / 2000])


def test_a_step_that_is_no_boundary_is_refused_with_the_nearest_ones(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=10)
    with pytest.raises(BlockError, match=r"no finished block yet.*step 10"):
        blocks.model_state_dict(model, 0)
    train(model, optimizer, 40)
    with pytest.raises(UserError, match=r"Step 23 is not a boundary.*20 and 30"):
        blocks.model_state_dict(model, 23)
    with pytest.raises(ValueError, match=r"Step 99 is not a boundary.*30 and 40\.$"):
        blocks.model_state_dict(model, 0, 99)
    train(model, optimizer, 5)
    with pytest.raises(BlockError, match=r"Step 45 .* 30 and 40\. Call finish\(\)"):
        blocks.model_state_dict(model, 45)
    for step in ("10", True):
        with pytest.raises(TypeError, match="start must be the number of a step"):
            blocks.model_state_dict(model, step)  # type: ignore[arg-type]
    with pytest.raises(BlockError, match="empty"), blocks.applied(model, 20, 20):
        pass


def test_applied_follows_the_rules_of_averages(tmp_path):
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=3)
    fit(model, optimizer, 6)
    raw = snapshot(model)
    with pytest.raises(KeyError), blocks.applied(model, 3, batchnorm=BATCHES):
        assert not torch.equal(raw["1.running_mean"], model.state_dict()["1.running_mean"])
        kept = blocks.raw_state_dict(model)
        assert all(torch.equal(kept[name], raw[name]) for name in raw)
        with pytest.raises(RuntimeError, match="does not nest"), blocks.applied(model, 0):
            pass
        with pytest.raises(RuntimeError, match="does not nest"), optimizer.average.applied(model):
            pass
        with pytest.raises(RuntimeError, match="while the averaged weights are applied"):
            optimizer.step()
        with optimizer.average.suspended(model):
            assert torch.equal(model.state_dict()["0.weight"], raw["0.weight"])
        raise KeyError
    assert all(torch.equal(raw[name], value) for name, value in model.state_dict().items())
    with pytest.warns(UserWarning, match="BatchNorm"), blocks.applied(model, 3):
        pass


def test_save_model_says_what_it_holds(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=10)
    train(model, optimizer, 30)
    path = tmp_path / "model.safetensors"
    blocks.save_model(model, path, 10, 30)
    found = gadam.average.read_provenance(path)
    assert (found.point, found.samples, found.first_step, found.last_step) == (
        "average",
        20,
        11,
        30,
    )
    from safetensors.torch import load_file

    expected = blocks.model_state_dict(model, 10, 30)
    assert all(torch.equal(value, expected[name]) for name, value in load_file(path).items())
    with pytest.raises(FileExistsError):
        blocks.save_model(model, path, 10, 30)


def test_finish_ends_a_block_early(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=10)
    iterates = train(model, optimizer, 17)
    blocks.finish()
    blocks.finish()
    assert blocks.boundaries == [0, 10, 17]
    assert_means_equal(weights(model, blocks.model_state_dict(model, 10)), mean(iterates[10:]))
    iterates += train(model, optimizer, 5, first=18)
    assert blocks.boundaries == [0, 10, 17, 20]
    assert_means_equal(weights(model, blocks.model_state_dict(model)), mean(iterates[:20]))


# -------------------------------------------------------------------------- steps that do not count


def test_iterates_that_are_not_finite_do_not_enter(tmp_path):
    model = linear()
    for make in (OPTIMIZERS["gadam"], OPTIMIZERS["sgd"]):
        optimizer = make(model.parameters())
        blocks = gadam.BlockAverages(
            optimizer, tmp_path / make(model.parameters()).__class__.__name__, every=10
        )
        iterates = train(model, optimizer, 14)
        good = snapshot(model)
        with torch.no_grad():
            next(model.parameters())[0, 0] = math.inf
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        model.load_state_dict(good)
        iterates += [[], *train(model, optimizer, 5, first=16)]
        assert blocks.boundaries == [0, 10, 20]
        assert blocks.skipped == 1
        found = weights(model, blocks.model_state_dict(model, 10))
        assert_means_equal(found, mean(iterates[10:14] + iterates[15:]))


def test_a_window_without_a_finite_iterate_is_refused(tmp_path):
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=2)
    for value in (math.nan, math.nan, 1.0, 2.0):
        p.grad = torch.zeros_like(p)
        p.data.fill_(value)
        optimizer.step()
    with pytest.raises(BlockError, match="No iterate of the steps 1–2 was finite"):
        blocks.model_state_dict(nn.ParameterList([p]), 0, 2)
    with blocks.applied(None):
        assert p.tolist() == [1.5] * 3


def test_skipped_steps_of_a_gradient_scaler_do_not_count(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    iterates = []
    for number in range(12):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(6, 5)).square().mean()).backward()
        if number in (3, 7):
            next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        if number not in (3, 7):
            iterates.append([p.detach().clone() for p in model.parameters()])
    assert blocks.boundaries == [0, 5, 10]
    assert_means_equal(weights(model, blocks.model_state_dict(model, 5)), mean(iterates[5:]))


def test_closures(tmp_path):
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=2)
    iterates = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
        iterates.append([p.detach().clone() for p in model.parameters()])
    assert_means_equal(weights(model, blocks.model_state_dict(model, 2)), mean(iterates[2:]))


@pytest.mark.parametrize("joins", [10, 13])
@pytest.mark.parametrize("max_blocks", [2, 64])
def test_a_parameter_that_joins_later_was_constant_before(joins, max_blocks, tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5, max_blocks=max_blocks)
    iterates = train(model, optimizer, joins)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    iterates += train(model, optimizer, 30 - joins, first=joins + 1)
    for start, stop in zip(blocks.boundaries, blocks.boundaries[1:]):
        found = blocks.model_state_dict(model, start, stop)
        assert_means_equal(weights(model, found), mean(iterates[start:stop]))
    assert_means_equal(weights(model, blocks.model_state_dict(model)), mean(iterates))


def test_two_optimizers_make_joint_steps(tmp_path):
    model = linear()
    both = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    blocks = gadam.BlockAverages(both, tmp_path / "blocks", every=4)
    iterates = []
    for _ in range(8):
        model.zero_grad()
        model(torch.ones(2, 5)).square().mean().backward()
        for optimizer in both:
            optimizer.step()
        iterates.append([p.detach().clone() for p in model.parameters()])
    assert_means_equal(weights(model, blocks.model_state_dict(model, 4)), mean(iterates[4:]))


def test_attached_in_the_middle_of_training(tmp_path):
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 13)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=10)
    iterates = train(model, optimizer, 20, first=14)
    assert blocks.boundaries == [13, 20, 30]
    assert_means_equal(weights(model, blocks.model_state_dict(model, 13, 20)), mean(iterates[:7]))


# ------------------------------------------------------------------------------------------ merging


@settings(deadline=None)
@given(st.integers(2, 20), st.integers(1, 600), st.sampled_from([1, 7, 100]), st.integers(0, 99))
def test_merging_keeps_starts_geometrically_spaced(max_blocks, blocks, every, offset):
    first = offset % every
    boundaries = [first]
    power = 1 / ((max_blocks + 1) // 2)
    for number in range(1, blocks + 1):
        boundaries.append(number * every)
        while len(boundaries) - 1 > max_blocks:
            del boundaries[pair_to_merge(boundaries, every) + 1]
        end = boundaries[-1]
        factor = ((end - first) / every + 1) ** power
        for start, stop in itertools.pairwise(boundaries):
            # The worst step of a block is the last one before its end.
            assert end - start <= factor * (end - (stop - 1) + every) * (1 + 1e-12)
    assert len(boundaries) - 1 <= max_blocks


def test_logarithmically_many_blocks_suffice_for_a_constant_factor():
    factor = 1.5
    for blocks in (10, 100, 1000, 3000):
        max_blocks = 2 * math.ceil(math.log(blocks + 1) / math.log(factor))
        boundaries = [0]
        for number in range(1, blocks + 1):
            boundaries.append(number)
            while len(boundaries) - 1 > max_blocks:
                del boundaries[pair_to_merge(boundaries, 1) + 1]
        for start, stop in itertools.pairwise(boundaries):
            assert blocks - start <= factor * (blocks - stop + 2)


def test_merged_blocks_are_exact_means(tmp_path):
    model = linear()
    optimizer = gadam.Gadam(model.parameters(), lr=1e-2)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=4, max_blocks=5)
    iterates = train(model, optimizer, 100)
    boundaries = blocks.boundaries
    assert len(boundaries) == 6
    assert boundaries[0] == 0
    assert boundaries[-1] == 100
    for start in boundaries[:-1]:
        found = blocks.model_state_dict(model, start)
        assert_means_equal(weights(model, found), mean(iterates[start:]))
    assert len(list((tmp_path / "blocks").glob("*.safetensors"))) == 5


# ----------------------------------------------------------------------------------------- resuming


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def through_disk(checkpoint: dict[str, object]) -> dict[str, object]:
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@each_optimizer
@pytest.mark.parametrize(("saved_at", "with_blocks"), [(20, False), (23, True), (40, True)])
def test_a_resumed_run_has_the_same_bits(make, saved_at, with_blocks, tmp_path):
    def build(folder):
        model = linear()
        optimizer = make(model.parameters())
        return model, optimizer, gadam.BlockAverages(optimizer, folder, every=4, max_blocks=4)

    model, optimizer, blocks = build(tmp_path / "undisturbed")
    train(model, optimizer, 60)
    blocks.finish()

    model, optimizer, blocks = build(tmp_path / "resumed")
    train(model, optimizer, saved_at)
    checkpoint = through_disk(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "blocks": blocks.state_dict(),
        }
    )
    train(model, optimizer, 17, first=saved_at + 1)  # ends with later, merged blocks on disk
    blocks.flush()

    model, optimizer, blocks = build(tmp_path / "resumed")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if with_blocks:
        blocks.load_state_dict(checkpoint["blocks"])
    assert blocks.boundaries[-1] == saved_at // 4 * 4
    train(model, optimizer, 60 - saved_at, first=saved_at + 1)
    blocks.finish()
    undisturbed, resumed = files(tmp_path / "undisturbed"), files(tmp_path / "resumed")
    # The files of the checkpoint are kept, so that it can be resumed again.
    assert undisturbed.items() <= resumed.items()
    assert (
        blocks.boundaries
        == gadam.BlockAverages(
            make(linear().parameters()), tmp_path / "undisturbed", every=4
        ).boundaries
    )


def test_the_state_is_small(tmp_path):
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=2, max_blocks=8)
    for _ in range(40):
        model(torch.ones(1, 300)).square().mean().backward()
        optimizer.step()
    assert len(json.dumps(blocks.state_dict())) < 5_000


def test_an_older_checkpoint_is_refused_once_blocks_were_merged_across_it(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=2, max_blocks=2)
    train(model, optimizer, 6)
    old = copy.deepcopy(blocks.state_dict()), copy.deepcopy(optimizer.state_dict())
    for first in range(7, 60, 10):
        train(model, optimizer, 10, first=first)
        blocks.state_dict()
    optimizer.load_state_dict(old[1])
    with pytest.raises(BlockError, match=r"no longer has the block of steps .* later checkpoint"):
        blocks.load_state_dict(old[0])
    with pytest.raises(BlockError, match="merged blocks across step 6"):
        train(model, optimizer, 1)


def test_a_folder_with_blocks_is_never_overwritten(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)
    iterates = train(model, optimizer, 10)
    blocks.flush()
    before = files(tmp_path / "blocks")
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)
    # Its blocks can be read without the run.
    assert_means_equal(weights(model, blocks.model_state_dict(model, 5)), mean(iterates[5:]))
    with pytest.raises(BlockError, match="already has blocks, up to step 10"):
        train(model, optimizer, 1)
    assert files(tmp_path / "blocks") == before


def test_foreign_folders_and_states_are_refused(tmp_path):
    def build(name, **settings):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if name == "one" else 0.2)
        blocks = gadam.BlockAverages(optimizer, tmp_path / name, **{"every": 5, **settings})
        return model, optimizer, blocks

    states = {}
    for name in ("one", "other"):
        model, optimizer, blocks = build(name)
        train(model, optimizer, 10)
        states[name] = blocks.state_dict()
    model, optimizer, blocks = build("one")
    with pytest.raises(BlockError, match="blocks of another run than this checkpoint"):
        blocks.load_state_dict(states["other"])
    blocks.load_state_dict(states["one"])
    with pytest.raises(BlockError, match="saved at step 10, but the optimizer is at step 0"):
        train(model, optimizer, 1)
    with pytest.raises(BlockError, match="not the state of block averages"):
        blocks.load_state_dict({"step": 3})
    with pytest.raises(BlockError, match="every=5 and stride=1, got every=10"):
        build("one", every=10)
    another = nn.Linear(2, 2)
    with pytest.raises(BlockError, match="another model: parameter 0 has shape"):
        gadam.BlockAverages(
            torch.optim.SGD(another.parameters(), lr=0.1), tmp_path / "one", every=5
        )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    with pytest.raises(BlockError, match="not empty and has no manifest"):
        build("notes")


def test_the_blocks_of_another_run_are_refused_even_if_all_numbers_fit(tmp_path):
    """Two runs of one model, step for step: only the number of the run tells them apart."""

    def build(name):
        model = linear()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        return model, optimizer, gadam.BlockAverages(optimizer, tmp_path / name, every=5)

    saved = {}
    for name in ("one", "other"):
        model, optimizer, blocks = build(name)
        train(model, optimizer, 10)
        saved[name] = {"optimizer": optimizer.state_dict(), "blocks": blocks.state_dict()}
        blocks.flush()
    assert saved["one"]["blocks"]["run"] != saved["other"]["blocks"]["run"]
    before = files(tmp_path / "other")
    (tmp_path / "one").rename(tmp_path / "moved")
    (tmp_path / "other").rename(tmp_path / "one")
    # The optimizer's own state is enough to notice.
    model, optimizer, blocks = build("one")
    optimizer.load_state_dict(through_disk(saved["one"])["optimizer"])
    with pytest.raises(BlockError, match="blocks of another run"):
        train(model, optimizer, 1, first=11)
    with pytest.raises(BlockError, match="blocks of another run"):
        blocks.model_state_dict(model)
    # A checkpoint that was taken without blocks fits no folder that has some.
    model, optimizer, blocks = build("one")
    plain = OPTIMIZERS["adamw"](model.parameters())
    train(model, plain, 10)
    with pytest.warns(UserWarning, match="has no average"):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(BlockError, match="blocks of another run"):
        train(model, optimizer, 1, first=11)
    assert files(tmp_path / "one") == before
    # A run may continue in a new folder, and one that was moved with its run is accepted.
    model, optimizer, blocks = build("new")
    optimizer.load_state_dict(saved["one"]["optimizer"])
    train(model, optimizer, 5, first=11)
    assert blocks.boundaries == [10, 15]
    assert blocks.state_dict()["run"] == saved["one"]["blocks"]["run"]
    model, optimizer, blocks = build("moved")
    optimizer.load_state_dict(saved["one"]["optimizer"])
    blocks.load_state_dict(saved["one"]["blocks"])
    train(model, optimizer, 5, first=11)
    assert blocks.boundaries == [0, 5, 10, 15]


def test_a_checkpoint_from_before_the_first_step_can_be_resumed(tmp_path):
    def build():
        model = linear()
        optimizer = gadam.Gadam(model.parameters(), lr=1e-2)
        return model, optimizer, gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)

    model, optimizer, blocks = build()
    saved = through_disk({"optimizer": optimizer.state_dict(), "blocks": blocks.state_dict()})
    train(model, optimizer, 10)
    blocks.finish()
    expected = files(tmp_path / "blocks")
    model, optimizer, blocks = build()
    optimizer.load_state_dict(saved["optimizer"])
    blocks.load_state_dict(saved["blocks"])
    train(model, optimizer, 10)
    blocks.finish()
    assert files(tmp_path / "blocks") == expected


def test_a_checkpoint_of_an_abandoned_training_is_refused(tmp_path):
    """The run went back to an earlier checkpoint, and its blocks are others since."""

    def build():
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)

    model, optimizer, blocks = build()
    saved = []
    for first in (1, 11):
        train(model, optimizer, 10, first=first)
        checkpoint = {"optimizer": optimizer.state_dict(), "blocks": blocks.state_dict()}
        saved.append(through_disk(checkpoint))
    model, optimizer, blocks = build()
    optimizer.load_state_dict(saved[0]["optimizer"])
    blocks.load_state_dict(saved[0]["blocks"])
    train(model, optimizer, 10, first=77)  # with other data
    blocks.flush()
    _, _, blocks = build()
    with pytest.raises(BlockError, match="later training from an earlier checkpoint"):
        blocks.load_state_dict(saved[1]["blocks"])


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    runs = []
    for _ in range(2):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append((model, optimizer, gadam.BlockAverages(optimizer, tmp_path / "b", every=5)))
    train(*runs[0][:2], 2)
    with pytest.raises(BlockError, match="Another process has written"):
        train(*runs[1][:2], 1)


# -------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest", "gap"])
def test_damage_is_found(damage, tmp_path):
    folder = tmp_path / "blocks"
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, folder, every=5)
    train(model, optimizer, 20)
    blocks.flush()
    path = folder / "000000000005-000000000010.safetensors"
    if damage == "flip":
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "delete":
        path.unlink()
    else:
        manifest = folder / "blocks.json"
        text = manifest.read_text()
        manifest.write_text(
            text[:100] if damage == "gap" else text.replace('"stop": 10', '"stop": 9')
        )
    with pytest.raises(BlockError) as error:
        gadam.BlockAverages(
            torch.optim.SGD(model.parameters(), lr=0.1), folder, every=5
        ).model_state_dict(model, 0, 10)
    assert str(error.value).count("\n") == 0
    assert "damaged" in str(error.value)


@pytest.mark.parametrize("operation", ["_write_safetensors", "fsync", "link", "replace", "unlink"])
@pytest.mark.parametrize("number", [0, 5])
def test_a_run_killed_at_any_write_can_be_resumed(operation, number, tmp_path, monkeypatch):
    """Fail one file operation for good, as a killed process would, and resume from a checkpoint."""

    class Killed(BaseException):
        pass

    def build(folder):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, gadam.BlockAverages(optimizer, folder, every=2, max_blocks=3)

    model, optimizer, blocks = build(tmp_path / "undisturbed")
    train(model, optimizer, 30)
    blocks.finish()
    expected = [torch.tensor(blocks.boundaries), *blocks.model_state_dict(model).values()]

    model, optimizer, blocks = build(tmp_path / "killed")
    train(model, optimizer, 9)
    checkpoint = through_disk(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "blocks": blocks.state_dict(),
        }
    )
    left = number

    def failing(original):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        owners: dict[str, object] = {"_write_safetensors": block_files, "fsync": os, "link": os}
        owner = owners.get(operation, Path)
        patched.setattr(owner, operation, failing(getattr(owner, operation)))
        with pytest.raises(Killed):
            train(model, optimizer, 21, first=10)
            blocks.finish()

    model, optimizer, blocks = build(tmp_path / "killed")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    blocks.load_state_dict(checkpoint["blocks"])
    train(model, optimizer, 21, first=10)
    blocks.finish()
    found = [torch.tensor(blocks.boundaries), *blocks.model_state_dict(model).values()]
    assert all(map(torch.equal, found, expected))


def test_a_full_disk_is_reported_and_earlier_blocks_stay(tmp_path, monkeypatch):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)
    train(model, optimizer, 5)
    blocks.flush()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_files, "_write_safetensors", full)
    with pytest.raises(BlockError, match="could not be written: No space left on device"):
        train(model, optimizer, 10, first=6)
    with pytest.raises(BlockError, match="No space left"):  # it is not forgotten
        blocks.finish()
    monkeypatch.undo()
    again = gadam.BlockAverages(
        torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "blocks", every=5
    )
    assert again.boundaries == [0, 5]


def test_without_safetensors_the_error_names_the_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"BlockAverages needs safetensors.*gadam\[safetensors\]"):
        gadam.BlockAverages(torch.optim.SGD(linear().parameters(), lr=0.1), tmp_path / "blocks")


def test_the_checkpoint_of_the_optimizer_carries_the_current_mean_in_its_own_type(tmp_path):
    model = linear(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gadam.BlockAverages(optimizer, tmp_path / "blocks", every=10)
    train(model, optimizer, 5)
    state = optimizer.state_dict()["state"][0]
    assert state["block_mean"].dtype == torch.float32
    # Without block averages, a state dict with them loads as before.
    fresh = gadam.Gadam(model.parameters())
    fresh.load_state_dict(optimizer.state_dict())
    assert not any("block" in key for key in fresh.state[next(model.parameters())])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be an integer of at least 1"),
        ({"max_blocks": 1}, "max_blocks must be an integer of at least 2"),
        ({"stride": True}, "stride must be an integer of at least 1"),
        ({"every": 10, "stride": 3}, "stride must divide every"),
        ({"every": 10.0}, "every must be an integer of at least 1"),
    ],
)
def test_invalid_settings(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        gadam.BlockAverages(
            torch.optim.SGD(linear().parameters(), lr=0.1), tmp_path / "blocks", **settings
        )
    assert not (tmp_path / "blocks").exists()


def test_settings_may_be_integers_of_numpy(tmp_path):
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=numpy.int64(10))
    assert type(blocks.every) is int


# --------------------------------------------------------------------------------------- weightings

WEIGHTINGS = [
    gadam.Mean(),
    gadam.EMA(0.9),
    gadam.EMA(0.999),
    gadam.PowerEMA(0.1),
    gadam.LinearDecay(),
    gadam.Window(7),
]


def sample_weights(count: int, weighting: gadam.average.plan.Weighting) -> list[float]:
    if isinstance(weighting, gadam.Window):
        size = min(weighting.size, count)
        return [0.0] * (count - size) + [1 / size] * size
    result: list[float] = []
    for number in range(1, count + 1):
        new = weighting.weight(number)
        result = [w * (1 - new) for w in result] + [new]
    return result


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any), st.sampled_from(WEIGHTINGS)
)
def test_block_weights_are_the_total_weights_of_their_samples(counts, weighting):
    exact = sample_weights(sum(counts), weighting)
    expected, spread, position = [], [], 0
    for count in counts:
        part = exact[position : position + count]
        expected.append(sum(part))
        spread += [sum(part) / max(count, 1)] * count
        position += count
    assert block_weights(counts, weighting) == pytest.approx(expected, abs=1e-12)
    error = sum(abs(a - b) for a, b in zip(exact, spread)) / 2
    assert misplaced_weight(counts, weighting) == pytest.approx(error, abs=1e-12)


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_composed_weightings_differ_by_at_most_the_stated_error(weighting, tmp_path):
    model = linear(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = gadam.IterateAverage(optimizer, gadam.Averaging(start=11, weighting=weighting))
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)
    iterates = train(model, optimizer, 60)
    found = torch.cat(
        [t.flatten() for t in blocks.model_state_dict(model, 10, weighting=weighting).values()]
    )
    expected = torch.cat([t.flatten() for t in exact.model_state_dict(model).values()])
    points = torch.stack([torch.cat([t.flatten() for t in iterate]) for iterate in iterates])
    diameter = max(
        float(torch.cdist(points[i : i + 5], points[i : i + 5]).max()) for i in range(10, 60, 5)
    )
    error = blocks.weighting_error(weighting, 10)
    assert float((found - expected).norm()) <= error * diameter + 1e-9
    assert error == 0 if isinstance(weighting, gadam.Mean) else 0 < error < 0.5
    with blocks.applied(model, 10, weighting=weighting):
        torch.testing.assert_close(
            torch.cat([p.detach().flatten() for p in model.parameters()]), found
        )


def test_a_weighting_is_no_name(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)
    train(model, optimizer, 10)
    with pytest.raises(TypeError, match=r"weighting must be Mean\(\), EMA\(\)"):
        blocks.model_state_dict(model, weighting="ema")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Invalid weighting: 'ema'"):
        blocks.weighting_error("ema")  # type: ignore[arg-type]


def test_it_cannot_be_copied(tmp_path):
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks")
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(blocks)
    assert "every=100" in repr(blocks)


def test_remove_stops_sampling(tmp_path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=5)
    train(model, optimizer, 5)
    blocks.remove()
    train(model, optimizer, 5)
    assert blocks.boundaries == [0, 5]
    assert "block_mean" not in str(optimizer.state_dict())
