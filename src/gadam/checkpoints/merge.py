"""The weighted mean of checkpoints, computed while it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gadam.checkpoints.errors import CheckpointError, enumerated
from gadam.checkpoints.formats import Checkpoint, Part, Source, TensorInfo

__all__ = ["Merge", "check_match", "statistics_of"]

# Elements to sum at a time, at least. Opening all checkpoints takes longer than summing fewer.
_GROUP = 2**22
_GROUPS = 16  # of the tensors of a file, at most
_SPAN = 2**20  # elements to add at a time: torch converts them to float64 in a copy


@dataclass(frozen=True)
class _Span:
    name: str
    start: int
    stop: int


class Merge(Source):
    r"""The weighted mean :math:`\sum_i w_i \theta_i / \sum_i w_i` of checkpoints.

    Sums are in float64, and the division comes last. So the mean of float32 tensors is exact before
    it is rounded, unless their magnitudes differ by more than :math:`2^{29}`. A group of elements
    is in memory at a time: one sum, and the elements of one checkpoint.

    Args:
        checkpoints: Checkpoints that match, the oldest first.
        weights: Their relative weights. A checkpoint with weight zero is not read.
        dtype: The type of the averaged tensors. None keeps the types of the last checkpoint.
        replaced: Other values for some tensors.
        on_progress: Called with the number of elements done and their total.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        weights: Sequence[float],
        dtype: torch.dtype | None = None,
        replaced: Mapping[str, Tensor] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        used = [(c, w) for c, w in zip(checkpoints, weights) if w]
        self.used = [checkpoint for checkpoint, _ in used]
        self._weights = [weight for _, weight in used]
        self._total = math.fsum(self._weights)
        self.last = self.used[-1]
        self._dtype, self._replaced = dtype, replaced or {}
        self._on_progress, self._done = on_progress, 0
        self._splits = not any(c.reads_whole_tensors for c in self.used)
        # Weights that were not tied in all checkpoints have different means.
        self._aliases = {
            name: known
            for name, known in self.last.aliases.items()
            if all(checkpoint.aliases.get(name) == known for checkpoint in self.used)
        }

    @property
    @override
    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    @override
    def dtype(self, name: str) -> torch.dtype:
        info = self.last.tensors[name]
        return self._dtype if info.is_averaged and self._dtype is not None else info.dtype

    @override
    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        total = sum(info.numel for info in self.last.tensors.values())
        for group in self._groups(names):
            for span, values in self._averaged(group):
                self._done += span.stop - span.start
                yield Part(span.name, span.start, self._cast(values, span.name))
            if self._on_progress is not None:
                self._on_progress(min(self._done, total), total)

    def _cast(self, values: Tensor, name: str) -> Tensor:
        dtype = self.dtype(name)
        cast = values.to(dtype)
        if dtype != self.last.tensors[name].dtype and bool(
            (cast.isinf() & values.isfinite()).any()
        ):
            short = str(dtype).removeprefix("torch.")
            raise CheckpointError(
                f"The average of {name} has values that {short} cannot hold. Use --dtype bfloat16 "
                "or float32."
            )
        return cast

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole result."""
        names = [name for name in self.last.tensors if name not in self.aliases]
        result = {
            name: torch.empty(self.last.tensors[name].shape, dtype=self.dtype(name))
            for name in names
        }
        for part in self.parts(names):
            stop = part.start + part.values.numel()
            result[part.name].view(-1)[part.start : stop] = part.values
        return result | {name: result[known] for name, known in self.aliases.items()}

    def _groups(self, names: Sequence[str]) -> Iterator[list[_Span]]:
        """Divide tensors into groups of parts, in their order."""
        sizes = {name: self.last.tensors[name].numel for name in names}
        limit = max(_GROUP, -(-sum(sizes.values()) // _GROUPS))
        group: list[_Span] = []
        room = limit
        for name, size in sizes.items():
            start = 0
            while start < size or size == 0:
                stop = min(size, start + (min(room, _SPAN) if self._splits else _SPAN))
                group.append(_Span(name, start, stop))
                room -= stop - start
                start = stop
                if room <= 0 and (self._splits or start == size):
                    yield group
                    group, room = [], limit
                if size == 0:
                    break
        if group:
            yield group

    def _averaged(self, group: list[_Span]) -> Iterator[tuple[_Span, Tensor]]:
        infos = self.last.tensors
        values: dict[_Span, Tensor] = {}
        for span in group:
            if span.name in self._replaced:
                flat = self._replaced[span.name].reshape(-1)
                values[span] = flat[span.start : span.stop]
        summed = [s for s in group if s not in values and infos[s.name].is_averaged]
        for span in summed:
            values[span] = torch.zeros(span.stop - span.start, dtype=torch.float64)
        for checkpoint, weight in zip(self.used, self._weights):
            with checkpoint.open() as read:
                for span in summed:
                    values[span].add_(read(span.name, span.start, span.stop), alpha=weight)
                for span in group if checkpoint is self.last else ():
                    if span not in values:
                        values[span] = read(span.name, span.start, span.stop).clone()
        for span in summed:
            values[span].div_(self._total)
            if values[span].isnan().any():
                raise self._not_a_number(span)
        for span in group:
            yield span, values.pop(span)

    def _not_a_number(self, span: _Span) -> CheckpointError:
        for checkpoint in self.used:
            with checkpoint.open() as read:
                if not read(span.name, span.start, span.stop).isfinite().all():
                    return CheckpointError(
                        f"{span.name} in {checkpoint.path} is not finite. Leave this checkpoint "
                        "out."
                    )
        return CheckpointError(f"The average of {span.name} is not finite.")


def statistics_of(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of BatchNorm statistics.

    Args:
        tensors: The tensors of a checkpoint.

    Example:
        >>> info = TensorInfo((2,), torch.float32)
        >>> statistics_of({"bn.running_mean": info, "bn.running_var": info, "bn.weight": info})
        ['bn.running_mean', 'bn.running_var']
    """
    means = {name.removesuffix("mean") for name in tensors if name.endswith("running_mean")}
    pairs = {stem for stem in means if f"{stem}var" in tensors}
    return [name for name in tensors if name.removesuffix("mean").removesuffix("var") in pairs]


def check_match(checkpoints: Sequence[Checkpoint], dtype: torch.dtype | None = None) -> None:
    """Raise an error that names all differences between checkpoints, and what cannot be averaged.

    Args:
        checkpoints: The checkpoints. All must be like the last one.
        dtype: The type of the result. If it is given, floating-point types may differ.

    Raises:
        CheckpointError: They cannot be averaged.
    """
    obstacles = [
        f"{name} in {checkpoint.path} is {info.obstacle}"
        for checkpoint in checkpoints
        for name, info in checkpoint.tensors.items()
        if info.obstacle
    ]
    if obstacles:
        raise CheckpointError(
            f"These tensors cannot be averaged: {enumerated(obstacles)}. Convert them to float32, "
            "float16 or bfloat16 first."
        )
    last = checkpoints[-1]
    if not any(info.is_averaged for info in last.tensors.values()):
        raise CheckpointError(f"{last.path} has no floating-point tensors to average.")
    differences = []
    for checkpoint in checkpoints[:-1]:
        for name, info in last.tensors.items():
            other = checkpoint.tensors.get(name)
            if other is None:
                differences.append(f"{checkpoint.path} lacks {name}")
            elif other.shape != info.shape:
                differences.append(
                    f"{name} has shape {list(other.shape)} in {checkpoint.path} and "
                    f"{list(info.shape)} in {last.path}"
                )
            elif other.dtype != info.dtype and not (
                dtype is not None and other.is_averaged and info.is_averaged
            ):
                types = [str(each.dtype).removeprefix("torch.") for each in (other, info)]
                differences.append(
                    f"{name} is {types[0]} in {checkpoint.path} and {types[1]} in {last.path}"
                )
        differences += [
            f"{last.path} lacks {name}, which {checkpoint.path} has"
            for name in checkpoint.tensors
            if name not in last.tensors
        ]
    if differences:
        hint = " Pass --dtype to average different types." if _only_types(checkpoints) else ""
        raise CheckpointError(f"The checkpoints do not match: {enumerated(differences)}.{hint}")


def _only_types(checkpoints: Sequence[Checkpoint]) -> bool:
    """Return True if checkpoints differ in floating-point types only."""
    shapes = [
        {name: (info.shape, info.is_averaged) for name, info in checkpoint.tensors.items()}
        for checkpoint in checkpoints
    ]
    return all(each == shapes[-1] for each in shapes)
