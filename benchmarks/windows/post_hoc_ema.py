"""Lengths of an EMA chosen after training: `python -m benchmarks.windows.post_hoc_ema`.

Block averages and ema-pytorch's PostHocEMA follow the same iterates, and reconstruct the power-EMA
of EDM2 for several widths. The truth is the weighted mean of all iterates in float64. The iterates
are those of SGD on a quadratic with known curvature and noise, and of a weight that ramps from 0
to 1. Results go to results/post-hoc-ema.json. Install the peer with `pip install ema-pytorch`.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gadam
from gadam.runs.files import Document, write_json

RESULT = Path(__file__).parents[2] / "results" / "post-hoc-ema.json"
STEPS = 20_000
WIDTHS = (0.05, 0.10, 0.15, 0.20, 0.25)
TRACKED = (0.05, 0.28)  # of PostHocEMA, as in its documentation
EVERY, MAX_BLOCKS = 100, 64


class Problem(nn.Module):
    """A weight that SGD trains with gradients that are known in advance.

    Args:
        name: "quadratic" or "ramp".
        steps: The number of steps.
    """

    def __init__(self, name: str, steps: int) -> None:
        super().__init__()
        self.name, self.steps = name, steps
        self.generator = torch.Generator().manual_seed(0)
        self.curvature = torch.logspace(-4, 0, 200)
        initial = torch.ones(200) if name == "quadratic" else torch.zeros(1)
        self.weight = nn.Parameter(initial)

    def set_gradient(self) -> None:
        """Set the gradient of the next step. The learning rate is 0.1."""
        if self.name == "quadratic":
            noise = 0.1 * torch.randn(200, generator=self.generator)
            self.weight.grad = self.curvature * self.weight.detach() + noise
        else:
            self.weight.grad = torch.full((1,), -10 / self.steps)


def truth(iterates: Tensor, width: float) -> Tensor:
    """Return the power-EMA of all iterates, by its definition, in float64."""
    power = gadam.PowerEMA(width).gamma + 1
    ends = torch.linspace(0, 1, len(iterates) + 1, dtype=torch.float64) ** power
    return torch.einsum("n,nd->d", ends.diff(), iterates.double())


def peer(model: nn.Module, folder: str, **settings: Any) -> Any:
    """Return ema-pytorch's averages."""
    from ema_pytorch import PostHocEMA

    return PostHocEMA(model, sigma_rels=TRACKED, checkpoint_folder=folder, **settings)


PEERS: dict[str, dict[str, Any]] = {
    "PostHocEMA, defaults": {},
    "PostHocEMA, update_every=1": {"update_every": 1},
    "PostHocEMA, update_every=1, float32": {
        "update_every": 1,
        "checkpoint_dtype": torch.float32,
    },
}


def measure(name: str, steps: int = STEPS) -> Document:
    """Run one problem, and compare all reconstructions with the truth.

    Args:
        name: "quadratic" or "ramp".
        steps: The number of steps.
    """
    model = Problem(name, steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as place:
        blocks = gadam.BlockAverages(
            optimizer, f"{place}/blocks", every=EVERY, max_blocks=MAX_BLOCKS
        )
        peers = {
            label: peer(model, f"{place}/{i}", **settings)
            for i, (label, settings) in enumerate(PEERS.items())
        }
        iterates = []
        for _ in range(steps):
            model.set_gradient()
            optimizer.step()
            iterates.append(model.weight.detach().clone())
            for each in peers.values():
                each.update()
        points = torch.stack(iterates)
        rows: dict[str, Document] = {}
        for width in WIDTHS:
            true = truth(points, width)
            weighting = gadam.PowerEMA(width)
            found = {
                "BlockAverages": blocks.model_state_dict(
                    model, dtype=torch.float64, weighting=weighting
                )["weight"]
            }
            for label, each in peers.items():
                made = each.synthesize_ema_model(sigma_rel=width)
                found[label] = made.ema_model.weight.detach().double()
            rows[str(width)] = {
                "truth": float(true.norm()),
                "stated weighting error": blocks.weighting_error(weighting),
                "results": {
                    label: {
                        "value": float(value.norm()),
                        "relative error": float((value - true).norm() / true.norm()),
                    }
                    for label, value in found.items()
                },
            }
        copies = {"BlockAverages": len(blocks.boundaries) - 1} | {
            label: len(list(Path(f"{place}/{i}").glob("*.pt"))) for i, label in enumerate(PEERS)
        }
        blocks.remove()
    return {"steps": steps, "copies": copies, "widths": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    problems = {name: measure(name) for name in ("quadratic", "ramp")}
    report = {
        "command": "python -m benchmarks.windows.post_hoc_ema",
        "seed": 0,
        "versions": {
            "gadam": gadam.__version__,
            "torch": torch.__version__,
            "ema_pytorch": version("ema_pytorch"),
        },
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "tracked": TRACKED,
        "every": EVERY,
        "problems": problems,
    }
    write_json(options.out, report)
    for name, problem in problems.items():
        for width, row in problem["widths"].items():
            print(name, width, row)


if __name__ == "__main__":
    main()
