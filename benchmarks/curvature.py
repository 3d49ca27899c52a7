"""Compare the speed of curvature products with PyHessian and curvlinops.

Run `python benchmarks/curvature.py [--out FILE]`. The benchmark trains `vgg-mini` for a few epochs
and uses 2,000 images, one thread, and BatchNorm in evaluation mode. It measures the time of a
gradient, of a Hessian-vector product, and of the spectral norm to 0.1%. Runs are interleaved, and
medians are reported. Libraries that are not installed are skipped. Install them with
`pip install pyhessian curvlinops-for-pytorch`.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from gadam.analysis import Curvature, top_eigenvalues
from gadam.runs.folder import RunFolder
from gadam.runs.recipe import override
from gadam.train import experiments, loop, tasks

EXAMPLES, BATCH, TOLERANCE = 2000, 200, 1e-3


def problem() -> tuple[nn.Module, list[Any]]:
    """Return the network after short training, and the images."""
    recipe = override(
        experiments.recipes()["compare-sgd"],
        ["epochs=6", f"batch_size={BATCH}", "evaluate_every=6"],
    )
    task = tasks.build(recipe, 0, torch.device("cpu"), None)
    with tempfile.TemporaryDirectory() as folder:
        loop.train(recipe, folder)
        _, state = RunFolder(folder, recipe, 0).final_state()
    task.model.load_state_dict(state["model"])
    return task.model.eval(), list(task.training_data(EXAMPLES))


def contenders(model: nn.Module, data: list[Any]) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the calls to time, by library: a product, and the spectral norm, which is returned."""
    loss = nn.CrossEntropyLoss()
    plain = Curvature(model, data, graph_memory=0)
    vector = torch.randn(plain.dimension, generator=torch.Generator().manual_seed(0))
    vector /= vector.norm()

    def gradient() -> None:
        """Compute the gradient with torch alone, as in training."""
        for x, y in data:
            torch.autograd.grad(loss(model(x), y), list(model.parameters()))

    def cached() -> Curvature:
        return Curvature(model, data)

    graphs = cached()
    found: dict[str, dict[str, Callable[[], Any]]] = {
        "gadam": {
            "gradient": gradient,
            "product": lambda: graphs @ vector,
            "norm": lambda: float(top_eigenvalues(cached(), tolerance=TOLERANCE).values[0]),
        },
        "gadam, no graphs kept": {
            "product": lambda: plain @ vector,
            "norm": lambda: float(top_eigenvalues(plain, tolerance=TOLERANCE).values[0]),
        },
        "gadam, forward over reverse": {
            "product": lambda: Curvature(model, data, method="forward") @ vector
        },
        "gadam, Gauss-Newton": {"product": lambda: Curvature(model, data, kind="ggn") @ vector},
    }
    try:
        from pyhessian import hessian
    except ImportError:
        pass
    else:
        theirs = hessian(model, loss, dataloader=data, cuda=False)
        shaped = plain.shaped(vector)
        found["PyHessian"] = {
            "product": lambda: theirs.dataloader_hv_product(shaped),
            "norm": lambda: theirs.eigenvalues(maxIter=200, tol=TOLERANCE)[0][0],
        }
    try:
        from curvlinops import HessianLinearOperator
        from scipy.sparse.linalg import eigsh
    except ImportError:
        pass
    else:
        params = [p for p in model.parameters() if p.requires_grad]

        def operator() -> Any:
            return HessianLinearOperator(model, loss, params, data, check_deterministic=False)

        one = operator()
        found["curvlinops"] = {
            "product": lambda: one @ vector,
            "norm": lambda: float(
                eigsh(
                    operator().to_scipy(),
                    k=1,
                    which="LM",
                    tol=TOLERANCE,
                    return_eigenvectors=False,
                    v0=vector.numpy(),
                )[0]
            ),
        }
    return found


def main() -> None:
    """Run the benchmark, print the results, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, data = problem()
    found = contenders(model, data)
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in found}
    values: dict[str, list[float]] = {name: [] for name in found}
    for repetition in range(arguments.repetitions + 1):  # The first one is a warm-up.
        for name, calls in found.items():
            for what, call in calls.items():
                start = time.perf_counter()
                value = call()
                if repetition:
                    seconds[name].setdefault(what, []).append(time.perf_counter() - start)
                if what == "norm":
                    values[name].append(value)
    gradient = median(seconds["gadam"]["gradient"])
    exact = float(top_eigenvalues(Curvature(model, data), tolerance=1e-7).values[0])
    rows = {}
    for name, of in seconds.items():
        middle = {what: median(times) for what, times in of.items()}
        rows[name] = {
            "product": middle["product"],
            "gradients": middle["product"] / gradient,
            "norm": middle.get("norm"),
            "off": max(abs(v / exact - 1) for v in values[name]) if values[name] else None,
        }
        norm = f", norm {middle['norm']:.2f} s" if "norm" in middle else ""
        off = f", relative error {rows[name]['off']:.1e}" if values[name] else ""
        product = f"{middle['product']:.3f} s = {middle['product'] / gradient:.2f} gradients"
        print(f"{name}: product {product}{norm}{off}")
    report = {
        "machine": {"processor": platform.machine(), "torch": torch.__version__},
        "versions": {name: _version(name) for name in ("pyhessian", "curvlinops-for-pytorch")},
        "repetitions": arguments.repetitions,
        "examples": EXAMPLES,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tolerance": TOLERANCE,
        "spectral norm": exact,
        "gradient": gradient,
        "libraries": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
