"""The faults of `python -m chaos`: kills, damage, full disks, and two processes in one folder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chaos.damage import (
    KINDS,
    SWEEP_KINDS,
    check_report,
    check_training,
    choose,
    damage,
    differences,
    fresh_copy,
    undetected,
)
from gadam.commands import main
from gadam.report.page import render
from gadam.runs import Average, Recipe, RunHeader, collect, files, lock
from gadam.runs.archive import unpack
from gadam.runs.files import parse_json, read_json, write_json
from gadam.runs.lines import chained, read_epochs
from gadam.runs.manifest import FileHash, Problem, check_run, check_tree, write_manifest
from gadam.runs.record import FORMAT, EpochRecord
from gadam.study.part import parts
from gadam.train import experiments, loop
from gadam.train.launchers import local

PATIENCE = 120.0  # seconds for a command that is not killed

_SMALL = ["epochs=10", "examples=1600", "data.size=8", "evaluate_every=2"]
_AVERAGE = ["average.start=4", "keep_iterates=3"]


def settings_of(*settings: str) -> list[str]:
    """Return the options of a command line that set these."""
    return [word for setting in settings for word in ("--set", setting)]


COMMANDS = {
    "train": ["train", "compare-gadam", *settings_of(*_SMALL, *_AVERAGE, "model=logistic")],
    "compare": ["compare", "--seeds", "1", *settings_of(*_SMALL, *_AVERAGE, "model=logistic")],
    "reproduce": ["reproduce", "mnist-logistic", "--seeds", "1", *settings_of(*_SMALL, *_AVERAGE)],
    "analyze": ["analyze", "--parts", "diversity,ensemble,rate"],
}
TARGETS = ("parent", "worker", "group")


@dataclass
class Tally:
    """How often a fault was tried, and what came of it.

    Args:
        tried: How often.
        lost: How often a command did not end, or ended with a traceback.
        wrong: How often something was not true afterwards.
        notes: What was lost or wrong.
    """

    tried: int = 0
    lost: int = 0
    wrong: int = 0
    notes: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.tried + other.tried,
            self.lost + other.lost,
            self.wrong + other.wrong,
            self.notes + other.notes,
        )

    def note(self, kind: str, what: str) -> None:
        """Count something that is "lost" or "wrong".

        Args:
            kind: Which of the two.
            what: What happened.
        """
        setattr(self, kind, getattr(self, kind) + 1)
        self.notes.append(f"{kind}: {what}")

    def to_dict(self) -> dict[str, int]:
        """Return the numbers as plain data."""
        return {"tried": self.tried, "lost": self.lost, "wrong": self.wrong}


# --------------------------------------------------------------------------------------- processes


class Program:
    """A command in a process group of its own.

    By default the process is a fork of this one that draws no figures: importing torch again would
    take most of the time, and most kills would hit the import.

    Args:
        arguments: The command line after `gadam`.
        log: Where its output goes.
        real: Start a new interpreter, as a user does.
        ranks: Processes that torchrun starts. 0 is for a command without torchrun.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, *, real: bool = False, ranks: int = 0
    ) -> None:
        self.log = log
        self._code: int | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        if real:
            with log.open("wb") as output:
                self._popen = subprocess.Popen(
                    [
                        sys.executable,
                        *(_torchrun(ranks) if ranks else ()),
                        "-m",
                        "gadam",
                        *arguments,
                    ],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self.pid = self._popen.pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            _become(list(arguments), log, ranks)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if it has not ended in time.

        Args:
            seconds: How long to wait.
        """
        deadline = time.monotonic() + seconds
        while self._code is None:
            if self._popen is not None:
                self._code = self._popen.poll()
            else:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        return self._code

    def workers(self) -> list[int]:
        """Return the processes that it has started."""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return list(map(int, children))
        return []

    def kill(self, target: str, rng: random.Random) -> bool:
        """Kill the process, one of its workers, or its group. Return False if there is none.

        Args:
            target: One of :data:`TARGETS`.
            rng: The source of randomness.
        """
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ChildProcessError):
            if target == "group":
                os.killpg(self.pid, signal.SIGKILL)
                return True
            if target == "parent":
                os.kill(self.pid, signal.SIGKILL)
                return True
            if children := self.workers():
                os.kill(rng.choice(children), signal.SIGKILL)
                return True
        return False

    def clean_up(self) -> None:
        """Wait for orphans of the group; end them if they do not end on their own."""
        deadline = time.monotonic() + 20
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            while time.monotonic() < deadline:
                if os.waitpid(-self.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
            os.killpg(self.pid, signal.SIGKILL)


def warm_up(home: Path) -> None:
    """Import and initialize in this process what every forked one would have to.

    Args:
        home: A folder for a run.
    """
    adopt_orphans = 36  # PR_SET_CHILD_SUBREAPER: Program.clean_up waits for them
    ctypes.CDLL(None).prctl(adopt_orphans, 1, 0, 0, 0)
    for name in ("analyze", "compare", "reproduce", "train", "verify"):
        import_module(f"gadam.commands.{name}")
    recipe = experiments.recipes("mini")["compare-gadam"]
    small = replace(recipe.data, examples=200, validation=50, size=8)
    recipe = replace(recipe, model="logistic", epochs=1, average=Average(0), data=small)
    loop.train(recipe, home / "warm-up")
    render(collect([home / "warm-up"]))
    parts()


def _torchrun(ranks: int) -> list[str]:
    if not ranks:
        return []
    options = [f"--nproc-per-node={ranks}", "--max-restarts=1", "--monitor-interval=0.1"]
    return ["-m", "torch.distributed.run", "--standalone", *options]


def _launch(arguments: list[str], ranks: int) -> int:
    """Do what torchrun does, with forked ranks."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
    )
    try:
        elastic_launch(config, _rank)(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _rank(arguments: list[str]) -> None:
    code = main(arguments)
    sys.stdout.flush()
    if code:
        sys.exit(code)


def _become(arguments: list[str], log: Path, ranks: int = 0) -> None:
    """Turn a forked process into the command."""
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _fork_workers()
        code = _launch(arguments, ranks) if ranks else main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_workers() -> None:
    """Fork the workers of a sweep instead of spawning them."""
    context: Any = multiprocessing.get_context("fork")
    ends: list[Any] = []

    def pipe() -> tuple[Any, Any]:
        ours, theirs = multiprocessing.Pipe()
        ends.append(ours)
        return ours, theirs

    def work(*arguments: Any) -> None:
        for end in ends:  # a spawned worker does not have them, and notices if its parent dies
            end.close()
        original(*arguments)

    original: Any = local._work
    forked = SimpleNamespace(Pipe=pipe, Process=context.Process, RawValue=context.RawValue)
    vars(local)["_work"] = work
    vars(local)["multiprocessing"] = SimpleNamespace(get_context=lambda kind: forked)
    # Drawing takes longer than all else, and reads nothing but the records.
    vars(import_module("gadam.report.write"))["write_figures"] = lambda collection, folder: []


def finish(
    arguments: Sequence[str], log: Path, tally: Tally, *, real: bool = False, ranks: int = 0
) -> bool:
    """Run a command to its end. Count it as lost if it fails.

    Args:
        arguments: The command line after `gadam`.
        log: Where its output goes.
        tally: What to count in.
        real: As for :class:`Program`.
        ranks: As for :class:`Program`.
    """
    for _ in range(5):
        program = Program(arguments, log, real=real, ranks=ranks)
        code = program.wait(PATIENCE)
        if code is None:
            program.kill("group", random.Random(0))
            program.wait(10)
            tally.note("lost", f"{' '.join(arguments[:2])} did not end")
            return False
        text = log.read_text(errors="replace")
        if code == 0:
            return True
        if "Another process is using" not in text:
            break
        time.sleep(2)  # an orphan of the last kill
    tally.note("lost", f"{' '.join(arguments[:2])} ended with {code}: {text[-1500:]}")
    return False


# ------------------------------------------------------------------------------------------- kills


def kills(home: Path, count: int, rng: random.Random) -> dict[str, Tally]:
    """Kill commands at random moments, and compare what they leave with undisturbed ones.

    Args:
        home: A folder for the runs.
        count: How many kills.
        rng: The source of randomness.
    """
    warm_up(home)
    return kill_commands(home, COMMANDS, TARGETS, count, rng)


def kill_commands(
    home: Path,
    commands: Mapping[str, list[str]],
    targets: Sequence[str],
    count: int,
    rng: random.Random,
    ranks: int = 0,
) -> dict[str, Tally]:
    """Kill commands; see :func:`kills`.

    Args:
        home: A folder for the runs.
        commands: Their command lines after `gadam`, by name.
        targets: What to kill of each.
        count: How many kills.
        rng: The source of randomness.
        ranks: As for :class:`Program`.
    """
    jobs = [(name, target) for name in commands for target in targets]
    tallies = {f"kill {name}, {target}": Tally() for name, target in jobs}
    durations = {}
    for name, command in commands.items():
        tally = tallies[f"kill {name}, parent"]
        began = time.monotonic()
        arguments = _prepared(command, home, home / f"{name}-whole")
        if not finish(arguments, home / "log", tally, ranks=ranks):
            return tallies
        durations[name] = time.monotonic() - began
    share = -(-count // len(jobs))
    for name, target in jobs:
        tally = tallies[f"kill {name}, {target}"]
        print(f"kill {name}, {target} …", file=sys.stderr, flush=True)
        torn = home / f"{name}-torn"
        since = 0
        # From the start of the command, or from that of its workers.
        span = durations[name] * (0.4 if target == "worker" else 1.0)
        while tally.tried < share:
            arguments = _prepared(commands[name], home, torn, keep=since > 0)
            real = rng.random() < 0.05
            program = Program(arguments, home / "log", real=real, ranks=ranks)
            while target == "worker" and not program.workers() and program.wait(0) is None:
                pass
            # A new interpreter takes longer to get anywhere.
            time.sleep(rng.uniform(0, 1) * (span + 4 * (real and target != "worker")))
            hit = program.wait(0) is None and program.kill(target, rng)
            code = program.wait(PATIENCE)
            program.clean_up()
            if hit:
                tally.tried += 1
                since += 1
                _check_torn(torn, tally)
            elif not real:
                span *= 0.8  # it is faster than an undisturbed one: part of the work is done
            if code == 0 or since >= 10 or tally.tried == share:
                if since and finish(arguments, home / "log", tally, ranks=ranks):
                    compare(commands[name][0], home / f"{name}-whole", torn, tally)
                shutil.rmtree(torn, ignore_errors=True)
                since = 0
    return tallies


def _prepared(command: list[str], home: Path, folder: Path, *, keep: bool = False) -> list[str]:
    """Return the command line for a folder; what it analyzes is copied there."""
    if command[0] == "analyze":
        if not keep:
            fresh_copy(home / "reproduce-whole", folder)
        return [command[0], str(folder), *command[1:]]
    return [*command, "--out", str(folder)]


def _check_torn(folder: Path, tally: Tally) -> None:
    """Check what a killed command has left: files that do not match would be a lie."""
    if not folder.exists():
        return
    for found in check_tree(folder):
        for problem in (found,) if isinstance(found, Problem) else found.problems:
            # It may have been killed before it wrote the header, or in the middle of a line.
            if not problem.reason.startswith("is missing"):
                tally.note("wrong", f"after a kill, {problem}")
    try:
        collect([folder])
    except Exception as error:
        tally.note("lost", f"after a kill, collect raised {error!r}")


def compare(name: str, whole: Path, torn: Path, tally: Tally) -> None:
    """Count what differs between the results of a command and of an undisturbed one as wrong.

    Args:
        name: The command.
        whole: The folder of an undisturbed one.
        torn: The folder of a disturbed one.
        tally: What to count in.
    """
    wrong = []
    for path in sorted(whole.glob("*/result.json")):
        wrong += differences(path.parent, torn / path.parent.name)
    kept = ".lock", ".analysis.lock", ".metadata"  # of a checkpoint of several ranks
    strays = [p.name for p in torn.rglob(".*") if p.name not in kept]
    wrong += [f"{stray} was left behind" for stray in strays]
    if name == "analyze":
        a, b = (read_json(folder / "analysis.json")["parts"] for folder in (whole, torn))
        if {k: v["values"] for k, v in a.items()} != {k: v["values"] for k, v in b.items()}:
            wrong.append("the analysis has other numbers")
    elif name != "train":
        a, b = (read_json(folder / "summary.json")["rows"] for folder in (whole, torn))
        if [{**row, "seconds": 0} for row in a] != [{**row, "seconds": 0} for row in b]:
            wrong.append("the summary has other numbers")
    for sentence in wrong:
        tally.note("wrong", f"{name}: {sentence}")


# ------------------------------------------------------------------------------------------ damage


def damages(home: Path, count: int, rng: random.Random) -> dict[str, Tally]:
    """Damage files of finished and unfinished runs, and of a sweep with its analysis.

    Args:
        home: A folder for the runs.
        count: How many times.
        rng: The source of randomness.
    """
    sweep_folder = home / "sweep"
    setup = Tally()
    arguments = [*COMMANDS["reproduce"], "--out", str(sweep_folder)]
    analysis = [COMMANDS["analyze"][0], str(sweep_folder), *COMMANDS["analyze"][1:]]
    for command in (arguments, analysis):
        if not finish(command, home / "log", setup):
            return {"damage": setup}
    finished = next(p.parent for p in sorted(sweep_folder.glob("swa-0/result.json")))
    recipe = RunHeader.from_dict(read_json(finished / "run.json")).recipe
    label = RunHeader.from_dict(read_json(finished / "run.json")).label
    stopped = home / "stopped"
    steps = iter(range(10**9))
    with contextlib.suppress(loop.Stopped):
        end = 8 * -(-recipe.data.examples // recipe.batch_size) if recipe.data.examples else 60
        loop.train(recipe, stopped, label=label, should_stop=lambda: next(steps) > end)
    tallies = {f"damage {kind}": Tally() for kind in (*KINDS, *SWEEP_KINDS)}
    kinds = list(tallies)
    for i in range(count):
        kind = kinds[i % len(kinds)].removeprefix("damage ")
        tally = tallies[f"damage {kind}"]
        tally.tried += 1
        seed = rng.randrange(2**32)
        if kind in KINDS:
            source = rng.choice([finished, stopped])
            if kind != "lock" and not list(source.glob(KINDS[kind])):
                source = finished
            task = partial(_damage_run, source, home / "damaged", kind, recipe, finished, seed)
        else:
            task = partial(_damage_sweep, sweep_folder, home / "damaged", kind, seed)
        _isolated(tally, task)
    return tallies


def _damage_run(
    source: Path, target: Path, kind: str, recipe: Recipe, whole: Path, seed: int
) -> list[str]:
    rng = random.Random(seed)
    folder = fresh_copy(source, target)
    expected = collect([folder])
    was_finished = check_run(folder).state == "finished"
    path = choose(folder, KINDS[kind], rng)
    before = path.read_bytes()
    what = damage(path, rng)
    wrong = check_report(folder, expected)
    newest = max(source.glob("checkpoint-*.pt")).name
    if was_finished and kind != "lock" and (kind != "checkpoint" or path.name == newest):
        wrong += undetected(folder, {path: before})
    wrong += check_training(folder, recipe, whole)[1]
    return [f"{what}: {sentence}" for sentence in wrong]


def _damage_sweep(source: Path, target: Path, kind: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    folder = fresh_copy(source, target)
    expected = collect([folder])
    path = choose(folder, SWEEP_KINDS[kind], rng)
    before = path.read_bytes()
    what = damage(path, rng)
    wrong = check_report(folder, expected)
    if kind != "predictions" and path.exists():
        wrong += undetected(folder, {path: before})
    if kind in ("notebook", "predictions"):
        analysis = [COMMANDS["analyze"][0], str(folder), *COMMANDS["analyze"][1:]]
        _fork_workers()
        if main(analysis) != 0:
            wrong.append("the analysis failed")
        a, b = (read_json(place / "analysis.json")["parts"] for place in (source, folder))
        if {k: v["values"] for k, v in a.items()} != {k: v["values"] for k, v in b.items()}:
            wrong.append("the analysis has other numbers")
    return [f"{what}: {sentence}" for sentence in wrong]


def _isolated(tally: Tally, task: Callable[[], list[str]]) -> None:
    """Run a check in a forked process; count a crash as lost, and what it returns as wrong."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        with os.fdopen(writer, "w") as output:
            try:
                output.write("\0".join(f"wrong {sentence}" for sentence in task()))
            except BaseException:
                output.write("lost " + traceback.format_exc())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        content = answer.read()
    _, status = os.waitpid(pid, 0)
    if status:
        tally.note("lost", f"a check crashed with status {status}")
    for line in filter(None, content.split("\0")):
        kind, _, what = line.partition(" ")
        tally.note(kind, what)


# ------------------------------------------------------------------------------- disks and pairs


def full_disks(
    home: Path,
    count: int,
    rng: random.Random,
    command: Sequence[str] = tuple(COMMANDS["train"]),
    ranks: int = 0,
) -> dict[str, Tally]:
    """Let the disk run full while a run trains, then make room and resume it.

    A small file system in memory fills up, if one can be mounted. Otherwise, writes fail as on a
    full disk from a random one on.

    Args:
        home: A folder for the runs.
        count: How many times.
        rng: The source of randomness.
        command: The command line after `gadam`.
        ranks: As for :class:`Program`.
    """
    tally = Tally()
    whole = home / "disk-whole"
    if not finish([*command, "--out", str(whole)], home / "log", tally, ranks=ranks):
        return {"full disk": tally}
    place = home / "disk"
    place.mkdir()
    size = sum(p.stat().st_size for p in whole.rglob("*") if p.is_file())
    for _ in range(count):
        tally.tried += 1
        kilobytes = 4 * max(1, round(rng.uniform(0.1, 1.0) * size / 4096))
        mounted = _mount(place, kilobytes)
        arguments = [*command, "--out", str(place / "runs")]
        if mounted:
            program = Program(arguments, home / "log", ranks=ranks)
        else:
            program = _failing_program(arguments, home / "log", rng.randint(1, 40), ranks)
        code = program.wait(PATIENCE)
        program.clean_up()
        text = (home / "log").read_text(errors="replace")
        # torchrun prints a traceback of its own when a rank fails.
        if code is None or ("src/gadam/" if ranks else "Traceback") in text:
            tally.note("lost", f"on a full disk, train ended with {code}: {text[-800:]}")
        if (place / "runs").exists():
            _check_torn(place / "runs", tally)
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=100m", str(place)], check=True)
        if finish(arguments, home / "log", tally, ranks=ranks):
            compare("train", whole, place / "runs", tally)
        shutil.rmtree(place / "runs", ignore_errors=True)
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
    return {"full disk": tally}


def _mount(place: Path, kilobytes: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _failing_program(arguments: list[str], log: Path, after: int, ranks: int = 0) -> Program:
    """Start a command in which every sync after some fails."""
    original, calls = os.fsync, iter(range(10**9))

    def full(descriptor: int) -> None:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    vars(files.os)["fsync"] = full
    try:
        return Program(arguments, log, ranks=ranks)
    finally:
        vars(files.os)["fsync"] = original


def pairs(home: Path, count: int, rng: random.Random) -> dict[str, Tally]:
    """Start two commands with different recipes in one folder, one shortly after the other.

    Args:
        home: A folder for the runs.
        count: How many times.
        rng: The source of randomness.
    """
    tally = Tally()
    rates = ("0.003", "0.5")
    command = [*COMMANDS["train"], "--set", "epochs=40", "--quiet"]
    lines = {}
    for rate in rates:
        whole = home / f"pair-{rate}"
        if not finish([*command, "--set", f"lr={rate}", "--out", str(whole)], home / "log", tally):
            return {"two processes": tally}
        lines[float(rate)] = read_epochs(whole / "compare-gadam-0" / "epochs.jsonl")
    for i in range(count):
        tally.tried += 1
        # Find the run in use, or wait until it is finished.
        vars(lock)["LOCK_SECONDS"] = rng.choice([0.05, 5.0])
        folder = home / f"pair-{i}"
        programs = []
        for rate in rng.sample(rates, 2):
            arguments = [*command, "--set", f"lr={rate}", "--out", str(folder)]
            programs.append(Program(arguments, home / f"log-{rate}"))
            time.sleep(rng.uniform(0, 0.6))
        codes = [program.wait(PATIENCE) for program in programs]
        text = "".join((home / f"log-{rate}").read_text() for rate in rates)
        if None in codes or "Traceback" in text or 0 not in codes:
            tally.note("lost", f"two processes ended with {codes}: {text[-1500:]}")
            continue
        run = folder / "compare-gadam-0"
        header = RunHeader.from_dict(read_json(run / "run.json"))
        truth = lines[header.recipe.optimizer.lr]
        found = read_epochs(run / "epochs.jsonl")
        if [r.train_loss for r in found] != [r.train_loss for r in truth]:
            tally.note("wrong", f"{header.recipe.optimizer.lr} is not what was trained")
        if codes.count(0) != 1 or check_run(run).problems:
            tally.note("wrong", f"codes {codes}, problems {check_run(run).problems}")
        shutil.rmtree(folder)
    vars(lock)["LOCK_SECONDS"] = 5.0
    return {"two processes": tally}


# ------------------------------------------------------------------------------------------- times


def verify_seconds(home: Path) -> dict[str, float]:
    """Return how long `gadam verify` takes per 100 runs of the size of the committed comparison.

    Args:
        home: A folder for the runs.

    Returns:
        The seconds without and with weights of 2.5 MB per run, and without the start of Python.
    """
    folder = home / "verify"
    for copy in range(3):
        unpack(Path(__file__).parents[2] / "results" / "compare.json", folder / str(copy))
    headers = sorted(folder.rglob("run.json"))
    for path in headers:
        run = path.parent
        write_json(path, {**read_json(path), "format": FORMAT})
        lines = [parse_json(line) for line in (run / "epochs.jsonl").read_text().splitlines()]
        records = [EpochRecord.from_dict(line) for line in lines]
        (run / "epochs.jsonl").write_text(chained(records, path.read_bytes()))
        weights = f"checkpoint-{len(records):06d}-{0:016x}.pt"
        (run / weights).write_bytes(os.urandom(2_500_000))
        names = ("run.json", "epochs.jsonl", "result.json", weights)
        write_manifest(run, {name: FileHash.of((run / name).read_bytes()) for name in names})
    seconds = {}
    for name, weights_too in (("records", False), ("with weights", True)):
        began = time.perf_counter()
        found = list(check_tree(folder, weights=weights_too))
        seconds[name] = round(100 * (time.perf_counter() - began) / len(headers), 3)
        assert not any(isinstance(each, Problem) or each.problems for each in found)
    shutil.rmtree(folder)
    return seconds
