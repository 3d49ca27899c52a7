"""Train with Gadam in a plain PyTorch loop: AdamW at a constant rate, with an average.

Run: python examples/plain_loop.py
"""

import torch
from torch import nn

import gadam

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
with torch.no_grad():
    inputs = torch.randn(4000, 20)
    targets = teacher(inputs)
noisy = targets[:2000] + 0.5 * torch.randn(2000, 1)
train = torch.utils.data.TensorDataset(inputs[:2000], noisy)
loader = torch.utils.data.DataLoader(train, batch_size=50, shuffle=True)

EPOCHS = 20
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
plan = gadam.Averaging.for_budget(EPOCHS * len(loader))  # average over the last quarter
optimizer = gadam.Gadam(model.parameters(), lr=0.01, weight_decay=0.1, average=plan)


def test_loss() -> float:
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs[2000:]), targets[2000:]).item()


for _epoch in range(EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

print(f"raw weights: test loss {test_loss():.4f}")
with optimizer.average.applied(model):
    print(f"averaged weights: test loss {test_loss():.4f}")
