"""Train in Lightning with averaged weights: two lines, for any optimizer of the module.

Needs gadam[lightning].

Run: python examples/lightning_callback.py
"""

import logging

import lightning.pytorch as pl
import torch
from torch import nn

from gadam.integrations.lightning import AveragedWeights

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
with torch.no_grad():
    inputs = torch.randn(4000, 20)
    targets = teacher(inputs)
noisy = targets[:2000] + 0.5 * torch.randn(2000, 1)
train = torch.utils.data.TensorDataset(inputs[:2000], noisy)
test = torch.utils.data.TensorDataset(inputs[2000:], targets[2000:])


class Regression(pl.LightningModule):
    """A network with BatchNorm, trained with AdamW at a constant rate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the prediction."""
        out: torch.Tensor = self.net(x)
        return out

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Log the loss of a batch."""
        self.log("test_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


averaged = AveragedWeights(batchnorm=True, finish=False)
trainer = pl.Trainer(
    accelerator="cpu",
    callbacks=[averaged],
    max_epochs=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Regression()
train_loader = torch.utils.data.DataLoader(train, batch_size=50, shuffle=True)
test_loader = torch.utils.data.DataLoader(test, batch_size=500)
trainer.fit(model, train_loader, test_loader)

# Validation during training has seen the average. With finish=False, the model has the raw weights.
average_loss = float(trainer.callback_metrics["test_loss"])
raw = trainer.validate(model, test_loader, verbose=False)[0]["test_loss"]
print(f"raw weights: test loss {raw:.4f}")
print(f"averaged weights: test loss {average_loss:.4f}")
