"""Check a release before it is published: `make release-check`.

1. The version is the same in the package, the changelog, CITATION.cff, and the tag.
2. The sdist and the wheel build, and `twine check` accepts them.
3. Each installs into a new virtual environment and passes the smoke test.

`--borrow-torch` lets the new environments see the torch of this one, instead of downloading it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tools import ROOT

__all__ = ["main", "versions"]

SMOKE = ROOT / "tools" / "smoke_test.py"


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version that each file states, or an empty text if it states none.

    Args:
        root: The folder of the project.
    """
    patterns = {
        "src/gadam/__init__.py": r'^__version__ = "(.+)"$',
        "CHANGELOG.md": r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$",
        "CITATION.cff": r"^version: (.+)$",
    }
    found = {}
    for name, pattern in patterns.items():
        match = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        found[name] = match[1] if match else ""
    return found


def _run(*command: object, cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def _try(package: Path, *, borrow_torch: bool) -> None:
    """Install a package into a new environment, and run the smoke test there."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        venv.create(environment, with_pip=True, symlinks=os.name != "nt")
        python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        install = [python, "-m", "pip", "install", "--quiet"]
        if borrow_torch:
            import torch

            _run(*install, "--no-deps", package, cwd=Path(folder))
            (packages,) = {path.parents[1] for path in environment.rglob("gadam/__init__.py")}
            (packages / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        else:
            _run(*install, package, cwd=Path(folder))
        _run(python, "-I", SMOKE, "--require-kernel", cwd=Path(folder))


def main(arguments: list[str] | None = None) -> int:
    """Check the release.

    Args:
        arguments: The command line. Default: that of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.release_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tag", help="the tag of the release, such as v0.2.0")
    parser.add_argument("--borrow-torch", action="store_true", help="do not download torch")
    options = parser.parse_args(arguments)
    stated = versions()
    if options.tag:
        stated["the tag"] = options.tag.removeprefix("v")
    if len(set(stated.values())) != 1:
        print(f"The versions differ: {stated}.", file=sys.stderr)
        return 1
    os.environ["GADAM_REQUIRE_KERNEL"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        try:
            _run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
            packages = sorted(Path(folder).glob("gadam-*"))
            _run(sys.executable, "-m", "twine", "check", "--strict", *packages)
            for package in packages:
                _try(package, borrow_torch=options.borrow_torch)
        except subprocess.CalledProcessError as error:
            print(f"Failed with status {error.returncode}: {error.cmd}", file=sys.stderr)
            return 1
    print(f"gadam {stated['CHANGELOG.md']} is ready: {', '.join(p.name for p in packages)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
