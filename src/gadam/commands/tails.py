"""The command `gadam tails`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from gadam._names import count
from gadam.commands.options import Count, Flag, Folder, check_device, check_positive, option, parse
from gadam.report.chart import Chart, Series, draw, vega
from gadam.runs.collect import RunRecord, collect
from gadam.runs.files import Document, RunError, to_json, write_atomically, write_json
from gadam.runs.folder import RunFolder
from gadam.runs.lock import locked
from gadam.study.tails import Tails

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Choose the start of the average after training, on validation data.

    Train with `--set blocks=N`, which stores the mean of every N steps. This command evaluates the
    averages of all steps after some of them, draws the metric against the start, writes the best
    weights, and evaluates these on the test data, once. With --greedy, the soup is a second choice,
    which is evaluated on the test data once, too. Rerun an interrupted command to resume it.
    """

    folder: Annotated[tyro.conf.Positional[Path], option("RUN")]
    """The folder of a finished run."""
    coarse: Count = 9
    """Starts to evaluate before refining around the best one."""
    greedy: Flag = False
    """Compare with a greedy soup of blocks."""
    device: Annotated[str, option("DEVICE")] = "cpu"
    """Where to compute, such as cuda."""
    threads: Count = 1
    """CPU threads."""
    data_dir: Folder = None
    """Where data sets are. Default: $GADAM_DATA, then ~/.cache/gadam/data."""
    json: Flag = False
    """Print one JSON object per line."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam tails`.

    Returns:
        The exit code.
    """
    options = parse(_Options, "tails", arguments)
    check_positive(coarse=options.coarse, threads=options.threads)
    check_device(options.device)
    torch.set_num_threads(options.threads)
    record = _find(options.folder)
    run_folder = RunFolder(record.folder, record.recipe, record.seed, record.label)
    with locked(record.folder, ".tails.lock"):
        data_dir = None if options.data_dir is None else str(options.data_dir)
        tails = Tails(run_folder, data_dir, torch.device(options.device))
        metric = record.recipe.metric

        def on_value(start: int, value: float) -> None:
            if options.json:
                print(to_json({"event": "tail", "start": start, metric: value}), flush=True)
            else:
                print(f"start {start:>8,}: validation {metric} {value:.6g}", flush=True)

        values = tails.search(options.coarse, on_value)
        found = _result(tails, values, options.greedy)
        chart = _chart(tails, values)
        for suffix, content in draw(chart).items():
            write_atomically(record.folder / f"tails.{suffix}", content)
        (record.folder / "sections").mkdir(exist_ok=True)
        block = {"kind": "chart", "spec": vega(chart), "caption": chart.caption}
        section = {"title": chart.title, "blocks": [block]}
        write_json(record.folder / "sections" / "tails.json", section)
        write_json(record.folder / "tails.json", {**found, "chart": asdict(chart)}, sealed=True)
    if options.json:
        print(to_json({"event": "tails", **found}), flush=True)
    else:
        _print(found, metric, record.folder)
    return 0


def _find(folder: Path) -> RunRecord:
    collection = collect([folder])
    if len(collection.runs) != 1:
        found = f"{folder} is not the folder of a run. Pass the folder of one run."
        raise RunError(" ".join(collection.problems) or found)
    return collection.runs[0]


def _result(tails: Tails, values: dict[int, float], greedy: bool) -> Document:
    """Choose on validation data, save the best weights, and evaluate only choices on test data."""
    best = tails.best(values)
    if math.isnan(values[best]):
        raise RunError(f"No tail of {tails.run.folder} has a finite validation metric.")
    soup = tails.greedy() if greedy else None  # test data is read after the last choice
    has_test = "test" in tails.points.task.splits
    found: Document = {
        "metric": tails.recipe.metric,
        "mode": tails.recipe.mode,
        "values": {str(start): value for start, value in values.items()},
        "stop": tails.stop,
        "trained_in": tails.trained_in,
        "last_iterate": tails.last_iterate,
        "best": {
            "start": best,
            "validation": values[best],
            "test": tails.value("test", best) if has_test else None,
            "file": str(tails.save(best).relative_to(tails.run.folder)),
        },
    }
    if soup is not None:
        found["greedy"] = {
            "blocks": soup.blocks,
            "validation": soup.value,
            "test": tails.soup_test(soup) if has_test else None,
        }
    found["tested"] = tails.tested
    return found


def _chart(tails: Tails, values: dict[int, float]) -> Chart:
    """Return the metric against the start: the error in percent for an accuracy."""
    is_accuracy = tails.recipe.metric == "accuracy"

    def height(value: float) -> float:
        return 100 - value if is_accuracy else value

    name = "Chosen afterwards"
    steps, heights = list(values), [height(value) for value in values.values()]
    best = tails.best(values)
    series = [
        Series(name, "curve", steps, heights),
        Series(name, "measured", steps, heights),
        Series("Best start", "measured", [best], [height(values[best])]),
    ]
    if tails.trained_in is not None:
        start, value = tails.trained_in
        series.append(Series("Trained-in start", "measured", [start], [height(value)]))
    if tails.last_iterate is not None:
        series.append(
            Series("Last iterate", "measured", [tails.stop], [height(tails.last_iterate)])
        )
    return Chart(
        "The start of the average, chosen after training",
        f"The average of all steps after the start, up to step {tails.stop:,}, of one run. All "
        "values are on validation data.",
        "start, steps",
        "validation error, %" if is_accuracy else f"validation {tails.recipe.metric}",
        series,
        log_x=False,
        log_y=False,
    )


def _print(found: Document, metric: str, folder: Path) -> None:
    best, trained = found["best"], found["trained_in"]
    print(f"Best start: {best['start']:,}, validation {metric} {best['validation']:.6g}.")
    if trained is not None:
        print(f"Trained-in start: {trained[0]:,}, validation {metric} {trained[1]:.6g}.")
    if found["last_iterate"] is not None:
        print(f"Last iterate: validation {metric} {found['last_iterate']:.6g}.")
    if "greedy" in found:
        soup = found["greedy"]
        test = "" if soup["test"] is None else f", test {metric} {soup['test']:.6g}"
        print(
            f"Greedy soup of {count(len(soup['blocks']), 'block')}: validation {metric} "
            f"{soup['validation']:.6g}{test}."
        )
    if best["test"] is not None:
        print(f"Test {metric} of the best start: {best['test']:.6g}.")
        print(f"Test data of this run was read for: {', '.join(found['tested'])}.")
    print(f"Weights: {folder / best['file']}. Figure: {folder / 'tails.png'}.")
