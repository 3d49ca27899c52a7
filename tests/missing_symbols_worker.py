"""Delete private torch symbols, import gadam, and save the results of some training runs.

Run as a program, because gadam looks the symbols up when it is imported:

    python missing_symbols_worker.py OUT [MODULE:SYMBOL ...]
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch


def find(path: str) -> tuple[Any, str]:
    """Return the owner and the name of a symbol such as ``package.module:Class.method``."""
    module, _, symbol = path.partition(":")
    owner: Any = import_module(module)
    *parents, name = symbol.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def results() -> dict[str, Any]:
    """Train optimizers on every path of the update, and return their parameters and states."""
    import gadam
    from contract import BY_NAME, parameters, train

    found: dict[str, Any] = {}
    names = ["Padam-L2-amsgrad", "Padam-paper", "Gadam", "GadamX", "Gadam-fused", "Lookahead-Gadam"]
    for name in names:
        row = BY_NAME[name]
        flags = [{"foreach": False}, {"foreach": True}, {}] if row.flags else [{}]
        for flag in flags:
            params = parameters()
            extra = {"average": gadam.Averaging(start=2)} if row.averages else {}
            optimizer = row(params, **flag, **extra)
            train(optimizer, params, 20)
            found[f"{name} {flag}"] = {
                "params": [p.detach() for p in params],
                "state": optimizer.state_dict()["state"],
            }
    return found


def main(out: str, *symbols: str) -> None:
    deleted = []
    for symbol in symbols:
        owner, name = find(symbol)
        deleted.append((owner, name, vars(owner)[name]))
        delattr(owner, name)
    import gadam.average.batchnorm
    import gadam.optim.lookahead  # noqa: F401
    from gadam import _torch

    assert not symbols or _torch._disable_dynamo is None

    # torch itself needs them to train.
    for owner, name, value in deleted:
        setattr(owner, name, value)
    torch.save(results(), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
