"""Average a model that FSDP2 shards. Every process averages its own shards.

Run: torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gadam

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

torch.manual_seed(0)  # the same data and initial weights on all ranks
teacher = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
with torch.no_grad():
    inputs = torch.randn(4000, 20, device=device)
    targets = teacher(inputs)
noisy = targets[:2000] + 0.5 * torch.randn(2000, 1, device=device)

STEPS, BATCH = 200, 50
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
mesh = init_device_mesh(device, (ranks,))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
plan = gadam.Averaging.for_budget(STEPS)
optimizer = gadam.Gadam(model.parameters(), lr=0.02, weight_decay=0.1, average=plan)


def test_loss() -> float:
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs[2000:]), targets[2000:]).item()


for _step in range(STEPS):
    batch = torch.randperm(2000, device=device).view(-1, ranks, BATCH // ranks)[0, rank]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs[batch]), noisy[batch]).backward()
    optimizer.step()

raw = test_loss()
with optimizer.average.applied(model):
    averaged = test_loss()
full = optimizer.average.model_state_dict(model, full=True)  # gathered on the first rank
if rank == 0:
    print(f"raw weights: test loss {raw:.4f}")
    print(f"averaged weights: test loss {averaged:.4f}")
    with tempfile.TemporaryDirectory() as folder:
        torch.save(full, Path(folder) / "model.pt")
    print(f"exported {len(full)} full tensors")
dist.destroy_process_group()
