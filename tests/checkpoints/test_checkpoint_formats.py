"""Every format: exact averages, the same layout, and clear refusals."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gadam.checkpoints import CheckpointError, average, merge, read_provenance
from gadam.checkpoints.formats import SafetensorsFile

State = dict[str, Tensor]


def states(count: int = 3, dtype: torch.dtype = torch.float32) -> list[State]:
    return [
        {
            "a.weight": torch.randn(5, 3).to(dtype),
            "a.scale": torch.randn(()).to(dtype),
            "empty": torch.empty(0, 4, dtype=dtype),
            "steps": torch.tensor(step),
            "mask": torch.tensor([True, step % 2 == 0]),
        }
        for step in range(count)
    ]


def expected(found: list[State], weights: list[float] | None = None) -> State:
    """The weighted mean by NumPy, and the last integers."""
    factors = np.array(weights or [1.0] * len(found), dtype=np.float64)
    result = {}
    for name, last in found[-1].items():
        if not last.is_floating_point():
            result[name] = last
            continue
        stacked = np.stack([state[name].double().numpy() for state in found])
        mean = np.tensordot(factors / factors.sum(), stacked, 1)
        result[name] = torch.from_numpy(np.asarray(mean)).to(last.dtype)
    return result


def same(found: State, wanted: State) -> None:
    assert list(found) == list(wanted) or set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


# ------------------------------------------------------------------------------------ the formats


def as_safetensors(folder: Path, step: int, state: State) -> Path:
    save_file(state, folder / f"step-{step}.safetensors", {"format": "pt", "note": "kept"})
    return folder / f"step-{step}.safetensors"


def as_state_dict(folder: Path, step: int, state: State) -> Path:
    torch.save(state, folder / f"step-{step}.pt")
    return folder / f"step-{step}.pt"


def as_legacy_file(folder: Path, step: int, state: State) -> Path:
    torch.save(state, folder / f"step-{step}.pth", _use_new_zipfile_serialization=False)
    return folder / f"step-{step}.pth"


def as_nested(folder: Path, step: int, state: State) -> Path:
    optimizer = {"state": {0: {"exp_avg": torch.ones(5, 3)}}}
    content = {"model": state, "optimizer": optimizer, "epoch": step}
    torch.save(content, folder / f"step-{step}.pt")
    return folder / f"step-{step}.pt"


def as_hugging_face(folder: Path, step: int, state: State) -> Path:
    target = folder / f"checkpoint-{step}"
    target.mkdir()
    save_file(state, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text('{"dtype": "float32"}')
    (target / "trainer_state.json").write_text("{}")
    (target / "optimizer.pt").write_bytes(b"large")
    (target / "rng_state.pth").write_bytes(b"small")
    (target / "training_args.bin").write_bytes(b"arguments")
    return target


def as_shards(folder: Path, step: int, state: State, suffix: str = "safetensors") -> Path:
    target = folder / f"checkpoint-{step}"
    target.mkdir()
    places = {}
    for i, part in enumerate((list(state)[:2], list(state)[2:]), 1):
        name = f"model-{i:05d}-of-00002.{suffix}"
        shard = {key: state[key] for key in part}
        save_file(shard, target / name) if suffix != "bin" else torch.save(shard, target / name)
        places.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (target / f"model.{suffix}.index.json").write_text(json.dumps(index))
    return target


def as_torch_shards(folder: Path, step: int, state: State) -> Path:
    return as_shards(folder, step, state, "bin")


def as_distributed(folder: Path, step: int, state: State) -> Path:
    target = folder / f"step-{step}"
    optimizer = {"state": {"a.weight": {"exp_avg": torch.ones(5, 3)}}}
    dcp.save({"model": state, "optim": optimizer, "step": step}, checkpoint_id=target)
    return target


def loaded(path: Path) -> State:
    """Load a result as its users do."""
    if (path / ".metadata").exists():
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        state = {
            name.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load({"model": state}, checkpoint_id=path)
        return state
    if path.is_file():
        files = [path]
    else:
        files = [p for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth")]
    result: State = {}
    for file in files:
        if file.name == "training_args.bin":
            continue
        content = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
        result.update(content.get("model", content))
    return result


FORMATS = [
    *(as_safetensors, as_state_dict, as_legacy_file, as_nested, as_hugging_face),
    *(as_shards, as_torch_shards, as_distributed),
]
Format = Callable[[Path, int, State], Path]


@pytest.fixture(params=FORMATS, ids=lambda f: f.__name__)
def layout(request) -> Format:
    save: Format = request.param
    return save


def saved(layout: Format, folder: Path, found: list[State]) -> list[Path]:
    return [layout(folder, 9 + step, state) for step, state in enumerate(found)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_the_mean_of_numpy(layout, dtype, tmp_path):
    found = states(3, dtype)
    paths = saved(layout, tmp_path, found)
    provenance = average(paths[::-1], tmp_path / "out")
    same(loaded(tmp_path / "out"), expected(found))
    assert read_provenance(tmp_path / "out") == provenance
    assert [each.step for each in provenance.inputs] == [9, 10, 11]
    assert (provenance.averaged, len(provenance.copied)) == (3, 2)
    assert provenance.batchnorm == "none"


def test_a_type_may_be_chosen(layout, tmp_path):
    found = states(3, torch.float16)
    wide = [{n: v.double() if v.is_floating_point() else v for n, v in s.items()} for s in found]
    average(saved(layout, tmp_path, found), tmp_path / "out", dtype="float64")
    torch.testing.assert_close(loaded(tmp_path / "out"), expected(wide), rtol=1e-15, atol=0)


def test_a_type_that_cannot_hold_the_average_is_refused(layout, tmp_path):
    found = [{**state, "a.weight": state["a.weight"] + 1e6} for state in states(2)]
    with pytest.raises(CheckpointError, match=r"a.weight has values that float16 cannot hold"):
        average(saved(layout, tmp_path, found), tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


class Scaled(torch.nn.Linear):
    def get_extra_state(self):
        return {"scale": torch.ones(1)}

    def set_extra_state(self, state):
        assert state.keys() == {"scale"}


@pytest.mark.parametrize("is_nested", [False, True])
def test_extra_state_with_tensors_is_not_mistaken_for_weights(is_nested, tmp_path):
    models = [Scaled(3, 2) for _ in range(2)]
    for step, model in enumerate(models):
        state = model.state_dict()
        torch.save({"model": state} if is_nested else state, tmp_path / f"step-{step}.pt")
    average([tmp_path / "step-0.pt", tmp_path / "step-1.pt"], tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    mean = (models[0].weight + models[1].weight) / 2
    torch.testing.assert_close((found["model"] if is_nested else found)["weight"], mean.detach())


def test_the_result_averages_again(layout, tmp_path):
    """A result is a checkpoint: the reader accepts what the writer writes."""
    found = states(2)
    paths = saved(layout, tmp_path, found)
    for step in (1, 2):
        average(paths, tmp_path / f"step-{step}")
    average([tmp_path / "step-1", tmp_path / "step-2"], tmp_path / "again")
    same(loaded(tmp_path / "again"), expected(found))


def test_small_parts_give_the_same(layout, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "_GROUP", 4)
    monkeypatch.setattr(merge, "_GROUPS", 10**9)
    found = states(3)
    average(saved(layout, tmp_path, found), tmp_path / "out", [1, 0, 3])
    same(loaded(tmp_path / "out"), expected(found, [1, 0, 3]))


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_any_weights(tmp_path_factory, weights, seed):
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(seed)
    found = states(len(weights))
    provenance = average(saved(as_safetensors, folder, found), folder / "out", weights)
    torch.testing.assert_close(
        loaded(folder / "out"), expected(found, weights), rtol=1e-6, atol=1e-7
    )
    assert sum(each.weight for each in provenance.inputs) == pytest.approx(1)


def test_sums_of_many_half_precision_checkpoints_are_exact(tmp_path):
    found = [{"w": torch.full((3,), 1 + (i % 2) / 128, dtype=torch.bfloat16)} for i in range(300)]
    average(saved(as_safetensors, tmp_path, found), tmp_path / "out", dtype="float32")
    assert loaded(tmp_path / "out")["w"].tolist() == [1 + 1 / 256] * 3


def test_infinite_masks_stay_and_nans_are_named(tmp_path):
    found = [{"mask": torch.tensor([0.0, -torch.inf]), "w": torch.ones(2)} for _ in range(3)]
    average(saved(as_safetensors, tmp_path, found), tmp_path / "out")
    assert loaded(tmp_path / "out")["mask"].tolist() == [0, -torch.inf]
    found[1]["w"][0] = torch.nan
    paths = saved(as_state_dict, tmp_path, found)
    with pytest.raises(CheckpointError, match=r"w in .*step-10.pt is not finite"):
        average(paths, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    average(paths, tmp_path / "other", [1, 0, 1])


# ----------------------------------------------------------------------------- layouts and extras


def test_a_folder_is_copied_without_the_training_state(tmp_path):
    paths = saved(as_hugging_face, tmp_path, states())
    (paths[-1] / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    (paths[-1] / "1_Pooling").mkdir()
    (paths[-1] / "1_Pooling" / "config.json").write_text("{}")
    left_out = average(paths, tmp_path / "out").left_out
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    copied = ["1_Pooling", "config.json", "training_args.bin"]
    assert names == sorted([*copied, "gadam-average.json", "model.safetensors"])
    state = ["optimizer.pt", "pytorch_model.bin", "rng_state.pth", "trainer_state.json"]
    assert sorted(left_out) == state


def test_the_config_names_a_new_type(tmp_path):
    average(saved(as_hugging_face, tmp_path, states()), tmp_path / "out", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_index_of_shards_has_the_new_size(tmp_path):
    average(saved(as_shards, tmp_path, states()), tmp_path / "out", dtype="float64")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 16 * 8 + 8 + 2
    assert len(set(index["weight_map"].values())) == 2


def test_a_nested_file_keeps_everything_but_the_optimizer(tmp_path):
    provenance = average(saved(as_nested, tmp_path, states()), tmp_path / "out.pt")
    content = torch.load(tmp_path / "out.pt")
    assert list(content) == ["model", "epoch"]
    assert content["epoch"] == 11
    assert provenance.left_out == ("optimizer",)


def test_a_safetensors_file_keeps_its_metadata_and_is_valid(tmp_path):
    mixed = [{"flag": torch.tensor([True]), "w": torch.randn(3), **state} for state in states()]
    average(saved(as_safetensors, tmp_path, mixed), tmp_path / "out.safetensors", dtype="float64")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["note"]) == ("pt", "kept")
    assert json.loads(metadata["gadam.average"])["weights"] == "mean"
    reader = SafetensorsFile(tmp_path / "out.safetensors")
    for name, info in reader.tensors.items():
        assert (reader._begin + reader._offsets[name]) % info.dtype.itemsize == 0


def test_tied_weights_stay_tied_if_they_were_in_all_checkpoints(tmp_path):
    for step in range(3):
        weight = torch.randn(4, 2)
        state = {"embedding": weight, "head": weight, "step": torch.tensor(step)}
        torch.save(state, tmp_path / f"step-{step}.pt")
    average(str(tmp_path / "step-*.pt"), tmp_path / "tied.pt")
    result = torch.load(tmp_path / "tied.pt")
    assert result["embedding"].data_ptr() == result["head"].data_ptr()
    torch.save({**state, "head": weight + 1}, tmp_path / "step-0.pt")
    average(str(tmp_path / "step-*.pt"), tmp_path / "untied.pt")
    result = torch.load(tmp_path / "untied.pt")
    torch.testing.assert_close(result["head"], result["embedding"] + 1 / 3)


def test_the_metadata_of_modules_is_kept(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    for step in range(2):
        torch.save(model.state_dict(), tmp_path / f"step-{step}.pt")
    average(str(tmp_path / "*.pt"), tmp_path / "out.pt")
    result: Any = torch.load(tmp_path / "out.pt")
    assert result._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


def test_raw_weights_of_lightning_are_averaged_by_default(tmp_path):
    for step in range(2):
        content = {
            "state_dict": {"w": torch.full((2,), 100.0)},
            "current_model_state": {"w": torch.full((2,), float(step))},
            "averaging_state": {"n_averaged": torch.tensor(1)},
            "optimizer_states": [{"state": {}}],
            "hyper_parameters": {"width": 2},
            "pytorch-lightning_version": "2.6.0",
        }
        torch.save(content, tmp_path / f"epoch={step}.ckpt")
    with pytest.warns(UserWarning, match="The raw ones are averaged"):
        average(str(tmp_path / "*.ckpt"), tmp_path / "raw.ckpt")
    result = torch.load(tmp_path / "raw.ckpt")
    assert list(result) == ["state_dict", "hyper_parameters", "pytorch-lightning_version"]
    assert result["state_dict"]["w"].tolist() == [0.5, 0.5]
    average(str(tmp_path / "epoch*.ckpt"), tmp_path / "averaged.ckpt", point="average")
    assert torch.load(tmp_path / "averaged.ckpt")["state_dict"]["w"].tolist() == [100, 100]


def test_a_key_selects_weights(tmp_path):
    for step in range(2):
        content = {"ema": {"shadow": {"w": torch.full((1,), float(step))}}, "n": 3}
        torch.save(content, tmp_path / f"step-{step}.pt")
    average(str(tmp_path / "*.pt"), tmp_path / "out.pt", key="ema.shadow")
    assert torch.load(tmp_path / "out.pt")["ema"]["shadow"]["w"].item() == 0.5
    with pytest.raises(CheckpointError, match=r"no entry 'ema.gone'. Its keys are shadow"):
        average(str(tmp_path / "step*.pt"), tmp_path / "other.pt", key="ema.gone")


# --------------------------------------------------------------------------------------- refusals


def two(tmp_path: Path, first: Any, second: Any) -> list[Path]:
    for step, state in enumerate((first, second)):
        torch.save(state, tmp_path / f"step-{step}.pt")
    return [tmp_path / "step-0.pt", tmp_path / "step-1.pt"]


ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": ONES}, {"a": ONES, "b": ONES}, "step-0.pt lacks b"),
        ({"a": ONES, "b": ONES}, {"a": ONES}, "lacks b, which .*step-0.pt has"),
        ({"a": torch.ones(3)}, {"a": ONES}, r"a has shape \[3\] in .* and \[2\] in "),
        ({"a": ONES.half()}, {"a": ONES}, "a is float16 in .* and float32 in .* Pass --dtype"),
        ({"a": ONES.int()}, {"a": ONES}, r"a is int32 in .* and float32 in [^ ]*$"),
        ({"a": ONES.to_sparse()}, {"a": ONES}, "a in .* is a sparse tensor"),
        ({"a": ONES.to(torch.complex64)}, {"a": ONES}, "a in .* is of type complex64"),
        ({"a": ONES.to(torch.float8_e4m3fn)}, {"a": ONES}, "a in .* is of type float8_e4m3fn"),
        ({"a": 1}, {"a": 1}, "no model weights at a known key. Its keys are a"),
        (
            {"t": ONES, "net": {"a": ONES}},
            {"t": ONES},
            "Its keys are t, net. Select one with --key",
        ),
        ([ONES], [ONES], "contains a list, not a state dict"),
        ({"model": {"a": ONES}, "state_dict": {"a": ONES}}, {"a": ONES}, "Select one with --key"),
    ],
)
def test_what_does_not_match_is_named(first, second, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        average(two(tmp_path, first, second), tmp_path / "out")
    assert not list(tmp_path.glob(".*")) + list(tmp_path.glob("out*"))


def test_all_differences_are_named_at_once_but_no_more_than_ten(tmp_path):
    paths = two(tmp_path, {}, {f"w{i:02d}": ONES for i in range(30)})
    torch.save({"x": ONES}, paths[0])
    with pytest.raises(CheckpointError, match="w09, and 21 more") as caught:
        average(paths, tmp_path / "out")
    assert "w10" not in str(caught.value)


def test_integers_alone_are_no_average(tmp_path):
    for i in (1, 2):
        torch.save({"a": torch.tensor([i])}, tmp_path / f"step-{i}.pt")
    with pytest.raises(CheckpointError, match=r"step-2.pt has no floating-point tensors"):
        average(tmp_path / "step-*.pt", tmp_path / "out.pt")


def test_different_types_are_averaged_if_a_type_is_given(tmp_path):
    average(two(tmp_path, {"a": ONES.half()}, {"a": 2 * ONES}), tmp_path / "o.pt", dtype="float32")
    assert torch.load(tmp_path / "o.pt")["a"].tolist() == [1.5, 1.5]


def test_float8_in_safetensors_is_refused(tmp_path):
    for step in range(2):
        save_file({"w": ONES.to(torch.float8_e4m3fn)}, tmp_path / f"step-{step}.safetensors")
    with pytest.raises(CheckpointError, match=r"w in .* is of type F8_E4M3"):
        average(str(tmp_path / "*.safetensors"), tmp_path / "out")


def test_a_quantized_model_is_refused(tmp_path):
    paths = saved(as_hugging_face, tmp_path, states())
    (paths[0] / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    with pytest.raises(CheckpointError, match="is quantized"):
        average(paths, tmp_path / "out")


class Payload:
    ran = False

    def __reduce__(self):
        return exec, ("from test_formats import Payload; Payload.ran = True",)


def test_no_code_from_a_checkpoint_runs(tmp_path):
    with pytest.raises(CheckpointError, match="Python objects other than tensors"):
        average(two(tmp_path, {"w": Payload()}, {"w": ONES}), tmp_path / "out")
    paths = saved(as_distributed, tmp_path, states(2))
    (paths[0] / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match=r"refers to builtins.exec"):
        average(paths, tmp_path / "out")
    assert not Payload.ran


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_damaged_files_are_named(layout, keep, tmp_path):
    paths = saved(layout, tmp_path, states(2))
    files = [paths[0]] if paths[0].is_file() else sorted(paths[0].iterdir())
    kinds = (".safetensors", ".pt", ".pth", ".bin", ".metadata")
    [damaged, *_] = [f for f in files if f.suffix in kinds or f.name == ".metadata"]
    damaged = next((f for f in files if f.name == "model.safetensors"), damaged)
    damaged.write_bytes(damaged.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"damaged|cannot be read|no tensors|shorter"):
        average(paths, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_is_named(tmp_path):
    paths = saved(as_shards, tmp_path, states(2))
    (paths[0] / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002.safetensors"):
        average(paths, tmp_path / "out")


def test_a_folder_without_weights_or_with_several_models_is_refused(tmp_path):
    paths = saved(as_hugging_face, tmp_path, states(2))
    save_file({"w": ONES}, paths[0] / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="has several models"):
        average(paths, tmp_path / "out")
    (paths[0] / "model.safetensors").unlink()
    (paths[0] / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        average(paths, tmp_path / "out")


def test_provenance_of_other_files_is_refused(tmp_path):
    for path in saved(as_state_dict, tmp_path, states(1)):
        with pytest.raises(CheckpointError, match="did not write it"):
            read_provenance(path)


def test_a_distributed_folder_needs_no_process_group_and_does_not_warn(tmp_path):
    paths = saved(as_distributed, tmp_path, states(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert average(paths, tmp_path / "out").left_out == ("optim", "step")
