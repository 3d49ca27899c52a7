"""Exports: state dicts and files of averaged weights, with their provenance."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gadam
from average_models import BATCHES, fit, small_model
from gadam.average.export import Provenance, exported, read_provenance, write_file

PROVENANCE = Provenance("average", 139, 2, 162, 300, 310, "Mean()", "a plan", "0.1.0", "2.13.0")


def doubled(model: nn.Module) -> dict[Tensor, Any]:
    """Return the "averages" 2θ of all parameters, in float32."""
    return {p: lambda p=p: p.detach().float() * 2 for p in model.parameters()}


def test_an_export_keeps_the_precision_of_the_average():
    linear = nn.Linear(3, 2)
    model = nn.Sequential(linear, nn.BatchNorm1d(2)).bfloat16()
    state = exported(model, doubled(model))
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(state["0.weight"], linear.weight.float() * 2)
    assert state["1.running_mean"].dtype == torch.bfloat16
    assert state["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_dtype_casts_all_floating_point_tensors(dtype):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for averages in (doubled(model), {}):
        state = exported(model, averages, dtype=dtype)
        assert {t.dtype for t in state.values()} == {dtype, torch.int64}
    with pytest.raises(ValueError, match="Invalid dtype"):
        exported(model, {}, dtype=torch.int8)


def test_an_export_shares_no_memory_with_the_model_or_the_average():
    model = nn.Linear(3, 2)
    averages = {p: p.detach().clone() for p in model.parameters()}
    values: dict[Tensor, Any] = {p: lambda p=p: averages[p] for p in averages}
    for state in (exported(model, values), exported(model, {}), exported(model, {}, torch.float32)):
        for t in state.values():
            t.fill_(7.0)
    everything = [*model.parameters(), *averages.values()]
    assert not any((t == 7.0).any() for t in everything)


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    state = exported(model, doubled(model))
    assert state["0.weight"] is state["1.weight"]


def test_a_file_holds_the_tensors_and_their_provenance(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model

    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))
    model.append(nn.Linear(3, 3, bias=False))
    model[3].weight = model[0].weight
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    state = exported(model, doubled(model))
    path = tmp_path / "model.safetensors"
    write_file(path, state, PROVENANCE)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    loaded = load_file(path)
    assert loaded.keys() == state.keys() - {"3.weight"}  # stored once
    for name, value in loaded.items():
        assert torch.equal(value, state[name])
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["gadam.point"] == "average"
    assert metadata["3.weight"] == "0.weight"
    assert read_provenance(path) == PROVENANCE
    load_model(model, path)
    assert torch.equal(model.state_dict()["3.weight"], state["0.weight"])


def test_a_file_is_never_overwritten(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="Remove it first, or pass a different path"):
        write_file(path, {"x": torch.ones(2)}, PROVENANCE)
    assert path.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_file_that_appears_meanwhile_is_not_overwritten_either(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    link = os.link

    def late(source: Any, target: Any) -> None:
        Path(target).write_bytes(b"precious")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(FileExistsError, match="Remove it first"):
        write_file(path, {"x": torch.ones(2)}, PROVENANCE)
    assert path.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_file_system_without_hard_links_is_served(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    write_file(tmp_path / "model.safetensors", {"x": torch.ones(2)}, PROVENANCE)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "model.safetensors", {"x": torch.ones(2)}, PROVENANCE)
    assert os.listdir(tmp_path) == []


def test_what_a_file_cannot_hold_is_named(tmp_path):
    with pytest.raises(TypeError, match="the entry 'extra' is a dict"):
        write_file(tmp_path / "model.safetensors", {"extra": {}}, PROVENANCE)
    wide = {"weight": torch.ones(3, dtype=torch.complex128)}
    with pytest.raises(TypeError, match=r"cannot hold the entry 'weight' of type torch.complex128"):
        write_file(tmp_path / "model.safetensors", wide, PROVENANCE)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none does not exist. Create it first"):
        write_file(tmp_path / "none" / "model.safetensors", {"a": torch.ones(1)}, PROVENANCE)


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"gadam\[safetensors\]"):
        write_file(tmp_path / "model.safetensors", {"x": torch.ones(2)}, PROVENANCE)


def test_other_files_have_no_provenance(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "file"
    for content in (b"", b"short", b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a safetensors file"):
            read_provenance(path)
    save_file({"x": torch.ones(2)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="does not say which weights it holds"):
        read_provenance(path)
    header = json.dumps({"__metadata__": {"gadam.point": "neither"}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="Invalid point"):
        read_provenance(path)


def test_provenance_without_samples_round_trips():
    iterate = Provenance("iterate", 0, 0, None, None, 5, "Mean()", "a plan", "0.1.0", "2.13.0")
    assert Provenance.from_metadata(iterate.to_metadata()) == iterate


# --------------------------------------------------------------------------------- of an average


def averaged(dtype: torch.dtype = torch.float32, **plan: Any) -> tuple[Any, gadam.IterateAverage]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    plan = {"start": 2, "every": 2, **plan}
    optimizer = gadam.Gadam(model.parameters(), lr=0.05, average=gadam.Averaging(**plan))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return model, optimizer.average


def test_a_float32_average_of_bfloat16_weights_is_exported_in_float32():
    model, average = averaged(torch.bfloat16)
    exact = average.optimizer.state[model[0].weight]["average"]
    state = average.model_state_dict(model)
    assert torch.equal(state["0.weight"], exact)
    assert not torch.equal(exact, exact.bfloat16().float())  # rounding would show
    rounded = average.model_state_dict(model, dtype=torch.bfloat16)
    assert torch.equal(rounded["0.weight"], exact.bfloat16())
    model.load_state_dict(state)  # casts


def test_a_saved_model_says_what_it_is(tmp_path):
    from safetensors.torch import load_file

    model, average = averaged(torch.bfloat16, weighting=gadam.EMA(0.9))
    raw = {name: t.clone() for name, t in model.state_dict().items()}
    path = tmp_path / "model.safetensors"
    average.save_model(model, path)
    found = gadam.average.read_provenance(path)
    assert found == Provenance(
        point="average",
        samples=2,
        skipped=0,
        first_step=2,
        last_step=4,
        step=5,
        weighting="EMA(decay=0.9)",
        plan=repr(average.averaging),
        gadam_version=gadam.__version__,
        torch_version=torch.__version__,
    )
    loaded = load_file(path)
    for name, value in average.model_state_dict(model).items():
        assert torch.equal(loaded[name], value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, raw[name])
    average.save_model(model, tmp_path / "half", dtype=torch.float16)
    assert {t.dtype for t in load_file(tmp_path / "half").values()} == {torch.float16}
    with pytest.raises(FileExistsError, match="Remove it first"):
        average.save_model(model, path)


def test_a_model_without_samples_is_saved_as_the_iterate(tmp_path):
    model, average = averaged(start=100)
    with pytest.warns(UserWarning, match="no sample yet"):
        average.save_model(model, tmp_path / "file")
    found = read_provenance(tmp_path / "file")
    assert (found.point, found.samples, found.first_step, found.last_step, found.step) == (
        "iterate",
        0,
        None,
        None,
        5,
    )


def test_update_notes_its_steps(tmp_path):
    model, average = averaged(start=None, every=None)
    average.update()
    average.save_model(model, tmp_path / "file")
    found = read_provenance(tmp_path / "file")
    assert (found.samples, found.first_step, found.last_step) == (1, 5, 5)


def test_a_saved_model_has_fresh_batchnorm_statistics(tmp_path):
    from safetensors.torch import load_file

    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), 0.05, average=gadam.Averaging(start=1))
    fit(model, optimizer, 4)
    average = optimizer.average
    raw = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.warns(UserWarning, match="BatchNorm statistics are those of the raw weights"):
        average.save_model(model, tmp_path / "stale")
    average.save_model(model, tmp_path / "known", batchnorm=False)
    average.save_model(model, tmp_path / "fresh", batchnorm=BATCHES)
    for name, value in model.state_dict().items():
        assert torch.equal(value, raw[name])
    with average.applied(model, batchnorm=BATCHES):
        for name, value in load_file(tmp_path / "fresh").items():
            assert torch.equal(value, model.state_dict()[name])
    stale = load_file(tmp_path / "stale")
    assert torch.equal(stale["1.running_var"], raw["1.running_var"])


def test_an_export_inside_applied_is_the_same(tmp_path):
    from safetensors.torch import load_file

    model, average = averaged(torch.bfloat16)
    outside = average.model_state_dict(model)
    with average.applied(model):
        inside = average.model_state_dict(model)
        average.save_model(model, tmp_path / "file")
    for name, value in load_file(tmp_path / "file").items():
        assert torch.equal(value, outside[name])
        assert torch.equal(value, inside[name])
