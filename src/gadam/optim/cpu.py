"""The compiled step on the CPU: finding it, and handing tensors to it.

The kernel is `csrc/step.c`. It takes plain addresses, so everything that keeps it safe is here: what
it may be given, and that it is given nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
from array import array
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import chain
from operator import is_, itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

__all__ = [
    "CachedLaunch",
    "Prepared",
    "counts_steps",
    "describe",
    "is_available",
    "laid_out_alike",
    "supports",
]

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class _Job(ctypes.Structure):
    """Mirrors Job in step.c."""

    _fields_ = (
        ("tensors", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("param", "grad", "average", "state", "numel")),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        *((name, ctypes.c_double) for name in ("partial", "grad_factor", "fold_weight")),
        *(
            (name, ctypes.c_int32)
            for name in ("type", "step_type", "decoupled", "amsgrad", "paper")
        ),
        *((name, ctypes.c_int32) for name in ("fold", "threads", "not_finite")),
    )


@functools.cache
def _library() -> tuple[Any, str]:
    """The kernel, or None, and what there is to say of it."""
    file = Path(__file__).parents[1] / f"_kernel{EXTENSION_SUFFIXES[0]}"
    if not file.exists():
        return None, "not built (no compiler was found when gadam was installed)"
    try:
        library = ctypes.CDLL(str(file))
        library.gadam_open.restype = ctypes.c_char_p
        library.gadam_job_size.restype = ctypes.c_int64
        library.gadam_step.argtypes = [ctypes.POINTER(_Job)]
        if library.gadam_job_size() != ctypes.sizeof(_Job):
            return None, "built from another version of gadam (install it anew)"
        instructions = library.gadam_open().decode()
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded ({error})"
    threads = "OpenMP" if library.gadam_has_openmp() else "one thread"
    return library, f"{instructions}, {threads}"


# OpenMP's threads do not survive a fork: the kernel notes its process when it is opened, so that must
# be before any fork; and a forked worker that opens it first must not start threads at all.
_FORKED = multiprocessing.parent_process() is not None and (
    multiprocessing.get_start_method(allow_none=True) == "fork"
)
_library()


def is_available() -> bool:
    """Whether the kernel was built and can be loaded."""
    return _library()[0] is not None


def describe() -> str:
    """What the kernel runs on here, or why there is none."""
    return _library()[1]


def supports(params: list[Tensor]) -> bool:
    """Whether the kernel knows these tensors' place and type."""
    return is_available() and all(p.is_cpu and p.dtype in _TYPES and _is_plain(p) for p in params)


def _is_plain(tensor: Tensor) -> bool:
    """Whether what stands in memory is the tensor: no subclass, no lazy negative, no lazy zero."""
    return type(tensor) in _PLAIN and not tensor.is_neg() and not tensor._is_zerotensor()


_PLAIN = {Tensor, torch.nn.Parameter}


def laid_out_alike(p: Tensor, others: tuple[Tensor, ...]) -> bool:
    """Whether tensors of one type and device can be walked through side by side, without gaps."""
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


def counts_steps(step: Tensor) -> bool:
    """Whether the kernel can count steps in this tensor."""
    return step.is_cpu and step.dtype in (torch.float32, torch.float64) and _is_plain(step)


def _addresses(tensors: Iterable[Tensor]) -> array[int]:
    return array("Q", map(Tensor.data_ptr, tensors))


class Prepared:
    """Tensors of one type, laid out alike parameter by parameter, whose addresses are at hand.

    Args:
        params: the parameters
        states: the optimiser's state of each
        names: of the tensors in it that the kernel needs: the moments, and last the step count
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

    def fit_averages(self, averages: list[Tensor]) -> bool:
        """Whether the kernel can take the parameters into these: float64 for float64, else float32."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return all(
            average.dtype == dtype
            and average.shape == p.shape
            and average.stride() == p.stride()
            and average.is_cpu
            and _is_plain(average)
            for average, p in zip(averages, self.params)
        )

    def step(
        self,
        grads: list[Tensor],
        averages: list[Tensor] | None,
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
    ) -> bool:
        """One step. Gives whether all parameters are finite after it.

        The arguments are those of the reference, and further: ``averages`` to take the parameters
        into, as they are *before* the step, with ``fold_weight``; and by how much the gradients are too
        large, ``grad_scale``.
        """
        gradient_addresses = _addresses(grads)
        average_addresses = _addresses(averages or [])
        for addresses in (self.pointers[: len(grads)], gradient_addresses, average_addresses):
            if 0 in addresses and any(n and not a for n, a in zip(self.numel, addresses)):
                raise RuntimeError("the fused step was given a tensor without memory")
        first = self.pointers.buffer_info()[0]
        job = _Job(
            len(self.params),
            first,
            gradient_addresses.buffer_info()[0],
            average_addresses.buffer_info()[0] if averages is not None else None,
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
            _TYPES[self.dtype],
            _TYPES[self.step_dtype],
            decoupled_weight_decay,
            amsgrad,
            form == "paper",
            averages is not None,
            1 if _FORKED else torch.get_num_threads(),
            0,
        )
        if _library()[0].gadam_step(ctypes.byref(job)) != 0:
            raise MemoryError("the fused step could not allocate its tables")
        # The tensors were changed behind autograd's back: tell it.
        torch.autograd.graph.increment_version([*self.params, *(averages or [])])
        return not job.not_finite


class CachedLaunch(Prepared):
    """What one step has found out, kept for the next.

    For many small tensors finding and checking the addresses takes longer than the step. So they are
    kept; but an address that no longer holds is another's memory, and everything is looked at again
    each time, by the function of torch that guards a compiled graph's arguments where there are many
    things to look at: type, device, dtype, size, strides, laziness.

    Args:
        params, states, names: as of :class:`Prepared`
        grads: of the parameters; all tensors such as the kernel can serve
    """

    def __init__(
        self,
        params: list[Tensor],
        states: list[dict[str, Tensor]],
        names: tuple[str, ...],
        grads: list[Tensor],
    ) -> None:
        super().__init__(params, states, names)
        self._alike = _guard([*params, *grads])
        self._averages_alike: Callable[..., bool] | None = None
        # As long as these live, nobody else is given their memory: where the address of a moment is
        # still the same, so is its size.
        self._alive = [state[name].detach() for state in states for name in names]

    def is_valid(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        state: Mapping[Tensor, dict[str, Tensor]],
    ) -> bool:
        """Whether these are the parameters and states, and all tensors are where and what they were."""
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        # A tensor's hash is slow; mostly the states stand in the parameters' order.
        in_order = len(state) == len(params) and all(map(is_, state, params))
        states = state.values() if in_order else map(state.get, params)
        try:
            return (
                all(map(is_, states, self.states))
                and self._alike(*params, *grads)
                and self._pointers() == self.pointers
            )
        except KeyError:
            return False

    def fit_averages(self, averages: list[Tensor]) -> bool:
        """Whether the kernel can take the parameters into these: float64 for float64, else float32."""
        if self._averages_alike is None or not self._averages_alike(*averages):
            if not super().fit_averages(averages):
                return False
            self._averages_alike = _guard(averages)
        return True


def _guard(tensors: list[Tensor]) -> Callable[..., bool]:
    """A function that says whether other tensors are like these in all but address and values."""
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check
