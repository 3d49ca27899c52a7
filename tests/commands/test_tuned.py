"""`gadam compare FILE`: the search, the final runs, the verdict, and how it resumes."""

from __future__ import annotations

import io
import json
import math
import textwrap
from contextlib import redirect_stdout
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from gadam.commands import main, tuned
from gadam.commands.options import SweepOptions
from gadam.commands.tuned import Request, chosen_methods
from gadam.runs import Experiment, RunResult, collect
from gadam.runs.files import RunError, read_json
from gadam.runs.recipe import Average, RecipeError
from gadam.train.budget import Timing
from gadam.train.search import CENTERS, Comparison, Plan
from gadam.train.search import METHODS as METHOD_BASES

TASK = """
import torch
from gadam.train import SupervisedTask

def points(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    noise = torch.randn(count, 1, generator=generator)
    return x, x.square().sum(1, keepdim=True) + 0.5 * noise

def error_at_most(outputs, targets):
    return float((outputs - targets).abs().max())

def task():
    return SupervisedTask(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ),
        train=points(200, 0),
        validation=points(50, 1),
        test=points(60, 2),
        loss=torch.nn.functional.mse_loss,
        metric="mse",
        batch_size=32,
        epochs=6,
    )
"""
METHODS = ["--methods", "adamw,gadam"]

pytestmark = pytest.mark.usefixtures("quick_workers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a task."""
    found = tmp_path_factory.mktemp("own")
    (found / "my_task.py").write_text(TASK)
    return found


def command(folder: Path, *more: str) -> list[str]:
    words = ["compare", str(folder / "my_task.py"), "--out", str(folder / "out"), *METHODS]
    return [*words, "--trials", "4", "--seeds", "2", "--workers", "2", *more]


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def compared(folder, quick_workers) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder and the events of a comparison."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(command(folder, "--json")) == 0
    return folder / "out", [json.loads(line) for line in out.getvalue().splitlines()]


# ----------------------------------------------------------------------------------- a whole search


def test_the_plan_comes_first_and_is_exact(compared):
    _, events = compared
    plan = events[0]
    assert plan["event"] == "plan"
    assert (plan["trials"], plan["seeds"], plan["epochs"]) == (4, 2, 6)
    ended = [event for event in events if event["event"] == "finished"]
    assert len(ended) == plan["runs"] == 2 * (4 + 2)
    assert events[-1]["event"] == "summary"


def test_trials_never_see_the_test_split(compared):
    out, _ = compared
    trials = [RunResult.from_dict(read_json(p)) for p in out.glob("trials/*/*/result.json")]
    assert len(trials) == 8
    for result in trials:
        assert set(result.used or {}) == {"validation"}
    assert not list(out.glob("trials/**/*.pt"))  # nobody needs their weights
    assert list(out.glob("gadam-0/*.pt"))
    assert main(["verify", str(out), "--weights"]) == 0


def test_base_and_average_get_the_same_trials_and_steps(compared):
    out, _ = compared
    epochs = {}
    for method in ("adamw", "gadam"):
        recipes = [read_json(p)["recipe"] for p in sorted(out.glob(f"trials/{method}/*/run.json"))]
        epochs[method] = [recipe["epochs"] for recipe in recipes]
        sampled = [recipe["optimizer"]["lr"] for recipe in recipes][:2]
        assert sampled[0] == 1e-3
    assert epochs["adamw"] == epochs["gadam"]


def test_the_final_runs_have_the_best_setting_of_the_search(compared):
    out, events = compared
    summary = events[-1]
    found = {key: summary[key] for key in read_json(out / "summary.json")}
    assert found == read_json(out / "summary.json")
    for method, search in summary["search"].items():
        full = [trial for trial in search["trials"] if trial["epochs"] == 6]
        best = min(full, key=lambda trial: trial["validation"])  # mse: less is better
        assert (search["lr"], search["weight_decay"]) == (best["lr"], best["weight_decay"])
        optimizer = summary["recipes"][method]["optimizer"]
        assert (optimizer["lr"], optimizer["weight_decay"]) == (best["lr"], best["weight_decay"])
    experiment = Experiment.from_dict(read_json(out / "experiment.json"))
    assert experiment.bases == {"Gadam": "AdamW"}
    assert "the best of 4 trials on validation data" in experiment.note
    assert experiment.recipes["AdamW"].schedule.name == "cosine"
    assert experiment.recipes["Gadam"].average == Average(3, every=2)


def test_the_report_shows_final_runs_and_the_search(compared):
    out, _ = compared
    collection = collect([out])
    assert collection.problems == ()
    assert (len(collection.runs), collection.labels) == (4, ["AdamW", "Gadam"])
    (section,) = collection.sections
    assert section.title == "The search"
    table = section.blocks[1]
    assert len(table["rows"]) == 8
    assert table["header"][-1] == "validation mse"
    assert sum("(best)" in row[1] for row in table["rows"]) == 2
    summary = read_json(out / "summary.json")
    (verdict,) = summary["verdicts"]
    code = summary["code"][verdict["best"]]
    assert section.blocks[2:] == (
        {"kind": "text", "text": f"The code of {verdict['best']}:"},
        {"kind": "code", "text": code},
    )
    page = (out / "report.html").read_text()
    assert "The search" in page
    assert f"<pre>{escape(code)}</pre>" in page


def test_the_verdict_has_code_that_runs(compared):
    _, events = compared
    summary = events[-1]
    (verdict,) = summary["verdicts"]
    assert verdict["best"] in ("AdamW", "Gadam")
    assert verdict["base"] == "AdamW"
    assert verdict["gain"]["count"] == 2
    assert "mse" in verdict["sentence"]
    assert set(summary["code"]) == set(summary["cost"]) == {"AdamW", "Gadam"}
    assert summary["cost"]["Gadam"]["refresh"] > 0 == summary["cost"]["AdamW"]["refresh"]
    model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    for code in summary["code"].values():
        names: dict[str, Any] = {"model": model, "loader": [torch.randn(8, 4)]}
        before, _, after = code.partition("# Train for")
        exec(before, names)
        for _ in range(60):
            model(torch.randn(8, 4)).square().mean().backward()
            names["optimizer"].step()
        exec(f"#{after}", names)


def test_the_same_command_continues_and_may_add_seeds(compared, folder, capsys):
    out, events = compared
    kept = (out / "gadam-0" / "result.json").read_bytes()
    for name in ("trials/gadam/03-epochs-6", "gadam-1"):  # as if it had been killed before these
        for path in (out / name).iterdir():
            path.unlink()
    more = [word if word != "2" else "3" for word in command(folder)[:-2]]
    code, text, _ = run(capsys, *more, "--workers", "2")
    assert code == 0
    assert "Plan" not in text  # it is the plan of the first command
    again = read_json(out / "summary.json")
    assert again["search"] == events[-1]["search"]
    assert again["code"] == events[-1]["code"]
    assert [row["runs"] for row in again["rows"]] == [3, 3]
    assert (out / "gadam-0" / "result.json").read_bytes() == kept
    best = again["verdicts"][0]["best"]
    assert f"The code of {best}:\n\n{textwrap.indent(again['code'][best], '    ')}\n" in text
    assert f"{best} takes " in text
    assert again["verdicts"][0]["sentence"] in text
    assert again["command"] == f"gadam {' '.join(['compare', str(folder / 'my_task.py')])} " + (
        "--trials 4 --seeds 3 --methods AdamW Gadam"
    )


def test_another_command_in_the_same_folder_is_refused(compared, folder, capsys):
    code, _, error = run(capsys, *command(folder), "--set", "epochs=9")
    assert code == 2
    assert "holds another comparison (settings: [] → ['epochs=9'])" in error
    changed = [word if word != "4" else "5" for word in command(folder)]
    assert "(trials: 4 → 5)" in run(capsys, *changed)[2]


def test_changed_code_is_refused(compared, folder, capsys):
    source = folder / "my_task.py"
    source.write_text(TASK.replace("Linear(4, 8)", "Linear(4, 8, bias=False)"))
    try:
        code, _, error = run(capsys, *command(folder))
        assert code == 2
        assert "--accept-changed-code" in error
    finally:
        source.write_text(TASK)


def test_a_budget_that_is_too_short_is_refused(folder, tmp_path, capsys):
    words = ["compare", str(folder / "my_task.py"), "--out", str(tmp_path), *METHODS]
    code, _, error = run(capsys, *words, "--budget", "3s", "--workers", "2", "--quiet")
    assert code == 2
    assert "--budget 3s is too short. " in error
    assert not list(tmp_path.rglob("run.json"))


# -------------------------------------------------------------------------------------- before work


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "lr=0.1"], "The search chooses lr. Remove --set lr=0.1."),
        (["--set", "optimizer.name=adam"], "The search chooses optimizer.name."),
        (["--set", "data.name=mnist"], "--set data.name=mnist applies to none of the rows."),
        (["--trials", "0"], "--trials must be at least 1, got 0."),
        (["--budget", "soon"], "--budget takes a time such as 2h"),
        (["--methods", "Gadm"], "there is no method 'Gadm'. Did you mean Gadam?"),
        (["--methods", "Gadam"], "--methods needs at least two methods to compare, got Gadam."),
    ],
)
def test_mistakes_are_explained_before_any_work(arguments, message, folder, tmp_path, capsys):
    words = ["compare", str(folder / "my_task.py"), "--out", str(tmp_path / "out")]
    code, _, error = run(capsys, *words, *arguments)
    assert code == 2
    assert message in error
    assert not (tmp_path / "out").exists()


def test_all_problems_with_settings_are_named_at_once(tmp_path, capsys):
    wrong = ["data.name=no-such", "model=json:nope", "lrr=3", "epochs=-1", "lr=0.1"]
    words = [word for setting in wrong for word in ("--set", setting)]
    code, _, error = run(capsys, "compare", "--trials", "3", "--out", str(tmp_path / "x"), *words)
    assert code == 2
    for part in ("'no-such'", "'nope'", "'lrr'", "got -1", "The search chooses lr"):
        assert part in error
    assert not (tmp_path / "x").exists()


def test_data_in_place_of_a_task_is_explained(tmp_path, capsys):
    (tmp_path / "my photos" / "cats").mkdir(parents=True)
    for name in ("my photos", "digits.npz"):
        code, _, error = run(capsys, "compare", str(tmp_path / name))
        assert code == 2
        assert "gadam compare --set data.name=" in error
        assert name in error


def test_methods_by_name():
    assert chosen_methods(["GadamX,sgd", "swa"]) == ("SGD", "SWA", "GadamX")
    assert chosen_methods([]) == ()
    assert Request(None, None, None).names[:2] == ("SGD", "SWA")


SMALL = ("data.size=7", "data.examples=300", "data.validation=100", "model=logistic")


def test_data_and_networks_of_settings_are_tuned_too():
    options = SweepOptions(settings=(*SMALL, "epochs=30"))
    problem = tuned._problem(Request(None, None, 4), options)
    assert problem.steps == 2
    assert list(problem.recipes) == ["SGD", "SWA", "AdamW", "Gadam", "PadamW", "GadamX"]
    for method, recipe in problem.recipes.items():
        assert recipe.method == method
        assert (recipe.model, recipe.epochs, recipe.evaluate_every) == ("logistic", 30, 3)
    assert problem.recipes["Gadam"].average == Average(15)
    short = tuned._shortened(problem, Plan(6, 8, 2), options)
    assert short.recipes["Gadam"].average == Average(4, every=1)
    assert short.recipes["SGD"].epochs == short.epochs == 8
    plan = Plan(6, 8, 2)
    comparison = Comparison(plan, dict.fromkeys(short.recipes, CENTERS["sgd"]))
    experiment = tuned._experiment(short, comparison, plan, Request(None, "1h", None), options)
    assert "Runs have 8 of 30 epochs, to fit into the budget." in experiment.note
    assert experiment.command.startswith("gadam compare --budget 1h --set data.size=7")


def test_the_plan_and_the_edges_of_the_search_in_words(capsys):
    options, plan = SweepOptions(settings=(*SMALL, "epochs=6")), Plan(3, 6, 2)
    problem = tuned._problem(Request(None, None, 3), options)
    tuned._announce(plan, problem, options, None)
    expected = "Plan: 6 methods × 3 trials (3 with 6 epochs), then 2 seeds each: 30 runs.\n"
    assert capsys.readouterr().out == expected
    comparison = Comparison(plan, {m: CENTERS[METHOD_BASES[m][0]] for m in problem.recipes})
    waiting = comparison.start()
    while waiting:
        run = waiting.pop(0)
        score = run.trial.setting.lr * (-1 if run.method == "SWA" else 1)
        waiting += [each for each in comparison.after(run, score) if not each.is_final]
    note = tuned._experiment(problem, comparison, plan, Request(None, None, 3), options).note
    assert note.endswith(
        "so more trials may help: SGD, AdamW, Gadam, PadamW, GadamX (highest learning rate, weight "
        "decay); SWA (lowest learning rate, weight decay)."
    )


def test_settings_of_the_average_stay():
    options = SweepOptions(settings=(*SMALL, "epochs=6", "average.every=2", "evaluate_every=5"))
    recipe = tuned._problem(Request(None, None, 4), options).recipes["SWA"]
    assert recipe.average == Average(3, every=2)
    assert recipe.evaluate_every == 5


def test_without_validation_data_there_is_no_search():
    options = SweepOptions(settings=(*SMALL[:2], "data.validation=0", "model=logistic"))
    with pytest.raises(RecipeError, match="The search needs validation data"):
        tuned._problem(Request(None, None, 4), options)


def test_a_diverged_trial_is_the_worst():
    recipe = tuned._problem(Request(None, None, 4), SweepOptions(settings=SMALL)).recipes["SGD"]
    good = RunResult("done", 1, {"validation": {"accuracy": 1.0}})
    assert tuned._score(good, recipe) == 1.0
    assert tuned._score(RunResult("diverged", 1, good.iterate), recipe) == -math.inf
    assert tuned._score(None, recipe) == -math.inf


def test_the_least_budget_is_named():
    problem = tuned._problem(Request(None, None, 4), SweepOptions(settings=SMALL))
    timings = dict.fromkeys(problem.recipes, Timing(1.0, 2.0, 3.0))
    options = SweepOptions(workers=2)
    request = Request(None, "10m", None)
    with pytest.raises(RecipeError, match=r"The shortest comparison takes \d+ min on this machine"):
        tuned._fit(600, 5, problem, timings, request, options)
    plan, needed = tuned._fit(7200, 7000, problem, timings, request, options)
    assert needed <= 7000
    assert plan.epochs == 20
    endless = dict.fromkeys(problem.recipes, Timing(1.0, math.inf, math.inf))
    with pytest.raises(RecipeError, match="One step takes longer than the pilot may"):
        tuned._fit(600, 590, problem, endless, request, options)


def test_a_damaged_plan_is_reported(tmp_path):
    (tmp_path / "search.json").write_text("{}")
    with pytest.raises(RunError, match=r"search\.json is damaged"):
        tuned._known_plan(tmp_path, Request(None, None, 4), SweepOptions())


def test_the_example_of_the_documentation_works(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_task.py").write_text(block)
    request = Request(str(tmp_path / "my_task.py"), None, None)
    problem = tuned._problem(request, SweepOptions())
    assert (problem.name, problem.steps, problem.epochs) == ("my_task", 19, 15)
    assert problem.recipes["SGD"].metric == "accuracy"
    halving = Plan(12, 20, 3)
    epochs = halving.total_epochs - halving.seeds * halving.epochs
    assert f"12 trials of 20 epochs train as long as {epochs / 20:g} full runs" in page
