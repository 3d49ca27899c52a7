"""`gadam theory`: the theory's figures, and advice from a run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gadam._names import did_you_mean
from gadam.report.command import write as write_report
from gadam.report.picture import Picture, draw, vega
from gadam.report.records import RunRecord, collect
from gadam.theory import planning
from gadam.theory.figures import FIGURES
from gadam.train.record import write_atomically, write_json

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    names = ", ".join(FIGURES)
    parser = argparse.ArgumentParser(
        prog="gadam theory",
        description="What the theory predicts, beside a simulation of it; or what it advises for a run.",
        epilog=f"Figures: {names}.",
    )
    parser.add_argument(
        "name", metavar="NAME", help="a figure, `all` of them, or `plan` for advice from a run"
    )
    parser.add_argument("run", nargs="?", type=Path, help="the run's folder, for `plan`")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/theory"), help="where to (default: runs/theory)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args(arguments)
    try:
        return _run(parser, options)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(
            f"gadam theory: {options.out} cannot be written to: {error.strerror}", file=sys.stderr
        )
        return 2


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    names = ", ".join(FIGURES)
    if options.name == "plan":
        if options.run is None:
            parser.error("`gadam theory plan` needs the folder of a run")
        return _plan(options.run, options.json)
    if options.run is not None:
        parser.error(f"only `plan` takes a folder: {options.run} is one argument too many")
    if options.seed < 0:
        parser.error(f"--seed must not be negative, as {options.seed} is")
    wanted = list(FIGURES) if options.name == "all" else [options.name]
    if wanted[0] not in FIGURES:
        near = did_you_mean(options.name, [*FIGURES, "all", "plan"])
        hint = f": did you mean {near!r}?" if near else f" (there are {names}, all)"
        print(f"gadam theory: there is no figure {options.name!r}{hint}", file=sys.stderr)
        return 2
    (options.out / "sections").mkdir(parents=True, exist_ok=True)  # before any work
    for name in wanted:
        picture = FIGURES[name](options.seed)
        save(name, picture, options.out)
        if options.json:
            print(json.dumps({"name": name, **asdict(picture)}), flush=True)
        else:
            print(f"{name}: {picture.title}. {picture.caption}\n", flush=True)
    page = write_report([options.out], options.out)
    if not options.json:
        print(f"The figures are in {options.out}; the page is {page}")
    return 0


# ------------------------------------------------------------------------------------------ figures


def save(name: str, picture: Picture, folder: Path) -> None:
    """NAME.png, NAME.svg, NAME.json, and a section of the report page."""
    for ending, content in draw(picture).items():
        write_atomically(folder / f"{name}.{ending}", content)
    write_json(folder / f"{name}.json", {"name": name, **asdict(picture)})
    section = {
        "title": picture.title,
        "blocks": [{"kind": "chart", "spec": vega(picture), "caption": picture.caption}],
    }
    write_json(folder / "sections" / f"theory-{name}.json", section)


# --------------------------------------------------------------------------------------------- plan


def _plan(folder: Path, as_json: bool) -> int:
    found = collect([folder])
    if not found.runs:
        reason = "; ".join(found.problems) or f"{folder} holds no run"
        print(f"gadam theory plan: {reason}", file=sys.stderr)
        return 2
    for run in found.runs:
        said: dict[str, Any] = {"run": run.label, "seed": run.seed}
        observed = _observed(run)
        try:
            advice: planning.CurveAdvice | None = _advice(run)
        except ValueError as error:
            advice, said["reason"] = None, str(error)
        if as_json:
            said |= {"advice": advice and asdict(advice), "observed_gain": observed}
            print(json.dumps(said), flush=True)
            continue
        print(f"{run.label}, seed {run.seed}:")
        if advice is None:
            print(f"No advice: {said['reason']}.")
        else:
            print(f"{advice}\n- In a recipe that is average.start={advice.first - 1}.")
        if observed is not None:
            print(
                f"- Observed in this run: its average's loss is {observed:.3g} below its last iterate's."
            )
        print(flush=True)
    return 0


def _loss(point: dict[str, Any] | None) -> float | None:
    """On validation data, if there are some."""
    parts = point or {}
    loss = (parts.get("validation") or parts.get("test") or {}).get("loss")
    return None if loss is None else float(loss)


def _observed(run: RunRecord) -> float | None:
    last = run.lines[-1] if run.lines else {}
    iterate, average = _loss(last.get("iterate")), _loss(last.get("average"))
    return None if iterate is None or average is None else iterate - average


def _advice(run: RunRecord) -> planning.CurveAdvice:
    """From the losses of the run's iterates as long as the learning rate was what it was at first; in epochs."""
    first_rate = run.lines[0].get("lr") if run.lines else None
    kept = [
        line for line in run.lines if line.get("lr") == first_rate and _loss(line.get("iterate"))
    ]
    if len(kept) < 8:
        raise ValueError("there are fewer than 8 evaluations before the learning rate changes")
    epochs = [line["epoch"] for line in kept]
    return planning.from_curve(
        epochs, [_loss(line["iterate"]) or 0.0 for line in kept], unit="epoch"
    )
