"""SWA on SGD that starts and stops by itself, for a network with BatchNorm.

`Plateau` starts the average when the validation loss of the raw weights stops improving, and ends
training when that of the average does.

Run: python examples/swa_plateau.py
"""

import torch
from torch import nn

import gadam

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
with torch.no_grad():
    inputs = torch.randn(5000, 20)
    targets = teacher(inputs)
noisy = targets[:3000] + 0.5 * torch.randn(3000, 1)
train = torch.utils.data.TensorDataset(inputs[:2000], noisy[:2000])
loader = torch.utils.data.DataLoader(train, batch_size=50, shuffle=True)

model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
plan = gadam.Averaging(start=gadam.Plateau(patience=3, mode="min"), every=10)
swa = gadam.IterateAverage(sgd, plan)


def loss(x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


epochs = 0
while epochs < 40:
    epochs += 1
    model.train()
    for x, y in loader:
        sgd.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        sgd.step()
    # Until the average has a sample, these are the raw weights.
    with swa.applied(model, batchnorm=loader):
        validation = loss(inputs[2000:3000], noisy[2000:])
    if swa.observe(validation):
        break

print(f"stopped after epoch {epochs}, with {swa.count} samples")
print(f"raw weights: test loss {loss(inputs[3000:], targets[3000:]):.4f}")
swa.copy_to(model, batchnorm=loader)
print(f"averaged weights: test loss {loss(inputs[3000:], targets[3000:]):.4f}")
