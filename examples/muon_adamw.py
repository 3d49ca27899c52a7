"""Two optimizers, one average: Muon for the hidden matrices, AdamW for everything else.

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
LR, WEIGHT_DECAY = 0.003, 0.1
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
# Embeddings, the last layer, and vectors go to AdamW.
outside = {id(p) for p in model[-1].parameters()}
hidden = [p for p in model.parameters() if p.ndim == 2 and id(p) not in outside]
others = [p for p in model.parameters() if p.ndim != 2 or id(p) in outside]
# Updates as large as AdamW's: both share a learning rate.
muon = torch.optim.Muon(hidden, LR, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
adamw = torch.optim.AdamW(others, LR, weight_decay=WEIGHT_DECAY)
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
