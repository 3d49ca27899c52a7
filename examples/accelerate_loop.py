"""Train with Accelerate, with checkpoints that carry the average. Needs gadam[accelerate].

Run: python examples/accelerate_loop.py, or accelerate launch examples/accelerate_loop.py
"""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn

import gadam
from gadam.integrations.accelerate import register

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
with torch.no_grad():
    inputs = torch.randn(4000, 20)
    targets = teacher(inputs)
noisy = targets[:2000] + 0.5 * torch.randn(2000, 1)
train = torch.utils.data.TensorDataset(inputs[:2000], noisy)
loader = torch.utils.data.DataLoader(train, batch_size=25, shuffle=True)

EPOCHS = 15
accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = EPOCHS * len(loader) // 2  # optimizer steps: two batches each
average = gadam.IterateAverage(optimizer, gadam.Averaging.for_budget(steps))
register(accelerator, average)


def test_loss() -> float:
    x, y = (tensor[2000:].to(accelerator.device) for tensor in (inputs, targets))
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


for _epoch in range(EPOCHS):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

accelerator.print(f"raw weights: test loss {test_loss():.4f}")
with tempfile.TemporaryDirectory() as folder:
    with average.applied(model):
        accelerator.print(f"averaged weights: test loss {test_loss():.4f}")
        accelerator.save_state(folder)  # the raw weights, although the average is applied
    accelerator.load_state(folder)
accelerator.print(f"after load_state: test loss {test_loss():.4f}, {average.count} samples")
