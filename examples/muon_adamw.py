"""Two optimizers, one average: Muon for the matrices, AdamW for everything else.

Run: python examples/muon_adamw.py
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

EPOCHS = 15
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]
muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
adamw = torch.optim.AdamW(others, lr=0.01)
# A sample is taken when both have stepped, so it is one point of the whole model.
average = gadam.IterateAverage([muon, adamw], gadam.Averaging.for_budget(EPOCHS * len(loader)))


def test_loss() -> float:
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs[2000:]), targets[2000:]).item()


for _epoch in range(EPOCHS):
    for x, y in loader:
        muon.zero_grad()
        adamw.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        muon.step()
        adamw.step()

print(f"raw weights: test loss {test_loss():.4f}")
with average.applied(model):
    print(f"averaged weights: test loss {test_loss():.4f}")
