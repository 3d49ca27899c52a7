"""The compiled step on the CPU: loading the kernel and launching it.

The kernel is `csrc/step.c`. It takes plain addresses, so this module is responsible for memory
safety: it checks which tensors the kernel supports, and passes no others.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import is_, itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gadam import _torch

__all__ = [
    "CachedLaunch",
    "Launch",
    "can_count_steps",
    "describe",
    "is_available",
    "same_layout",
    "supports",
]

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class _Job(ctypes.Structure):
    """Mirror of Job in step.c."""

    _fields_ = (
        ("tensors", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("param", "grad", "average", "point")),
        *((name, ctypes.c_void_p) for name in ("state", "numel")),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        *((name, ctypes.c_double) for name in ("partial", "grad_factor", "fold_weight")),
        ("interpolation", ctypes.c_double),
        *(
            (name, ctypes.c_int32)
            for name in ("type", "step_type", "decoupled", "amsgrad", "paper")
        ),
        *((name, ctypes.c_int32) for name in ("fold", "threads", "not_finite")),
    )


@functools.cache
def _library() -> tuple[Any, str]:
    """Return the kernel, or None, and its description."""
    file = Path(__file__).parents[1] / ("_kernel.dll" if os.name == "nt" else "_kernel.so")
    if not file.exists():
        return None, "not built (no compiler was found when gadam was installed)"
    openmp = _torch.openmp_parallel()
    try:
        library = ctypes.CDLL(str(file))
        library.gadam_open.argtypes = [ctypes.c_void_p]
        library.gadam_open.restype = ctypes.c_char_p
        library.gadam_job_size.restype = ctypes.c_int64
        library.gadam_step.argtypes = [ctypes.POINTER(_Job)]
        if library.gadam_job_size() != ctypes.sizeof(_Job):
            return None, "built from another version of gadam (reinstall gadam)"
        instructions = library.gadam_open(openmp).decode()
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded ({error})"
    return library, f"{instructions}, {'one thread' if openmp is None else 'OpenMP'}"


# OpenMP's threads do not survive a fork. The kernel records its process when it is opened, so open
# it before any fork. A forked worker that opens it first must not start threads at all.
_FORKED = multiprocessing.parent_process() is not None and (
    multiprocessing.get_start_method(allow_none=True) == "fork"
)
_library()


def is_available() -> bool:
    """Return True if the kernel was built and can be loaded."""
    return _library()[0] is not None


def describe() -> str:
    """Return the kernel's instruction set and threading, or why there is no kernel."""
    return _library()[1]


def supports(params: list[Tensor]) -> bool:
    """Return True if the kernel supports the device and dtype of these tensors.

    Args:
        params: The tensors.
    """
    return is_available() and all(p.is_cpu and p.dtype in _TYPES and _is_plain(p) for p in params)


def _is_plain(tensor: Tensor) -> bool:
    """Return True if memory holds the tensor's values: no subclass, no lazy negation or zeros."""
    return type(tensor) in _PLAIN and not tensor.is_neg() and not _torch.is_zero_tensor(tensor)


_PLAIN = {Tensor, torch.nn.Parameter}


def same_layout(p: Tensor, others: tuple[Tensor, ...]) -> bool:
    """Return True if a linear pass over memory visits matching elements, without gaps.

    Args:
        p: A tensor.
        others: The tensors to compare with it. They must also match in dtype and device.
    """
    stride = p.stride()
    dense = (
        p.is_contiguous()
        or p.is_contiguous(memory_format=torch.channels_last)
        or torch.empty_like(p).stride() == stride
    )
    return dense and all(
        other.shape == p.shape
        and other.stride() == stride
        and other.dtype == p.dtype
        and other.device == p.device
        and _is_plain(other)
        for other in others
    )


def can_count_steps(step: Tensor) -> bool:
    """Return True if the kernel can increment this step count.

    Args:
        step: The step count of a parameter.
    """
    return step.is_cpu and step.dtype in (torch.float32, torch.float64) and _is_plain(step)


def _addresses(tensors: Iterable[Tensor]) -> array[int]:
    return array("Q", map(Tensor.data_ptr, tensors))


class Launch:
    """The arguments of a kernel launch, with the addresses of all tensors.

    Args:
        params: The parameters. All have one dtype and the layout of their moments.
        states: The optimizer's state of each.
        names: The keys of the state that the kernel needs: the moments, then the step count.
    """

    def __init__(
        self, params: list[Tensor], states: list[dict[str, Tensor]], names: tuple[str, ...]
    ) -> None:
        self.params, self.states, self.names = params, states, names
        self._row = itemgetter(*names)
        self.pointers = self._pointers()
        self.numel = array("q", map(Tensor.numel, params))
        self.dtype, self.step_dtype = params[0].dtype, states[0]["step"].dtype

    def _pointers(self) -> array[int]:
        return _addresses(chain(self.params, chain.from_iterable(map(self._row, self.states))))

    def supports_averages(self, averages: list[Tensor]) -> bool:
        """Return True if the kernel can fold the parameters into these averages.

        The kernel supports float64 averages of float64 parameters, and float32 averages of others.

        Args:
            averages: The averages, in the parameters' order.
        """
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return all(
            average.dtype == dtype
            and average.shape == p.shape
            and average.stride() == p.stride()
            and average.is_cpu
            and _is_plain(average)
            for average, p in zip(averages, self.params)
        )

    def supports_iterates(self, iterates: list[Tensor]) -> bool:
        """Return True if the kernel can step from these iterates instead of the parameters.

        Args:
            iterates: The iterates, in the parameters' order.
        """
        return all(same_layout(p, (iterate,)) for p, iterate in zip(self.params, iterates))

    def step(
        self,
        grads: list[Tensor],
        averages: list[Tensor] | None,
        iterates: list[Tensor] | None = None,
        *,
        beta1: float,
        beta2: float,
        lr: float,
        weight_decay: float,
        decoupled_weight_decay: bool,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        partial: float,
        form: str,
        grad_scale: float = 1.0,
        fold_weight: float = 0.0,
        interpolation: float = 0.0,
    ) -> bool:
        """Perform one step.

        Args:
            grads: The gradients.
            averages: The averages to fold the parameters into, as they are *after* the step.
                Parameters that are not finite are not folded in.
            iterates: Where to step from, instead of the parameters. These become points between the
                new iterates and their averages. Needs averages.
            beta1: The decay rate of the first moments.
            beta2: The decay rate of the second moments.
            lr: The learning rate.
            weight_decay: The weight decay.
            decoupled_weight_decay: Decay the weights instead of adding to the gradients.
            eps: The term that keeps the denominator away from zero.
            amsgrad: Use the running maxima of the second moments.
            maximize: Maximize the objective.
            partial: The exponent p.
            form: The form of the update.
            grad_scale: The factor that the gradients still contain.
            fold_weight: The weight of the parameters in their averages.
            interpolation: Where the points are: 0 at the iterates, 1 at the averages.

        Returns:
            True if all parameters, or iterates, are finite after the step.
        """
        gradient_addresses = _addresses(grads)
        average_addresses = _addresses(averages or [])
        iterate_addresses = _addresses(iterates or [])
        checked = (gradient_addresses, average_addresses, iterate_addresses)
        for addresses in (self.pointers[: len(grads)], *checked):
            if 0 in addresses and any(n and not a for n, a in zip(self.numel, addresses)):
                raise RuntimeError("The fused step received a tensor without memory.")
        first = self.pointers.buffer_info()[0]
        job = _Job(
            len(self.params),
            first if iterates is None else iterate_addresses.buffer_info()[0],
            gradient_addresses.buffer_info()[0],
            average_addresses.buffer_info()[0] if averages is not None else None,
            first,
            first + len(self.params) * self.pointers.itemsize,
            self.numel.buffer_info()[0],
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            partial,
            (-1.0 if maximize else 1.0) / grad_scale,
            fold_weight,
            interpolation,
            _TYPES[self.dtype],
            _TYPES[self.step_dtype],
            decoupled_weight_decay,
            amsgrad,
            form == "paper",
            0 if averages is None else 1 if iterates is None else 2,
            1 if _FORKED else torch.get_num_threads(),
            0,
        )
        if _library()[0].gadam_step(ctypes.byref(job)) != 0:
            raise MemoryError("The fused step could not allocate its tables.")
        # Autograd did not see these writes.
        written = [*self.params, *(averages or []), *(iterates or [])]
        torch.autograd.graph.increment_version(written)
        return not job.not_finite


class CachedLaunch(Launch):
    """A launch that the next step can reuse.

    For many small tensors, collecting and checking addresses takes longer than the step itself, so
    they are cached. A stale address would point to foreign memory. So every step checks all tensors
    again, with the fast check that torch uses for the arguments of a compiled graph: type, device,
    dtype, sizes, strides, laziness.

    Args:
        params: The parameters.
        states: The optimizer's state of each.
        names: The keys of the state that the kernel needs: the moments, then the step count.
        grads: The gradients. The kernel must support all of these tensors.
    """

    def __init__(
        self,
        params: list[Tensor],
        states: list[dict[str, Tensor]],
        names: tuple[str, ...],
        grads: list[Tensor],
    ) -> None:
        super().__init__(params, states, names)
        self._matches = _torch.tensor_check([*params, *grads])
        self._averages_match: Callable[..., bool] | None = None
        self._iterates_match: Callable[..., bool] | None = None
        # While these references exist, the memory is not reused: a moment with the same address has
        # the same size.
        self._alive = [state[name].detach() for state in states for name in names]

    def is_valid(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        state: Mapping[Tensor, dict[str, Tensor]],
    ) -> bool:
        """Return True if the cached addresses are still correct.

        Args:
            params: The parameters of the step.
            grads: Their gradients.
            state: The optimizer's state.
        """
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        # Hashing tensors is slow, and the states are usually in the parameters' order.
        in_order = len(state) == len(params) and all(map(is_, state, params))
        states = state.values() if in_order else map(state.get, params)
        try:
            return (
                all(map(is_, states, self.states))
                and self._matches(*params, *grads)
                and self._pointers() == self.pointers
            )
        except KeyError:
            return False

    def supports_averages(self, averages: list[Tensor]) -> bool:
        """Return True if the kernel can fold the parameters into these averages.

        The kernel supports float64 averages of float64 parameters, and float32 averages of others.

        Args:
            averages: The averages, in the parameters' order.
        """
        if self._averages_match is None or not self._averages_match(*averages):
            if not super().supports_averages(averages):
                return False
            self._averages_match = _torch.tensor_check(averages)
        return True

    def supports_iterates(self, iterates: list[Tensor]) -> bool:
        """Return True if the kernel can step from these iterates instead of the parameters.

        Args:
            iterates: The iterates, in the parameters' order.
        """
        if self._iterates_match is None or not self._iterates_match(*iterates):
            if not super().supports_iterates(iterates):
                return False
            self._iterates_match = _torch.tensor_check(iterates)
        return True
