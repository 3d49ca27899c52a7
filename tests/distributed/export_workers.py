"""The processes of the tests of sharded exports and health."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from workers import fit, network, sharded

import gadam


def trained(**kwargs: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    """Return a sharded model and the same one in a single process, each with an average.

    All processes see the same batches, because they cannot share one evenly.
    """
    plan = gadam.Averaging(start=2, **kwargs)
    alone = network()
    expected = gadam.GadamX(alone.parameters(), 0.05, average=plan)
    fit(alone, expected, range(5), None)
    model, optimizer = sharded(plan)
    fit(model, optimizer, range(5), None)
    return model, optimizer, alone, expected


def exports(rank: int, folder: Path) -> None:
    """Sizes that no number of processes shares evenly, the last with empty shards."""
    from torch.distributed.tensor import DTensor

    model, optimizer, alone, expected = trained()
    reference = expected.average.model_state_dict(alone)
    shards = optimizer.average.model_state_dict(model, dtype=torch.float64)
    for name, value in shards.items():
        assert isinstance(value, DTensor)
        assert value.dtype == torch.float64
        whole = value.full_tensor().float()
        torch.testing.assert_close(whole, reference[name], rtol=1e-4, atol=1e-5)

    gathered = optimizer.average.model_state_dict(model, full=True)
    if rank:
        assert gathered == {}
        return
    assert gathered.keys() == reference.keys()
    for name, value in gathered.items():
        assert not isinstance(value, DTensor)
        torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-5)
    fresh = network()
    fresh.load_state_dict(gathered)


def files(rank: int, folder: Path) -> None:
    from gadam.average import read_provenance

    model, optimizer, alone, expected = trained(dtype=torch.float64)
    path = folder / "model.safetensors"
    optimizer.average.save_model(model, path)
    dist.barrier()
    found = read_provenance(path)
    assert (found.point, found.samples, found.first_step, found.last_step) == ("average", 4, 2, 5)
    # All processes refuse, so none waits for the others.
    try:
        optimizer.average.save_model(model, path)
    except FileExistsError:
        pass
    else:
        raise AssertionError("the file was overwritten")
    if rank == 0:
        from safetensors.torch import load_file

        reference = expected.average.model_state_dict(alone)
        for name, value in load_file(path).items():
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-5)


def health(rank: int, folder: Path) -> None:
    """All processes see the health of the whole model, after one reduction."""
    from torch.distributed.tensor.debug import CommDebugMode

    model, optimizer, _, expected = trained()
    with CommDebugMode() as communication:
        found = optimizer.average.health()
    counts = communication.get_comm_counts()
    assert sum(counts.values()) == 1, counts
    assert math.isclose(found.distance, expected.average.health().distance, rel_tol=1e-3)
    assert found.problems == ()
    # A broken shard in one process
    last = list(model.parameters())[-1]
    shard = optimizer.state[last]["average"].to_local()
    if shard.numel():
        shard.fill_(math.nan)
    assert not optimizer.average.health().finite
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with CommDebugMode() as communication, optimizer.average.applied(model):
            pass
    assert communication.get_total_counts() == 0
    assert bool(caught) == bool(shard.numel())


def health_of_replicas(rank: int, folder: Path) -> None:
    """Parameters that are both replicated and sharded (HSDP), beside one that is neither."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plan = gadam.Averaging(start=2)
    alone = network()
    expected = gadam.GadamX(alone.parameters(), 0.05, average=plan)
    fit(alone, expected, range(5), None)
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "shards"))
    fully_shard(model[0], mesh=mesh)
    optimizer = gadam.GadamX(model.parameters(), 0.05, average=plan)
    fit(model, optimizer, range(5), None)
    found, reference = optimizer.average.health(), expected.average.health()
    assert math.isclose(found.distance, reference.distance, rel_tol=1e-3)
    gathered = optimizer.average.model_state_dict(model, full=True)
    assert bool(gathered) == (rank == 0)
