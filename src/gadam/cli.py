"""The command line."""

from __future__ import annotations

import sys

__all__ = ["main"]

_HELP = """usage: gadam COMMAND

  bench    how long a step takes here, side by side with other optimisers

`gadam COMMAND --help` tells more."""


def main() -> int:
    """Run the command that the first argument names."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(_HELP)
        return 0
    if command == "bench":
        from gadam import bench

        return bench.main(arguments)
    print(f"gadam: no command {command!r}\n{_HELP}", file=sys.stderr)
    return 2
