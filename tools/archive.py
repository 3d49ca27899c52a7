"""Pack a folder of runs into one results file, or unpack one: `python -m tools.archive --help`.

python -m tools.archive pack runs/compare results/compare.json
python -m tools.archive unpack results/compare.json runs/compare
gadam report runs/compare
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gadam._errors import UserError
from gadam.runs.archive import unpack, write_archive


def main(arguments: list[str] | None = None) -> int:
    """Pack or unpack.

    Args:
        arguments: The command line. Default: that of the process.

    Returns:
        The exit status: 2 if the input cannot be used.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.archive", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source, target in (("pack", "FOLDER", "FILE"), ("unpack", "FILE", "FOLDER")):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path, metavar=source)
        command.add_argument("target", type=Path, metavar=target)
    options = parser.parse_args(arguments)
    try:
        if options.command == "pack":
            write_archive(options.source, options.target)
        else:
            unpack(options.source, options.target)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
