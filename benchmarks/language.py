"""A training step of the language model beside a plain one: `python benchmarks/language.py [--json FILE]`.

The plain network has the same sizes, from torch's own parts: nn.Embedding, three nn.LSTM with nn.Dropout
between them, the embedding again as decoder. Ours has weight drop, one mask for all times, dropped words and
the two regularisers besides. A step is forward, loss, backward, clipping and Adam; interleaved, medians.
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

from gadam.train import lstm, task
from gadam.train.experiments import MINI_LANGUAGE
from gadam.train.recipe import Data, Language, Optimizer, Recipe

SIZES = {  # words, batch size, the recipe's
    "awd-lstm": (10_000, 20, Language(vary_bptt=False)),
    "awd-lstm-mini": (2_000, 10, MINI_LANGUAGE),
}


class Plain(nn.Module):
    """The network as one would first write it."""

    def __init__(self, like: lstm.AWDLSTM, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*like.embedding.weight.shape)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.layers = nn.ModuleList(
            nn.LSTM(layer.input_size, layer.hidden_size) for layer in like.layers
        )
        self.decoder = nn.Linear(*reversed(self.embedding.weight.shape))
        self.decoder.weight = self.embedding.weight
        self.drop = nn.Dropout(dropout)

    def forward(self, words: Tensor, states: list) -> tuple[Tensor, list]:
        """Scores and the last states."""
        x, after = self.drop(self.embedding(words)), []
        for layer, state in zip(self.layers, states or [None] * len(self.layers)):
            x, state = layer(x, state)
            x = self.drop(x)
            after.append((state[0].detach(), state[1].detach()))
        return self.decoder(x), after


def steps(name: str) -> dict[str, Callable[[], None]]:
    """A training step of each."""
    words, batch_size, plan = SIZES[name]
    recipe = Recipe(
        "r",
        model=name,
        data=Data("toy-language", augment=False),
        optimizer=Optimizer("adam", 1e-3, 1.2e-6),
        language=plan,
        batch_size=batch_size,
    )
    problem = task.Language(recipe, 0, torch.device("cpu"), None)
    ours = lstm.build(name, words, **plan.dropouts)
    plain = Plain(ours, plan.dropout)
    text = torch.randint(words, (plan.bptt + 1, batch_size))
    passage = task.Passage(text[:-1], text[1:], 0)
    states: list = []

    def ours_step() -> None:
        loss, _ = problem.loss(ours, passage)
        finish(ours, loss)

    def plain_step() -> None:
        scores, states[:] = plain(passage.words, states)
        finish(plain, F.cross_entropy(scores.flatten(0, 1), passage.following.flatten()))

    optimizers = {
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
    """Median seconds of a step, and how fast ours is beside the plain one."""
    contenders = steps(name)
    for step in contenders.values():
        step()
    seconds: dict[str, list[float]] = {who: [] for who in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle
    for _ in range(repetitions):
        shuffle(order)
        for who in order:
            start = time.perf_counter()
            contenders[who]()
            seconds[who].append(time.perf_counter() - start)
    medians = {who: round(median(times), 5) for who, times in seconds.items()}
    return {
        **medians,
        "speed, relative to plain": round(medians["plain"] / medians["gadam"], 3),
        "repetitions": repetitions,
    }


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = {
        "threads": options.threads,
        "torch": torch.__version__,
        "system": platform.platform(),
        "seconds of a step": {
            name: measure(name, 7 if name == "awd-lstm" else 101) for name in SIZES
        },
    }
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
