"""Take the README's screenshot of the report: `python scripts/report_screenshot.py`.

Renders the committed records of `gadam compare` in headless Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gadam.report import write

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Write docs/report.png.

    Returns:
        The exit code.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("This script needs Chromium. Install it with: apt-get install chromium", file=sys.stderr)
        return 1
    target = ROOT / "docs" / "report.png"
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = write([ROOT / "results" / "compare"], Path(folder), figures=False)
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--virtual-time-budget=8000",
                "--window-size=1100,1420",
                f"--screenshot={target}",
                page.as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
