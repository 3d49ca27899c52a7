"""An average on the host that does not stall the device: ``Averaging(overlap=True)``.

A sample goes through four stages. Only the first one is work of the training loop.

1. The device copies the weights, on the stream that trains. So a later edit of the weights cannot
   enter the sample.
2. A second stream copies them to pinned host memory while training continues.
3. A thread waits for that copy, and folds it into the average on the host.
4. Whoever reads the average waits for the thread.

The next sample waits for the previous one. So sampling stalls only if samples come faster than the
host can fold them: choose ``every`` accordingly. The cost is a copy of the weights on the device
until the second stream is done, and a pinned copy of them on the host.

The logic is tested with streams that do nothing and with recorded ones. It has not been timed on an
accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from gadam import _torch

__all__ = ["OverlappedFold", "record_events"]


class OverlappedFold:
    """Fold samples into averages on the host while the device continues.

    Attributes:
        device_module: Returns the module with the streams and events of a device.
    """

    device_module: Callable[[torch.device], Any]

    def __init__(self) -> None:
        self.device_module = _device_module
        self._pinned: dict[int, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._fold: Future[None] | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, averages: list[Tensor], samples: list[Tensor], weight: float | Tensor) -> None:
        """Start to fold a sample in. The sample is the weights at the time of this call.

        Args:
            averages: The averages on the host, as real tensors.
            samples: The weights, on any device.
            weight: The weight of the sample. A tensor on a device is read by the thread. A weight
                of 0 leaves the averages alone, even if the sample is not finite.
        """
        self.wait()
        sources = [*samples, weight] if isinstance(weight, Tensor) else samples
        copies: list[Tensor] = [torch.empty(0)] * len(sources)
        events = []
        for device in dict.fromkeys(source.device for source in sources):
            module = self.device_module(device)
            asynchronous = module is not torch.cpu and device.type != "cpu"
            stream = self._stream(module, device)
            mine = [i for i, source in enumerate(sources) if source.device == device]
            snapshots = [sources[i].detach().clone() for i in mine]
            taken, copied = module.Event(), module.Event()
            taken.record(module.current_stream(device))
            _torch.wait_event(stream, taken)
            with module.stream(stream):
                for i, snapshot in zip(mine, snapshots):
                    copies[i] = self._buffer(i, snapshot).copy_(snapshot, non_blocking=asynchronous)
                    if asynchronous:
                        snapshot.record_stream(stream)  # keep its memory until the copy is done
            copied.record(stream)
            events.append(copied)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="gadam-average")
        host_weight = copies.pop() if isinstance(weight, Tensor) else weight
        self._fold = self._thread.submit(_fold, events, averages, copies, host_weight)

    def wait(self) -> None:
        """Wait until the last sample is in the average. Errors of the thread are raised here."""
        if self._fold is not None:
            fold, self._fold = self._fold, None
            fold.result()

    def _stream(self, module: Any, device: torch.device) -> Any:
        if device not in self._streams:
            plain = device.type == "cpu" or module is torch.cpu
            self._streams[device] = module.Stream() if plain else module.Stream(device=device)
        return self._streams[device]

    def _buffer(self, index: int, like: Tensor) -> Tensor:
        buffer = self._pinned.get(index)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            pin = like.device.type != "cpu" and torch.accelerator.is_available()
            buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pin)
            self._pinned[index] = buffer
        return buffer

    def __reduce__(self) -> tuple[type[OverlappedFold], tuple[()]]:
        self.wait()
        return OverlappedFold, ()  # a copy has its own buffers, streams and thread


@torch.no_grad()
def _fold(
    events: list[Any], averages: list[Tensor], samples: list[Tensor], weight: float | Tensor
) -> None:
    for event in events:
        event.synchronize()
    weight = float(weight)
    for average, sample in zip(averages, samples):
        if weight == 1.0:
            average.copy_(sample)
        elif weight:
            average.lerp_(sample.to(average.dtype), weight)


def record_events(tensors: list[Tensor]) -> list[Any]:
    """Return events that occur when the work on these tensors so far is done.

    Args:
        tensors: Tensors on any devices.
    """
    events = []
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        module = _device_module(device)
        events.append(module.Event())
        events[-1].record(module.current_stream(device))
    return events


def _device_module(device: torch.device) -> Any:
    """Return a device's streams and events, or those of the CPU, which do nothing."""
    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") and hasattr(module, "Event") else torch.cpu
