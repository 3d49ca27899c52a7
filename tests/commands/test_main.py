"""The command line as a whole: help, mistakes, missing packages, exit codes."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from importlib import import_module

import pytest

import gadam
from gadam._errors import UserError
from gadam.commands import COMMANDS, Command, main

ALIASES = [(alias, command.name) for command in COMMANDS.values() for alias in command.aliases]
POSITIONALS = {
    "compare": ["[FILE]"],
    "train": ["RECIPE"],
    "reproduce": ["NAME"],
    "list": [],
    "data": ["NAME"],
    "average": ["CHECKPOINT [CHECKPOINT ...]"],
    "report": ["DIR [DIR ...]"],
    "verify": ["DIR"],
    "analyze": ["DIR"],
    "tails": ["RUN"],
    "theory": ["NAME", "[RUN]"],
    "bench": ["[NETWORK ...]"],
}


def run(*arguments: str) -> int:
    return main(list(arguments))


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        run(command, "--help")
    assert stop.value.code == 0
    return capsys.readouterr().out


# ------------------------------------------------------------------------------------------ help


def test_help_lists_every_command(capsys):
    assert run("--help") == run("-h") == run("help") == run() == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  gadam {name} {command.argument}".rstrip() in text
    assert "Exit codes: 0 done; 1 a run failed; 2 the command was wrong; 130 interrupted" in text
    assert max(map(len, text.splitlines())) <= 100


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"{gadam.__version__}\n"


def test_every_command_is_tested():
    assert set(POSITIONALS) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_named_positionals(command, capsys):
    text = help_of(command, capsys)
    usage = text.split("\n\n")[0]
    assert usage.startswith(f"usage: gadam {command} ")
    for positional in POSITIONALS[command]:
        assert f" {positional}" in usage
    described = re.split(r"^\W*options\W*$", text, flags=re.MULTILINE)[0]
    described = described.partition("positional arguments")[2]
    assert re.findall(r"^[│ ] {1,2}(\S.*?)  ", described, re.MULTILINE) == POSITIONALS[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_show_internals(command, capsys):
    text = help_of(command, capsys)
    for internal in ("{None}", "None}", "(default: None)", "(default: )", "PATH", "[OPTIONS]]"):
        assert internal not in text
    assert " --json " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_module_with_a_run_function(command):
    assert callable(import_module(f"gadam.commands.{command}").run)


@pytest.mark.parametrize(("alias", "name"), ALIASES)
def test_aliases(alias, name, capsys, tmp_path):
    assert help_of(alias, capsys) == help_of(name, capsys)
    assert run(alias, str(tmp_path)) == run(name, str(tmp_path)) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second


def test_analyse_is_still_accepted():
    assert ("analyse", "analyze") in ALIASES


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compar"], "gadam: there is no command 'compar'. Did you mean 'compare'?"),
        (["brew"], "gadam: there is no command 'brew'. Run `gadam --help` for the commands."),
        (["reproduce", "tab-cifra"], "Did you mean 'tab-cifar'?"),
        (["reproduce", "qqq"], "There is no experiment 'qqq'. Run `gadam list` for the names."),
        (["reproduce", "tab-cifar", "--rows", "ViT"], "tab-cifar has no row matching 'ViT'."),
        (["train", "compare-gadm"], "Did you mean 'compare-gadam'?"),
        (["train", "qqq"], "Run `gadam list --recipes` for the names."),
        (["train", "compare-gadam", "--seed", "-1"], "--seed must be at least 0 and less than 2"),
        (["train", "compare-gadam", "--set", "lrr=1"], "Did you mean 'lr'?"),
        (["compare", "--seeds", "0"], "--seeds must be at least 1, got 0."),
        (["compare", "--workers", "-1"], "--workers must be at least 1, got -1."),
        (["compare", "--threads", "0"], "--threads must be at least 1, got 0."),
        (["compare", "--set", "epochs=many"], "epochs must be a whole number, got 'many'."),
        (["data", "cifar1000"], "Did you mean"),
        (["compare", "--set", "model=vgg-minni"], "Did you mean"),
        (["compare", "--set", "data.name=cifar1000"], "Did you mean"),
        (["compare", "--set", "data.size=4"], "at least 8x8"),
        (["compare", "--device", "warp9"], "--device warp9"),
        (["compare", "--set", "betas=0.9,1.5"], "Invalid beta parameter"),
        (["compare", "--set", "examples=999999"], "5000 training examples"),
        (["compare", "--set", "clip_grad_norm=-1"], "clip_grad_norm must be positive, got -1.0."),
        (["compare", "--set", "epochs=2"], "leaves nothing to average in 2 epochs"),
        (["compare", "--set", "average.decay=2", "--set", "weighting=ema"], "decay"),
        (["compare", "--set", "name=adamw"], "'name' is ambiguous. Use one of"),
        (["compare", "--set", "language.bptt=20"], "applies to none of the rows"),
        (["average", "gone-*", "--out", "a"], "gone-* does not exist or matches nothing."),
        (["report"], "Name at least one folder"),
        (["report", "gone"], "gone is not a folder"),
        (["analyze", "gone"], "gone is not a folder"),
        (["theory", "strid"], "There is no figure 'strid'. Did you mean 'stride'?"),
        (["theory", "ema", "--seed", "-1"], "--seed must be non-negative, got -1."),
        (["theory", "ema", "extra"], "Only `gadam theory plan` takes a folder. Remove extra."),
        (["theory", "plan"], "`gadam theory plan` needs the folder of a run."),
        (["theory", "plan", "gone"], "gone is not a folder"),
        (["bench", "resnet49"], "There is no network 'resnet49'. Use one of resnet50, vgg16"),
        (["bench", "--repetitions", "0"], "--repetitions must be at least 1, got 0."),
    ],
)
def test_mistakes_get_a_sentence_and_code_2(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.startswith(f"gadam {arguments[0]}: " if arguments[0] in COMMANDS else "")
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--sedes", "3"],
        ["train"],
        ["reproduce", "tab-cifar", "--scale", "huge"],
        ["list", "extra"],
        ["data"],
        ["analyze"],
        ["bench", "--repetitions", "many"],
    ],
)
def test_wrong_options_end_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    assert f"gadam {arguments[0]}" in capsys.readouterr().err


def test_missing_data_is_reported_before_any_work(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GADAM_DATA", str(tmp_path / "nowhere"))
    assert run("reproduce", "tab-cifar", "--scale", "paper") == 2
    assert "gadam data cifar10" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# --------------------------------------------------------------------------------- exit codes


def replaced(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr("gadam.commands._load", lambda command: fail)


def test_an_error_of_the_user_ends_with_code_2(monkeypatch, capsys):
    replaced(monkeypatch, UserError("Pass a different --out."))
    assert run("compare") == 2
    assert capsys.readouterr().err == "gadam compare: Pass a different --out.\n"


def test_ctrl_c_ends_with_code_130(monkeypatch, capsys):
    replaced(monkeypatch, KeyboardInterrupt())
    assert run("compare") == 130
    assert capsys.readouterr().err.strip() == "Interrupted. Rerun the same command to resume."


def test_a_closed_pipe_ends_with_code_1(monkeypatch, capsys):
    replaced(monkeypatch, BrokenPipeError())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run("compare") == 1
    assert sys.stdout.name == os.devnull
    sys.stdout.close()


def test_other_errors_keep_their_traceback(monkeypatch):
    replaced(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        run("compare")


def test_arguments_come_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gadam", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.strip() == gadam.__version__


# ----------------------------------------------------------------------------- missing packages


@pytest.mark.parametrize(("name", "command"), COMMANDS.items())
def test_a_missing_package_names_the_extra(name, command: Command, monkeypatch):
    replaced(monkeypatch, ModuleNotFoundError("No module named 'rich'", name="rich.console"))
    with pytest.raises(SystemExit) as stop:
        run(name)
    expected = f"gadam {name} needs rich. Run: pip install 'gadam[{command.extra}]'"
    assert stop.value.code == expected


@pytest.mark.parametrize("module", [None, "gadam", "gadam.runs.gone"])
def test_a_missing_module_of_gadam_itself_keeps_its_traceback(module, monkeypatch):
    replaced(monkeypatch, ModuleNotFoundError("No module", name=module))
    with pytest.raises(ModuleNotFoundError):
        run("compare")


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("tyro", ["compare"], "train"),
        ("scipy", ["theory", "ema"], "theory"),
        ("matplotlib", ["theory", "ema"], "theory"),
    ],
)
def test_a_package_that_is_not_installed_names_the_extra(package, arguments, extra, tmp_path):
    program = (
        f"import sys; sys.modules[{package!r}] = None; from gadam.commands import main;"
        f"sys.exit(main({arguments!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"gadam {arguments[0]} needs {package}. Run: pip install 'gadam[{extra}]'"
    )


def test_help_needs_no_extra():
    program = (
        "import sys; sys.modules.update(tyro=None, rich=None, numpy=None);"
        "from gadam.commands import main; sys.exit(main(['--help']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gadam compare" in done.stdout
