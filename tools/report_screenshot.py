"""Take the README's screenshot of the report: `python -m tools.report_screenshot`.

It shows the committed runs of `gadam compare` in a headless Chromium. The picture carries the
command that made the runs and the hash of their archive, which `tests/test_docs.py` compares.

After a new `make compare`, this packs its runs, takes the screenshot and writes the tables:

python -m tools.report_screenshot --pack runs/compare
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from gadam._errors import UserError
from gadam.report import write
from gadam.runs.archive import opened, read_archive, write_archive
from tools import DOCS, RESULTS, tables

ARCHIVE = RESULTS / "compare.json"
PICTURE = DOCS / "report.png"
SIZE = (1240, 1500)  # from the answer to the learning curves


def source(archive: Path) -> dict[str, str]:
    """Return what a picture says about its source: the command, and the hash of the archive.

    Args:
        archive: The committed runs.
    """
    return {
        "Command": read_archive(archive)["summary.json"]["command"],
        "Archive": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }


def take(archive: Path, picture: Path) -> None:
    """Write a screenshot of the archive's report.

    Args:
        archive: The committed runs.
        picture: The PNG file.

    Raises:
        UserError: There is no browser.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise UserError("Chromium is missing. Run: apt-get install chromium")
    with opened(archive) as runs, tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        page = write([runs], out, figures=False)
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--virtual-time-budget=20000",
                f"--window-size={SIZE[0]},{SIZE[1]}",
                f"--screenshot={out / 'page.png'}",
                page.as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        labels = PngInfo()
        for name, text in source(archive).items():
            labels.add_text(name, text)
        with Image.open(out / "page.png") as image:
            # A palette of 256 colors is a third of the size and looks the same.
            image.convert("RGB").quantize(256).save(picture, optimize=True, pnginfo=labels)


def main(arguments: list[str] | None = None) -> int:
    """Write docs/report.png.

    Args:
        arguments: The command line. Default: that of the process.

    Returns:
        The exit status: 1 if there is no browser or the runs cannot be used.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.report_screenshot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pack", type=Path, metavar="DIR", help="first pack these runs")
    options = parser.parse_args(arguments)
    try:
        if options.pack is not None:
            write_archive(options.pack, ARCHIVE)
        take(ARCHIVE, PICTURE)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return tables.main([]) if options.pack is not None else 0


if __name__ == "__main__":
    sys.exit(main())
