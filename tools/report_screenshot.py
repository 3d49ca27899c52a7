"""Take the README's screenshot of the report: `python -m tools.report_screenshot`.

It shows the committed runs of `gadam compare` in a headless Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gadam.report import write
from gadam.runs.archive import opened
from tools import DOCS, RESULTS


def main() -> int:
    """Write docs/report.png.

    Returns:
        The exit status: 1 if there is no browser.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("Chromium is missing. Run: apt-get install chromium", file=sys.stderr)
        return 1
    with opened(RESULTS / "compare.json") as runs, tempfile.TemporaryDirectory() as out:
        page = write([runs], Path(out), figures=False)
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--virtual-time-budget=8000",
                "--window-size=1240,1420",
                f"--screenshot={DOCS / 'report.png'}",
                page.as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
