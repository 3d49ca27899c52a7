"""Overlapped offload: the order of events on recorded streams, and equality with plain folding."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import gadam
from contract import parameters, train
from gadam.average.offload import OverlappedFold


class Recorder:
    """Streams and events that note what was asked of them.

    The copy to the host is never done until :attr:`done` is set, so a test can look at the time in
    which a device is still busy.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.done = threading.Event()
        self.timeout = False
        recorder = self

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                recorder.log.append(f"{self.name} waits for {event.name}")

        class Event:
            names = ("taken", "copied")
            count = 0

            def __init__(self) -> None:
                self.name = Event.names[Event.count % 2]
                Event.count += 1

            def record(self, stream: Stream) -> None:
                recorder.log.append(f"{self.name} on {stream.name}")

            def synchronize(self) -> None:
                recorder.timeout = not recorder.done.wait(10)
                recorder.log.append(f"thread waits for {self.name}")

        self.Stream, self.Event = Stream, Event

    def module(self, device: torch.device) -> Any:
        return self

    def current_stream(self, device: torch.device) -> Any:
        return self.Stream("main")

    def stream(self, stream: Any) -> Any:
        recorder = self

        class Context:
            def __enter__(self) -> None:
                recorder.log.append(f"enter {stream.name}")

            def __exit__(self, *_: object) -> None:
                recorder.log.append(f"leave {stream.name}")

        return Context()


def recorded() -> tuple[OverlappedFold, Recorder]:
    fold, recorder = OverlappedFold(), Recorder()
    fold.device_module = recorder.module
    return fold, recorder


def test_the_copy_waits_for_the_weights_and_the_fold_for_the_copy():
    fold, recorder = recorded()
    recorder.done.set()
    fold.start([torch.zeros(3)], [torch.ones(3)], 1.0)
    fold.wait()
    assert recorder.log == [
        "taken on main",
        "side waits for taken",
        "enter side",
        "leave side",
        "copied on side",
        "thread waits for copied",
    ]


def test_start_returns_while_the_copy_is_under_way_and_later_edits_do_not_enter():
    fold, recorder = recorded()
    average, weights = torch.zeros(3), torch.ones(3)
    fold.start([average], [weights], 0.5)
    weights.fill_(100.0)  # the next training step
    assert torch.equal(average, torch.zeros(3))
    recorder.done.set()
    fold.wait()
    assert not recorder.timeout
    assert torch.equal(average, torch.full((3,), 0.5))


def test_the_next_sample_waits_for_the_previous_one():
    """The pinned buffers are used again."""
    fold, recorder = recorded()
    average, weights = torch.zeros(3), torch.ones(3)
    fold.start([average], [weights], 1.0)
    threading.Timer(0.05, recorder.done.set).start()
    fold.start([average], [weights * 3], 0.5)
    fold.wait()
    first_fold = recorder.log.index("thread waits for copied")
    assert recorder.log[first_fold + 1 :].count("taken on main") == 1
    assert torch.equal(average, torch.full((3,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_folding_equals_lerp(dtype):
    fold = OverlappedFold()
    averages = [torch.zeros(5, 3), torch.zeros(7)]
    expected = [a.clone() for a in averages]
    for n in range(1, 6):
        samples = [torch.randn(a.shape).to(dtype) for a in averages]
        weight: float | torch.Tensor = 1 / n if n % 2 else torch.tensor(1 / n, dtype=torch.float64)
        fold.start(averages, samples, weight)
        fold.wait()
        for e, s in zip(expected, samples):
            e.copy_(s) if n == 1 else e.lerp_(s.to(e.dtype), 1 / n)
    assert all(torch.equal(a, e) for a, e in zip(averages, expected))


def test_a_weight_of_zero_keeps_a_sample_out_even_if_it_is_not_finite():
    """The host does not know yet if the sample is finite: only the device does."""
    fold, average = OverlappedFold(), torch.ones(2)
    fold.start([average], [torch.tensor([float("nan"), 1.0])], torch.tensor(0.0))
    fold.wait()
    assert torch.equal(average, torch.ones(2))


def test_buffers_follow_parameters_that_change_shape():
    fold, average = OverlappedFold(), torch.zeros(4)
    fold.start([torch.zeros(2)], [torch.ones(2)], 1.0)
    fold.start([average], [torch.ones(4)], 1.0)
    fold.wait()
    assert torch.equal(average, torch.ones(4))


def test_errors_of_the_thread_are_raised_once_where_the_average_is_read():
    fold = OverlappedFold()
    fold.start([torch.zeros(2)], [torch.ones(3)], 0.5)
    with pytest.raises(RuntimeError, match="size"):
        fold.wait()
    fold.wait()


def test_a_copy_waits_and_has_its_own_thread():
    fold, recorder = recorded()
    average = torch.zeros(3)
    fold.start([average], [torch.ones(3)], 1.0)
    threading.Timer(0.05, recorder.done.set).start()
    other = copy.deepcopy(fold)
    assert torch.equal(average, torch.ones(3))
    assert other._thread is None
    assert isinstance(pickle.loads(pickle.dumps(fold)), OverlappedFold)


# --------------------------------------------------------------------------------- in an optimizer

PLAN = gadam.Averaging(start=2, device="cpu")
WEIGHTINGS = [gadam.Mean(), gadam.EMA(0.9), gadam.Window(3)]


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=repr)
@pytest.mark.parametrize("kind", ["Gadam", "foreach", "SGD"])
def test_an_overlapped_average_equals_a_plain_one(kind, weighting):
    values = []
    for overlap in (False, True):
        torch.manual_seed(0)
        params = parameters()
        plan = replace(PLAN, overlap=overlap, weighting=weighting)
        average = attached(kind, params, plan)
        iterates = []
        for step in range(1, 8):
            train(average.optimizer, params, 1, first=step)
            iterates.append([p.detach().clone() for p in params])
            with torch.no_grad():
                for p in params:
                    p.mul_(0.9)  # an edit between steps enters neither
        assert average.count == 6
        with average.applied():
            values.append([p.detach().clone() for p in params])
    for plain, overlapped in zip(*values):
        torch.testing.assert_close(overlapped, plain, rtol=1e-6, atol=1e-7)


def attached(kind: str, params: list[Any], plan: gadam.Averaging) -> gadam.IterateAverage:
    if kind == "SGD":
        return gadam.IterateAverage(torch.optim.SGD(params, lr=0.1), plan)
    return gadam.Gadam(params, average=plan, foreach=True if kind == "foreach" else None).average


@pytest.mark.parametrize("kind", ["Gadam", "foreach", "SGD"])
def test_every_reader_waits_for_the_last_sample(kind):
    readers = {
        "count": lambda average: average.count,
        "state_dict": lambda average: average.state_dict(),
        "optimizer.state_dict": lambda average: average.optimizer.state_dict(),
        "applied": lambda average: average.applied().__enter__(),
        "copy_to": lambda average: average.copy_to(),
        "health": lambda average: average.health(),
        "deepcopy": lambda average: copy.deepcopy(average),
    }
    for name, read in readers.items():
        params = parameters()
        average = attached(kind, params, replace(PLAN, start=1, overlap=True))
        recorder = Recorder()
        assert average._state.overlap is not None
        average._state.overlap.device_module = recorder.module
        train(average.optimizer, params, 1)  # returns although the copy is not done
        assert "thread waits for copied" not in recorder.log, name
        threading.Timer(0.02, recorder.done.set).start()
        read(average)
        assert average._state.overlap._fold is None, name
        assert "thread waits for copied" in recorder.log, name
        assert not recorder.timeout


def test_a_sample_that_is_not_finite_does_not_enter_an_overlapped_average():
    params = parameters()
    average = attached("foreach", params, replace(PLAN, start=1, overlap=True))
    train(average.optimizer, params, 2)
    before = [t.clone() for t in average.state_dict()["state"][0].values()]
    with torch.no_grad():
        params[0][0] = float("nan")
    train(average.optimizer, params, 1, first=3)
    assert (average.count, average.skipped) == (2, 1)
    after = list(average.state_dict()["state"][0].values())
    assert all(torch.equal(a, b) for a, b in zip(after, before))


def test_the_first_sample_may_be_taken_in_inference_mode():
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.1)
    average = gadam.IterateAverage(
        sgd, gadam.Averaging(start=1, every=None, device="cpu", overlap=True)
    )
    train(sgd, params, 1)
    with torch.inference_mode():
        average.update()
    train(sgd, params, 1, first=2)
    average.update()
    assert average.count == 2
