"""Compare a training step of the language model with that of a plain LSTM.

Run `python benchmarks/language.py [--out FILE]`. The plain network has the same sizes and is built
from torch's own modules: nn.Embedding, three nn.LSTM layers with nn.Dropout between them, and the
embedding again as the decoder. Ours adds weight drop, one dropout mask for all time steps, word
dropout, and two regularizers. A step is the forward pass, the loss, the backward pass, clipping,
and Adam. Runs are interleaved, and medians are reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam.runs.files import write_json
from gadam.runs.recipe import Data, Language, Optimizer, Recipe
from gadam.train import lstm
from gadam.train.experiments import MINI_LANGUAGE
from gadam.train.tasks.language import LanguageTask, Passage

State = list[tuple[Tensor, Tensor]]  # hidden and cell state of each layer

SIZES = {  # words, batch size, the recipe's settings
    "awd-lstm": (10_000, 20, Language(vary_bptt=False)),
    "awd-lstm-mini": (2_000, 10, MINI_LANGUAGE),
}


class Plain(nn.Module):
    """The network without the AWD-LSTM's regularization.

    Args:
        like: The network with the sizes to use.
        dropout: Dropout between layers.
    """

    def __init__(self, like: lstm.AWDLSTM, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*like.embedding.weight.shape)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.layers = nn.ModuleList(
            nn.LSTM(layer.input_size, layer.hidden_size) for layer in like.layers
        )
        words, width = self.embedding.weight.shape
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.embedding.weight
        self.drop = nn.Dropout(dropout)

    def forward(self, words: Tensor, states: State) -> tuple[Tensor, State]:
        """Return the scores and the last states."""
        x = self.drop(self.embedding(words))
        after: State = []
        for i, layer in enumerate(self.layers):
            x, (hidden, cell) = layer(x, states[i] if states else None)
            x = self.drop(x)
            after.append((hidden.detach(), cell.detach()))
        return self.decoder(x), after


def steps(name: str) -> dict[str, Callable[[], None]]:
    """Return a training step of each network."""
    words, batch_size, settings = SIZES[name]
    recipe = Recipe(
        "r",
        model=name,
        data=Data("toy-language", augment=False),
        optimizer=Optimizer("adam", 1e-3, 1.2e-6),
        language=settings,
        batch_size=batch_size,
    )
    task = LanguageTask(recipe)
    task.setup(0, torch.device("cpu"))
    ours = lstm.build(name, words, **settings.dropouts)
    plain = Plain(ours, settings.dropout)
    text = torch.randint(words, (settings.bptt + 1, batch_size))
    passage = Passage(text[:-1], text[1:], 0)
    states: State = []

    def ours_step() -> None:
        loss, _ = task.loss(ours, passage)
        finish(ours, loss)

    def plain_step() -> None:
        scores, states[:] = plain(passage.words, states)
        finish(plain, F.cross_entropy(scores.flatten(0, 1), passage.following.flatten()))

    optimizers: dict[nn.Module, torch.optim.Optimizer] = {
        model: torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1.2e-6, fused=True)
        for model in (ours, plain)
    }

    def finish(model: nn.Module, loss: Tensor) -> None:
        optimizers[model].zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizers[model].step()

    return {"gadam": ours_step, "plain": plain_step}


def measure(name: str, repetitions: int) -> dict[str, float]:
    """Return the median seconds per step, and our speed relative to the plain network."""
    contenders = steps(name)
    for step in contenders.values():
        step()
    seconds: dict[str, list[float]] = {network: [] for network in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle
    for _ in range(repetitions):
        shuffle(order)
        for network in order:
            start = time.perf_counter()
            contenders[network]()
            seconds[network].append(time.perf_counter() - start)
    medians = {network: round(median(times), 5) for network, times in seconds.items()}
    return {
        **medians,
        "speed, relative to plain": round(medians["plain"] / medians["gadam"], 3),
        "repetitions": repetitions,
    }


def main() -> None:
    """Run the benchmark, print the results, and write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = {
        "threads": options.threads,
        "torch": torch.__version__,
        "system": platform.platform(),
        "seconds per step": {
            name: measure(name, 7 if name == "awd-lstm" else 101) for name in SIZES
        },
    }
    print(json.dumps(report, indent=1))
    if options.out:
        write_json(options.out, report)


if __name__ == "__main__":
    main()
