"""Train three steps with the installed package: `python -I tools/smoke_test.py`.

It needs only what `pip install gadam` installs, and says which kernel it found. With
`--require-kernel`, it fails if there is none.
"""

from __future__ import annotations

import subprocess
import sys

import torch

import gadam


def main() -> int:
    """Run the smoke test.

    Returns:
        The exit status.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    plan = gadam.Averaging(start=1)
    optimizer = gadam.GadamX(model.parameters(), lr=0.1, average=plan)
    x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    restored = gadam.GadamX(model.parameters(), lr=0.1, average=plan)
    restored.load_state_dict(optimizer.state_dict())
    with restored.average.applied(model):
        finite = bool(torch.isfinite(model(x)).all())
    if not (finite and restored.average.count == 3 and losses[2] < losses[0]):
        print(f"The smoke test failed: losses {losses}, {restored.average.count} samples.")
        return 1
    command = [sys.executable, "-c", "from gadam.commands import main; raise SystemExit(main())"]
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    if said.stdout.strip() != gadam.__version__:
        print(f"gadam --version says {said.stdout.strip()!r}, not {gadam.__version__!r}.")
        return 1
    kernel = gadam.backends()["cpu"]
    print(f"gadam {gadam.__version__} from {gadam.__file__}; kernel: {kernel}")
    return int("--require-kernel" in sys.argv and kernel.startswith("not "))


if __name__ == "__main__":
    sys.exit(main())
