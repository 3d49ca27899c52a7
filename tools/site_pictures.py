"""Draw the pictures of the documentation site: `python -m tools.site_pictures`.

Each is an SVG file in docs/assets/, drawn from a committed result or from a simulation with a fixed
seed. Colors are readable on white and on black, so one file serves both modes of the site.
With `--check`, nothing is written, and the exit status is 1 if a file differs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from functools import cache
from xml.sax.saxutils import escape

import numpy as np

from gadam import theory
from gadam.runs.archive import read_archive
from gadam.runs.files import Json
from gadam.runs.summary import SeedMean
from tools import RESULTS, ROOT

FOLDER = ROOT / "docs" / "assets"

# Contrast of at least 3 on both backgrounds; of text, at least 4.
TEXT = "#777c82"
GRID = "#868b91"
ITERATE = "#3f86d6"
AVERAGE = "#d9632a"
OTHER = "#2f9070"

Point = tuple[float, float]


class Picture:
    """An SVG picture, built element by element.

    Args:
        width: The width of its coordinates.
        height: The height of its coordinates.
        title: What it shows, for readers who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self.style: list[str] = []
        self.elements: list[str] = []

    def line(self, start: Point, end: Point, color: str = GRID, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.elements.append(
            f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
            f'stroke="{color}" stroke-width="1.5"{dash}/>'
        )

    def path(self, points: Iterable[Point], color: str, width: float = 2) -> None:
        joined = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.elements.append(
            f'<path d="M{joined}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'
        )

    def dot(self, at: Point, color: str, radius: float = 4, more: str = "") -> None:
        self.elements.append(
            f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:g}" fill="{color}"{more}/>'
        )

    def circle(self, at: Point, radius: float, color: str = GRID) -> None:
        self.elements.append(
            f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:.1f}" fill="none" '
            f'stroke="{color}" stroke-dasharray="5 4"/>'
        )

    def text(self, at: Point, text: str, anchor: str = "start", color: str = TEXT) -> None:
        self.elements.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" fill="{color}">'
            f"{escape(text)}</text>"
        )

    def svg(self) -> str:
        """Return the file's content."""
        width, height = self.size
        style = "text{font:14px system-ui,sans-serif}" + "".join(self.style)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'role="img" width="{width}" height="{height}">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style}</style>",
                *self.elements,
                "</svg>\n",
            ]
        )


def shell() -> str:
    """Draw iterates of SGD on the shell around the minimum, and their average inside it.

    Distances from the center are exact distances in 400 dimensions. The angle is that of the
    projection on a fixed plane.
    """
    dimensions, rate, steps, stride, shown = 400, 0.1, 1200, 20, 60
    segment = theory.Segment(steps=steps, rate=rate, batch_size=1)
    model = theory.Quadratic(theory.Spectrum(np.ones(dimensions)), noise=1.0, start=0.0)
    expected = math.sqrt(theory.last_iterate(model, segment).squared_distance)
    generator = np.random.default_rng(3)
    weights = generator.normal(size=dimensions) * expected / math.sqrt(dimensions)
    iterates = []
    for _ in range(steps):
        weights = (1 - rate) * weights - rate * generator.normal(size=dimensions)
        iterates.append(weights)
    averages = np.cumsum(iterates, axis=0) / np.arange(1, steps + 1)[:, None]

    center, scale = (130.0, 140.0), 110 / expected
    picture = Picture(
        480,
        280,
        "Iterates of SGD stay on a shell around the minimum. Their average moves from the shell "
        "toward the minimum.",
    )

    def place(point: np.ndarray) -> Point:
        angle, radius = math.atan2(point[1], point[0]), float(np.linalg.norm(point)) * scale
        return center[0] + radius * math.cos(angle), center[1] + radius * math.sin(angle)

    # All points are visible without animation, and for readers who prefer less motion.
    seconds = 8
    picture.style.append(
        "@keyframes appear{0%{opacity:.15}1%{opacity:1}100%{opacity:1}}"
        "@media (prefers-reduced-motion:no-preference){.p{opacity:.15;"
        f"animation:appear {seconds}s linear both}}}}"
    )
    picture.circle(center, 110)
    for number in range(shown):
        step = (number + 1) * stride - 1
        delay = f' class="p" style="animation-delay:{number * seconds / shown:.1f}s"'
        picture.dot(place(iterates[step]), ITERATE, 3.5, delay)
        picture.dot(place(averages[step]), AVERAGE, 3, delay)
    picture.line((center[0] - 6, center[1]), (center[0] + 6, center[1]), TEXT)
    picture.line((center[0], center[1] - 6), (center[0], center[1] + 6), TEXT)
    last = float(np.linalg.norm(iterates[-1])) / expected
    mean = float(np.linalg.norm(averages[-1])) / expected
    picture.dot((272, 56), ITERATE)
    picture.text((286, 61), "iterates, one in 20")
    picture.dot((272, 82), AVERAGE)
    picture.text((286, 87), "average of all so far")
    picture.line((264, 108), (280, 108), GRID, dashed=True)
    picture.text((286, 113), "the shell, as predicted")
    picture.text((266, 139), "+")
    picture.text((286, 139), "the minimum")
    words = (
        f"After {steps:,} steps, the",
        f"iterate is at {last:.2f} of the",
        "shell's radius, and the",
        f"average at {mean:.2f}.",
    )
    for number, line in enumerate(words):
        picture.text((266, 179 + 20 * number), line)
    return picture.svg()


def start() -> str:
    """Draw the test perplexity of the average against its start, from results/fig-tavg.json."""
    summary = _summary("fig-tavg")
    rows = [(int(row["label"].split()[-1]) / 2, _mean(row["average"])) for row in summary["rows"]]
    last = _mean(summary["rows"][0]["iterate"])
    low, high = 66.0, 73.0
    picture = Picture(
        480,
        340,
        f"Test perplexity of the average by its start. From the beginning it is "
        f"{rows[0][1].mean:.1f}, from the middle {rows[3][1].mean:.1f}, and from three quarters "
        f"{rows[4][1].mean:.1f}. The last iterate has {last.mean:.1f}.",
    )

    def place(percent: float, value: float) -> Point:
        return 40 + percent / 100 * 400, 280 - (value - low) / (high - low) * 240

    for tick in range(66, 74, 2):
        picture.line(place(0, tick), place(100, tick), "#868b9155")
        picture.text((32, place(0, tick)[1] + 5), str(tick), "end")
    for tick in range(0, 101, 25):
        picture.text((place(tick, low)[0], 302), f"{tick}%", "middle")
    picture.text((250, 328), "start of the average, in % of the training", "middle")
    picture.text((40, 24), "test perplexity (lower is better)")
    picture.line(place(0, last.mean), place(100, last.mean), ITERATE, dashed=True)
    picture.text((place(100, 0)[0], place(0, last.mean)[1] - 8), "last iterate", "end", ITERATE)
    picture.path([place(percent, mean.mean) for percent, mean in rows], AVERAGE)
    for percent, mean in rows:
        error = mean.error or 0.0
        picture.line(place(percent, mean.mean - error), place(percent, mean.mean + error), AVERAGE)
        picture.dot(place(percent, mean.mean), AVERAGE)
    picture.text(
        (place(75, 0)[0], place(0, rows[-1][1].mean)[1] - 12), "average", "middle", AVERAGE
    )
    return picture.svg()


def forest() -> str:
    """Draw the gains of averaging with their 95% intervals, from results/compare.json."""
    rows = [row for row in _summary("compare")["rows"] if row["difference"] is not None]
    gains = [(row["label"], _mean(row["difference"])) for row in rows]
    reach = 7.0
    names = {"true labels: ": "true labels", "": "30% label noise"}
    words = []
    for label, gain in gains:
        words.append(f"{label} {gain.mean:+.2f} ± {gain.interval or 0:.2f}")
    height = 150 + 30 * len(gains) + 20
    picture = Picture(
        480,
        height,
        "Gain of averaging in points of test accuracy over the same optimizer with a decayed "
        "learning rate, with 95% intervals: " + ", ".join(words) + ".",
    )

    def place(value: float) -> float:
        return 238 + value / reach * 120

    bottom = height - 50
    for tick in range(-6, 7, 2):
        if tick:
            picture.line((place(tick), 40), (place(tick), bottom), "#868b9155")
        picture.text((place(tick), bottom + 20), f"{tick:+d}" if tick else "0", "middle")
    picture.line((place(0), 40), (place(0), bottom), TEXT)
    picture.text((238, height - 8), "gain in test accuracy, points, 95% interval", "middle")
    picture.text((place(0) - 8, 28), "decayed rate is better", "end")
    picture.text((place(0) + 8, 28), "average is better")
    y, group = 40.0, None
    for label, gain in gains:
        prefix = next(start for start in names if label.startswith(start))
        if names[prefix] != group:
            group = names[prefix]
            y += 30
            picture.text((4, y + 2), group)
        color = AVERAGE if group == names[""] else OTHER
        half = gain.interval or 0.0
        y += 30
        picture.text((16, y + 5), label.removeprefix(prefix), color=color)
        left, right = max(gain.mean - half, -reach), min(gain.mean + half, reach)
        picture.line((place(left), y), (place(right), y), color)
        picture.dot((place(gain.mean), y), color, 5)
        picture.text((476, y + 5), f"{gain.mean:+.2f} ± {half:.2f}", "end", color)
    return picture.svg()


@cache
def _summary(name: str) -> dict[str, Json]:
    content: dict[str, Json] = read_archive(RESULTS / f"{name}.json")["summary.json"]
    return content


def _mean(content: Json) -> SeedMean:
    return SeedMean(**content)


PICTURES: dict[str, Callable[[], str]] = {"shell": shell, "start": start, "forest": forest}


def main(arguments: list[str] | None = None) -> int:
    """Write the pictures, or check them.

    Args:
        arguments: The command line. Default: that of the process.

    Returns:
        The exit status: 1 if `--check` found a file that differs.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.site_pictures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="change nothing; fail on a difference")
    check = parser.parse_args(arguments).check
    outdated = []
    for name, draw in PICTURES.items():
        path, new = FOLDER / f"{name}.svg", draw()
        if not path.is_file() or path.read_text() != new:
            outdated.append(path.name)
            if not check:
                path.write_text(new)
    if outdated:
        print(f"{'Outdated' if check else 'Updated'}: {', '.join(outdated)}.")
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
