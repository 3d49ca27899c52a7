"""Tune every method on a problem, run the best settings on several seeds, and say which is best."""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from gadam._names import count, did_you_mean
from gadam.commands import console
from gadam.commands.options import SweepOptions, check_positive
from gadam.commands.recipes import changed
from gadam.commands.sweeps import (
    Addition,
    check_folders,
    conclude,
    fetch,
    job,
    make_launcher,
    workspace,
)
from gadam.runs.experiment import Experiment
from gadam.runs.files import (
    Document,
    RunError,
    explain_os_error,
    read_json,
    to_json,
    write_json,
)
from gadam.runs.lines import read_epochs
from gadam.runs.manifest import drop_weights
from gadam.runs.recipe import Recipe, RecipeError, Schedule, override
from gadam.runs.record import RunResult
from gadam.runs.summary import decimals, is_percentage
from gadam.runs.verdict import Verdict
from gadam.train import check_task, experiments, snippet, tasks
from gadam.train.budget import (
    PilotJob,
    Timing,
    duration_text,
    fit,
    parse_duration,
    pilot_recipe,
    steadied,
)
from gadam.train.catalog import BASES
from gadam.train.search import (
    CENTERS,
    METHODS,
    Comparison,
    Plan,
    Run,
    method_recipe,
    recipe_of,
)
from gadam.train.sweep import OnNotice, OnProgress, ShouldStop, TrainingJob, sweep
from gadam.train.tasks import SupervisedTask
from gadam.train.tasks.own import describe, load_task

__all__ = ["Request", "chosen_methods", "run_tuned"]

DEFAULT_TRIALS, DEFAULT_SEEDS = 12, 3
MIN_SAMPLES = 10  # of an average
PILOT_SHARE = 0.1  # of the budget
PILOT_SECONDS = 5.0  # per method, at least
REPORT_SECONDS = 10.0  # to write the table and the page
_TUNED_SETTINGS = ("lr", "weight_decay", "optimizer.lr", "optimizer.weight_decay", "optimizer.name")


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Args:
        task: The user's file, or None for the data and the network of the settings.
        budget: The time, as it was typed, or None.
        trials: Trials per method, or None to choose them.
        methods: The methods to compare; empty means all.
    """

    task: str | None
    budget: str | None
    trials: int | None
    methods: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The methods to compare."""
        return self.methods or tuple(METHODS)


def chosen_methods(names: Sequence[str]) -> tuple[str, ...]:
    """Return the methods that a user named, in the order of the table.

    Args:
        names: In any case, and separated by commas or not.

    Raises:
        RecipeError: A name is unknown, or there is only one.
    """
    known = {method.lower(): method for method in METHODS}
    words = [word for name in names for word in name.split(",") if word]
    for word in words:
        if word.lower() not in known:
            near = did_you_mean(word.lower(), known)
            hint = f"Did you mean {known[near]}?" if near else f"Use {', '.join(METHODS)}."
            raise RecipeError(f"--methods: there is no method {word!r}. {hint}")
    chosen = {known[word.lower()] for word in words}
    if len(chosen) == 1:
        raise RecipeError(f"--methods needs at least two methods to compare, got {words[0]}.")
    return tuple(method for method in METHODS if method in chosen)


@dataclass(frozen=True)
class _Problem:
    """What is compared.

    Args:
        name: Of the task.
        recipes: The recipe of each method, with the usual setting.
        steps: Steps per epoch.
        asked: The epochs that the task asks for. The recipes may have fewer.
    """

    name: str
    recipes: Mapping[str, Recipe]
    steps: int
    asked: int

    @property
    def epochs(self) -> int:
        return next(iter(self.recipes.values())).epochs


def run_tuned(request: Request, options: SweepOptions) -> int:
    """Tune and compare methods, and write the table, the verdict and the report.

    Args:
        request: What to compare, and how much to try.
        options: How to run it.

    Returns:
        The exit code.

    Raises:
        UserError: The task or an option is wrong, or the budget is too short.
    """
    began = time.monotonic()
    seconds = None if request.budget is None else parse_duration(request.budget)
    check_positive(trials=request.trials, seeds=options.seeds)
    problem = _problem(request, options)
    folder = options.folder(f"compare-{experiments.slug(problem.name)}")
    with workspace(folder, options):
        plan = _known_plan(folder, request, options)
        if plan is None:
            needed, plan = (
                None,
                Plan(
                    request.trials or DEFAULT_TRIALS, problem.epochs, options.seeds or DEFAULT_SEEDS
                ),
            )
            if seconds is not None:
                timings, startup = _pilot(problem, folder, seconds, options)
                left = seconds - (time.monotonic() - began) - startup - REPORT_SECONDS
                plan, needed = _fit(seconds, left, problem, timings, request, options)
            _write_plan(folder, request, plan, options, needed)
            _announce(plan, problem, options, needed)
        return _compare(_shortened(problem, plan, options), plan, folder, request, options)


# -------------------------------------------------------------------------------------- the problem


def _problem(request: Request, options: SweepOptions) -> _Problem:
    """Build the recipes, and check everything before any work."""
    problems = []
    for setting in options.settings:
        if (key := setting.partition("=")[0].strip()) in _TUNED_SETTINGS:
            problems.append(f"The search chooses {key}. Remove --set {setting}.")
    base = _base(request, options)
    with suppress(RecipeError):  # `changed` explains it, with all other problems
        # The start of the average follows from the epochs.
        base = override(base, [s for s in options.settings if s.split("=")[0].strip() == "epochs"])
    recipes = {
        method: replace(method_recipe(base, method), name=f"{base.name}-{experiments.slug(method)}")
        for method in request.names
    }
    try:
        recipes = changed(recipes, options, everywhere=False)
    except RecipeError as error:
        raise RecipeError(*problems, *error.problems) from None
    if problems:
        raise RecipeError(*problems)
    built = tasks.build(
        next(iter(recipes.values())), 0, torch.device(options.device_here), options.data_path
    )
    if "validation" not in built.splits:
        raise RecipeError(
            "The search needs validation data. Set data.validation=0.1, or add a validation split "
            "to the task."
        )
    steps = built.steps(0)
    sampled = {method: _sampled(recipe, steps, options) for method, recipe in recipes.items()}
    data = next(iter(recipes.values())).data.name
    name = Path(data).stem if request.task is None else base.name
    return _Problem(name, sampled, steps, base.epochs)


def _base(request: Request, options: SweepOptions) -> Recipe:
    """Return a recipe with the task, its epochs and its batch size."""
    if request.task is None:
        base = experiments.get(experiments.COMPARE).recipes["SGD"]
        return replace(base, name=experiments.COMPARE, schedule=Schedule())
    _refuse_data(request.task)
    for sentence in check_task(request.task, device=options.device_here).notices:
        if not options.json:
            print(f"note: {sentence}")
    own, task = describe(request.task), load_task(request.task)
    batch_size = task.batch_size if isinstance(task, SupervisedTask) else Recipe.batch_size
    name = Path(request.task).stem
    return Recipe(name, "", task=own, epochs=task.epochs, batch_size=batch_size)


def _refuse_data(task: str) -> None:
    """Tell a user who named data instead of a task how to use it."""
    path = Path(task)
    if path.suffix in (".npz", ".txt") or (path.is_dir() and not (path / "__init__.py").exists()):
        raise RecipeError(
            f"{task} is not a Python file with a task. To compare on your own data, run `gadam "
            f"compare --set data.name={shlex.quote(task)} --trials {DEFAULT_TRIALS}`."
        )


def _sampled(recipe: Recipe, steps: int, options: SweepOptions) -> Recipe:
    """Evaluate ten times, and take enough samples if there are few epochs."""
    given = {setting.partition("=")[0].strip().split(".")[-1] for setting in options.settings}
    if "evaluate_every" not in given:
        recipe = replace(recipe, evaluate_every=max(1, recipe.epochs // 10))
    average = recipe.average
    if average is not None and isinstance(average.start, int) and "every" not in given:
        epochs = recipe.epochs - average.start
        if epochs < MIN_SAMPLES:
            every = max(1, steps * epochs // MIN_SAMPLES)
            recipe = replace(recipe, average=replace(average, every=every))
    return recipe


def _shortened(problem: _Problem, plan: Plan, options: SweepOptions) -> _Problem:
    """Return the problem with the epochs of the plan."""
    if plan.epochs == problem.epochs:
        return problem
    recipes = {
        method: _sampled(experiments.in_proportion(recipe, plan.epochs), problem.steps, options)
        for method, recipe in problem.recipes.items()
    }
    return replace(problem, recipes=recipes)


# ----------------------------------------------------------------------------------------- the plan


def _asked(request: Request, options: SweepOptions) -> Document:
    """Return what decides the plan. More seeds may be added later."""
    return {
        "task": request.task,
        "budget": request.budget,
        "trials": request.trials,
        "methods": list(request.names),
        "settings": list(options.settings),
    }


def _known_plan(folder: Path, request: Request, options: SweepOptions) -> Plan | None:
    """Return the plan of an interrupted or finished comparison, or None if there is none."""
    path = folder / "search.json"
    if not path.exists():
        return None
    try:
        content = read_json(path)
        before, plan = content["request"], Plan(**content["plan"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}). Pass a different --out.") from None
    now = _asked(request, options)
    different = [
        f"{key}: {before.get(key)} → {now[key]}" for key in now if before.get(key) != now[key]
    ]
    if different:
        raise RunError(
            f"{folder} holds another comparison ({'; '.join(different)}). Pass a different --out, "
            "or remove the folder."
        )
    return replace(plan, seeds=options.seeds or plan.seeds)


def _write_plan(
    folder: Path, request: Request, plan: Plan, options: SweepOptions, needed: float | None
) -> None:
    content = {"request": _asked(request, options), "plan": asdict(plan), "seconds": needed}
    write_json(folder / "search.json", content, sealed=True)


def _announce(plan: Plan, problem: _Problem, options: SweepOptions, needed: float | None) -> None:
    runs, methods = plan.runs * len(problem.recipes), len(problem.recipes)
    if options.json:
        content = {**asdict(plan), "methods": list(problem.recipes), "runs": runs}
        print(to_json({"event": "plan", **content, "seconds": needed}), flush=True)
    elif not options.quiet:
        short = [f"{r.trials} with {count(r.epochs, 'epoch')}" for r in plan.rungs[:-1]]
        full = plan.rungs[-1].trials + plan.trials - plan.sampled
        parts = ", ".join([*short, f"{full} with {count(plan.epochs, 'epoch')}"])
        about = "" if needed is None else f", about {duration_text(needed)}"
        print(
            f"Plan: {methods} methods × {count(plan.trials, 'trial')} ({parts}), then "
            f"{count(plan.seeds, 'seed')} each: {count(runs, 'run')}{about}.",
            flush=True,
        )


def _pilot(
    problem: _Problem, folder: Path, seconds: float, options: SweepOptions
) -> tuple[dict[str, Timing], float]:
    """Time a run of each method with all workers busy, and the start of the workers."""
    launcher, place = make_launcher(options), folder / "pilot"
    workers = launcher.slots
    methods = list(islice(cycle(problem.recipes), max(workers, len(problem.recipes))))
    limit = max(PILOT_SECONDS, PILOT_SHARE * seconds * workers / len(methods))
    shutil.rmtree(place, ignore_errors=True)
    jobs = [
        PilotJob(
            method,
            pilot_recipe(problem.recipes[method]),
            place / str(i),
            limit,
            options.data_path,
            options.device,
            options.threads,
            storage=options.storage,
        )
        for i, method in enumerate(methods)
    ]
    if not (options.json or options.quiet):
        print("Timing each method for two epochs …", flush=True)
    began = time.time()
    with console.listener(len(jobs), quiet=options.quiet, as_json=options.json) as listener:
        found = sweep(jobs, listener, launcher=launcher)
    shutil.rmtree(place, ignore_errors=True)
    if None in found.values():
        raise RunError("A method could not be timed. Fix what failed above, and rerun the command.")
    startup = min(timing.began for timing in found.values()) - began
    return steadied({job.label: found[job] for job in reversed(jobs)}), startup


def _fit(
    seconds: float,
    left: float,
    problem: _Problem,
    timings: Mapping[str, Timing],
    request: Request,
    options: SweepOptions,
) -> tuple[Plan, float]:
    """Return a plan that fits into the time that is left, and the time it takes."""
    plan, needed = fit(
        left,
        timings,
        make_launcher(options).slots,
        epochs=problem.epochs,
        trials=request.trials,
        seeds=options.seeds,
    )
    if needed > left:
        if math.isinf(needed):
            least = "One step takes longer than the pilot may"
        else:
            least = f"The shortest comparison takes {duration_text(needed + seconds - left)}"
        raise RecipeError(
            f"--budget {request.budget} is too short. {least} on this machine. Pass a longer "
            "--budget, or fewer --methods."
        )
    return plan, needed


# ----------------------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class _TrialJob(TrainingJob):
    """A trial. Nobody needs its weights afterwards."""

    def run_here(
        self, on_progress: OnProgress, on_notice: OnNotice, should_stop: ShouldStop
    ) -> RunResult:
        result = super().run_here(on_progress, on_notice, should_stop)
        drop_weights(self.folder)
        return result


def _compare(
    problem: _Problem, plan: Plan, folder: Path, request: Request, options: SweepOptions
) -> int:
    centers = {method: CENTERS[METHODS[method][0]] for method in problem.recipes}
    comparison = Comparison(plan, centers)
    runs: dict[TrainingJob, Run] = {}
    ended = {"done": 0, "failed": 0}

    def jobs_of(new: Iterable[Run]) -> list[TrainingJob]:
        made = {_job(run, problem, plan, folder, options): run for run in new}
        runs.update(made)
        return list(made)

    def then(job: TrainingJob, result: RunResult | None) -> list[TrainingJob]:
        run = runs[job]
        ended["failed" if result is None else "done"] += 1
        if not ended["done"] and ended["failed"] >= len(problem.recipes):
            raise RunError("The first trials all failed. Fix what failed, and rerun the command.")
        following = comparison.after(run, _score(result, job.recipe))
        if any(each.is_final for each in following):  # for `gadam report --serve`
            tuned = _experiment(problem, comparison, plan, request, options)
            write_json(folder / "experiment.json", tuned.to_dict(), sealed=True)
        return jobs_of(following)

    first = jobs_of(comparison.start())
    fetch(first)
    check_folders(first)
    total = plan.runs * len(problem.recipes)
    with console.listener(total, quiet=options.quiet, as_json=options.json) as listener:
        found = sweep(first, listener, then=then, launcher=make_launcher(options))
    experiment = _experiment(problem, comparison, plan, request, options)
    write_json(folder / "experiment.json", experiment.to_dict(), sealed=True)
    final = {(run.method, run.seed): job for job, run in runs.items() if run.is_final}
    fetch(final.values())
    results = {key: found[job] for key, job in final.items()}

    def add(verdicts: list[Verdict]) -> Addition:
        addition = _addition(verdicts, problem, comparison, experiment, final)
        codes = {verdict.best: addition.content["code"].get(verdict.best) for verdict in verdicts}
        _write_section(folder, problem, comparison, codes)
        return addition

    conclude(experiment, folder, final.values(), results, options, add=add)
    return 1 if None in results.values() else 0


def _job(
    run: Run, problem: _Problem, plan: Plan, folder: Path, options: SweepOptions
) -> TrainingJob:
    recipe, name = problem.recipes[run.method], experiments.slug(run.method)
    if run.is_final:
        tuned = _with_setting(recipe, *run.trial.setting)
        return job(run.method, tuned, run.seed, folder / f"{name}-{run.seed}", options)
    lr, decay = run.trial.setting
    label = (
        f"{run.method}, trial {run.trial.number + 1} of {plan.trials} (lr {lr:g}, decay {decay:g})"
    )
    # Three levels deep: reports of the comparison do not show the trials.
    place = folder / "trials" / name / f"{run.trial.number:02d}-epochs-{run.trial.epochs}"
    made = job(label, recipe_of(recipe, run.trial), run.seed, place, options)
    return _TrialJob(**vars(made))


def _with_setting(recipe: Recipe, lr: float, weight_decay: float) -> Recipe:
    return replace(recipe, optimizer=replace(recipe.optimizer, lr=lr, weight_decay=weight_decay))


def _score(result: RunResult | None, recipe: Recipe) -> float:
    """Return the validation metric, so that more is better. A trial that diverged is the worst."""
    if result is None or result.diverged:
        return -math.inf
    value = result.metric(recipe.metric, result.used_point, "validation")
    if value is None:
        return -math.inf
    return value if recipe.mode == "max" else -value


# --------------------------------------------------------------------------------------- the answer


def _experiment(
    problem: _Problem,
    comparison: Comparison,
    plan: Plan,
    request: Request,
    options: SweepOptions,
) -> Experiment:
    """Return the experiment, with the settings of the searches that are over."""
    recipes, edges = dict(problem.recipes), dict[str, list[str]]()
    for method, recipe in problem.recipes.items():
        if len({trial.number for trial in comparison.scores[method]}) == plan.trials:
            tuned = comparison.tuned(method)
            recipes[method] = _with_setting(recipe, *tuned.setting)
            if tuned.edges:
                edges.setdefault(", ".join(tuned.unclear), []).append(method)
    note = f"Each method has the best of {plan.trials} trials on validation data."
    if plan.trials == 1:
        note, edges = "Each method has its usual setting: one trial tunes nothing.", {}
    if plan.epochs < problem.asked:
        note += f" Runs have {plan.epochs} of {problem.asked} epochs, to fit into the budget."
    if edges:
        ends = "; ".join(f"{', '.join(methods)} ({where})" for where, methods in edges.items())
        note += f" The search ended at an edge, so more trials may help: {ends}."
    words = ["gadam", "compare", *([request.task] if request.task else [])]
    words += ["--budget", request.budget] if request.budget else []
    words += ["--trials", str(plan.trials)] if request.trials or not request.budget else []
    words += ["--seeds", str(plan.seeds)] if options.seeds or not request.budget else []
    words += ["--methods", *request.methods] if request.methods else []
    words += [word for setting in options.settings for word in ("--set", setting)]
    return Experiment(
        name=experiments.COMPARE,
        title=f"Averaging on {problem.name}",
        recipes=recipes,
        bases={a: b for a, b in BASES.items() if a in recipes and b in recipes},
        seeds=plan.seeds,
        note=note,
        command=shlex.join(words),
    )


def _addition(
    verdicts: Sequence[Verdict],
    problem: _Problem,
    comparison: Comparison,
    experiment: Experiment,
    final: Mapping[tuple[str, int], TrainingJob],
) -> Addition:
    """Return the code to copy, and what it costs."""
    codes: dict[str, str] = {}
    for method, recipe in experiment.recipes.items():
        with suppress(RecipeError):  # a method that --set changed beyond what there is code for
            codes[method] = snippet.code(recipe, problem.steps)
    costs = {method: _cost(method, experiment, final) for method in experiment.recipes}
    content: Document = {
        "code": codes,
        "cost": {method: cost and cost._asdict() for method, cost in costs.items()},
        "search": {method: _found(method, problem, comparison) for method in problem.recipes},
    }
    text = "".join(_lines(verdict, codes, costs) for verdict in verdicts)
    return Addition(content, text or "No method finished without diverging.\n")


class _Cost(NamedTuple):
    """Mean seconds per run: to train, and to refresh BatchNorm for the average once."""

    train: float
    refresh: float

    @property
    def total(self) -> float:
        return self.train + self.refresh


def _cost(
    method: str, experiment: Experiment, final: Mapping[tuple[str, int], TrainingJob]
) -> _Cost | None:
    """Return what a user of a method pays, without the evaluations that draw its curve."""
    train, refresh = [], []
    for (row, _), each in final.items():
        epochs = read_epochs(each.folder / "epochs.jsonl") if row == method else ()
        if epochs:
            train.append(sum(record.seconds["train"] for record in epochs))
            # The last evaluation refreshes the iterate and the average.
            is_averaged = experiment.recipes[method].average is not None
            refresh.append(epochs[-1].seconds["refresh"] / 2 if is_averaged else 0.0)
    return _Cost(fmean(train), fmean(refresh)) if train else None


def _lines(verdict: Verdict, codes: Mapping[str, str], costs: Mapping[str, _Cost | None]) -> str:
    """Return the answer's code and cost as text."""
    best, lines = verdict.best, ""
    if (cost := costs[best]) is not None:
        refresh = (
            f", {cost.refresh:.2g} s of it to refresh BatchNorm" if cost.refresh > 0.05 else ""
        )
        lines += f"{best} takes {cost.total:.3g} s per run{refresh}."
        other = verdict.averaged if best == verdict.base else verdict.base
        against = costs.get(other or "")
        if against is not None and against.total > 0:
            ratio = cost.total / against.total
            lines += f" That is {ratio:.2f} times as long as {other} ({against.total:.3g} s)."
        lines += "\n"
    if best in codes:
        indented = "".join(f"    {line}".rstrip() + "\n" for line in codes[best].splitlines())
        lines += f"The code of {best}:\n\n{indented}\n"
    return lines


def _found(method: str, problem: _Problem, comparison: Comparison) -> Document:
    """Return the outcome of a search as plain data."""
    tuned = comparison.tuned(method)
    sign = 1 if problem.recipes[method].mode == "max" else -1
    return {
        **tuned.setting._asdict(),
        "validation": sign * tuned.score,
        "edges": tuned.unclear,
        "trials": [
            {
                "number": trial.number + 1,
                **trial.setting._asdict(),
                "epochs": trial.epochs,
                "validation": sign * score,
            }
            for trial, score in sorted(comparison.scores[method].items())
        ],
    }


def _write_section(
    folder: Path, problem: _Problem, comparison: Comparison, codes: Mapping[str, str | None]
) -> None:
    """Add the trials to the report, and the code of the best method."""
    metric, rows = "", []
    for method, recipe in problem.recipes.items():
        metric = recipe.metric
        found = _found(method, problem, comparison)
        for trial in found["trials"]:
            value = trial["validation"]
            digits = 2 if is_percentage(metric) else decimals(value)
            is_best = (trial["lr"], trial["weight_decay"]) == (found["lr"], found["weight_decay"])
            is_best &= trial["epochs"] == comparison.plan.epochs
            rows.append(
                [
                    method,
                    f"{trial['number']}{' (best)' if is_best else ''}",
                    f"{trial['lr']:g}",
                    f"{trial['weight_decay']:g}",
                    str(trial["epochs"]),
                    f"{value:.{digits}f}" if math.isfinite(value) else "diverged",
                ]
            )
    unit = ", %" if is_percentage(metric) else ""
    header = ["method", "trial", "learning rate", "weight decay", "epochs"]
    header.append(f"validation {metric}{unit}")
    text = (
        "Every method had the same number of trials and epochs. Trials with few epochs are the "
        "first rounds of successive halving. The settings were chosen on validation data; no trial "
        "was evaluated on test data."
    )
    blocks: list[Document] = [
        {"kind": "text", "text": text},
        {"kind": "table", "header": header, "rows": rows},
    ]
    for method, code in codes.items():
        if code is not None:
            blocks.append({"kind": "text", "text": f"The code of {method}:"})
            blocks.append({"kind": "code", "text": code})
    place = folder / "sections"
    try:
        place.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(explain_os_error(error, place)) from None
    content = {"title": "The search", "blocks": blocks}
    write_json(place / "search.json", content, sealed=True)
