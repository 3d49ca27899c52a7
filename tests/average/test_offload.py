"""Overlapped offload: the order of events on recorded streams, and equality with plain folding."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

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
    fold.device_module = lambda device: recorder
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
