"""Curvature of a loss over a data set, as products of its Hessian with vectors.

The loss is any mean over examples, the data any loader; products are exact over all of it, batch by batch, so that
nothing larger than a few copies of the parameters is ever kept. Dropout is off. BatchNorm is either as in evaluation, or
as in training (statistics of each batch, through which derivatives go); its running statistics are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["Curvature", "Loss"]

Batch = Any
Loss = Callable[[nn.Module, Batch], tuple[Tensor, int]]
"""The mean loss of a batch, and of how many examples it is."""
_Slopes = tuple[list[tuple[Tensor, int]], int]


def classification(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Cross-entropy of (input, label) batches: the loss if none is said."""
    x, y = batch
    return nn.functional.cross_entropy(model(x), y), len(y)


class Curvature:
    """The Hessian of the mean loss, or its generalised Gauss-Newton matrix, at the model's present weights.

    Args:
        model: whose parameters; those without requires_grad are held fixed
        batches: the data, gone through at each product: a list, or a loader that gives the same examples each time
        loss: gives a batch's mean loss and how many examples it is of; cross-entropy of (input, label) if not said
        kind: "hessian", or "ggn": JᵀHJ with J the Jacobian of the network's outputs and H the Hessian of the loss with
            respect to them
        batchnorm: "eval", with running statistics, or "train", with each batch's own
        method: how a Hessian product is taken: "reverse" (double backward) or "forward" (forward over reverse)
        graph_memory: bytes that may be spent on what the gradients were computed from, to be used again in the next
            product with the Hessian, which is a third faster. Data that need more, as estimated from the first batch,
            are gone through anew each time. 0 keeps nothing

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 2)
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> hessian = Curvature(model, data)
        >>> v = torch.ones(hessian.dimension)
        >>> bool(v @ hessian @ v >= 0)  # logistic regression is convex
        True
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        loss: Loss = classification,
        *,
        kind: Literal["hessian", "ggn"] = "hessian",
        batchnorm: Literal["eval", "train"] = "eval",
        method: Literal["reverse", "forward"] = "reverse",
        graph_memory: int = 2**30,
    ) -> None:
        if kind not in ("hessian", "ggn"):
            raise ValueError(f"kind is hessian or ggn, not {kind!r}")
        if batchnorm not in ("eval", "train"):
            raise ValueError(f"batchnorm is eval or train, not {batchnorm!r}")
        if method not in ("reverse", "forward"):
            raise ValueError(f"method is reverse or forward, not {method!r}")
        if isinstance(batches, Iterator):
            raise ValueError("batches must be a list or a loader: they are gone through many times")
        self.model, self.batches, self.loss = model, batches, loss
        self.kind, self.batchnorm, self.method = kind, batchnorm, method
        self.graph_memory = graph_memory if (kind, method) == ("hessian", "reverse") else 0
        self._graphs: list[_Slopes] = []
        self._kept_at: list[tuple[int, int]] = []  # the state of the tensors that the graphs are of
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.params = [p for p in model.parameters() if p.requires_grad]
        if not self.params:
            raise ValueError("the model has no parameters that learn")

    @property
    def dimension(self) -> int:
        """P, how many parameters there are."""
        return sum(p.numel() for p in self.params)

    # ------------------------------------------------------------------------------------ flat vectors

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the parameters' shapes as one vector."""
        return torch.cat([t.reshape(-1) for t in tensors])

    def shaped(self, vector: Tensor) -> list[Tensor]:
        """A vector as tensors of the parameters' shapes."""
        if vector.shape != (self.dimension,):
            raise ValueError(
                f"a vector of {self.dimension} numbers is wanted, not {tuple(vector.shape)}"
            )
        sizes = [p.numel() for p in self.params]
        return [v.to(p).view_as(p) for v, p in zip(vector.split(sizes), self.params)]

    # --------------------------------------------------------------------------------------- products

    def __matmul__(self, vector: Tensor) -> Tensor:
        """The product with a vector, over all of the data."""
        shaped = self.shaped(vector)
        if self.graph_memory and self._keep_graphs():
            along = partial(self._along, keep=True)
            return self.flat(self._over_the_data(shaped, self._graphs, along))
        return self.flat(self._over_the_data(shaped, self.batches, self._product))

    def _keep_graphs(self) -> bool:
        """Whether there are graphs of all of the data, at the present weights; if there is room they are made."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        state = [(t.data_ptr(), t._version) for t in tensors]
        if self._graphs and state == self._kept_at:
            return True
        self._graphs = []  # before others are made: there may not be room for both
        graphs: list[_Slopes] = []
        needed = first = 0.0
        with self.ready():
            for batch in self.batches:
                first = first or self._graph_bytes(batch)
                # How large a batch is its loss says: this one is taken to be as large as the one before it.
                share = graphs[-1][1] / graphs[0][1] if graphs else 1.0
                needed += first * share
                if needed > self.graph_memory:
                    self.graph_memory = 0  # they will not fit the next time either
                    return False
                graphs.append(self._slopes(batch))
        self._graphs, self._kept_at = graphs, state
        return bool(graphs)

    def _graph_bytes(self, batch: Batch) -> float:
        """What is kept for a batch: the forward pass's share is counted, backward's graph is about twice as large."""
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        seen: dict[int, int] = {}

        def count(t: Tensor) -> None:
            if t.untyped_storage().data_ptr() not in own:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()

        with torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
            self.loss(self.model, batch)
        return 3.0 * sum(seen.values())

    def __rmatmul__(self, vector: Tensor) -> Tensor:
        return self @ vector  # it is symmetric

    def gradient(self) -> Tensor:
        """Of the mean loss over all of the data."""
        return self.flat(self._over_the_data([], self.batches, self._gradient))

    def batch_gradients(self) -> Iterator[tuple[Tensor, int]]:
        """The gradient of each batch's mean loss, and of how many examples it is."""
        with self.ready():
            for batch in self.batches:
                found, size = self._gradient(batch, [])
                yield self.flat(found), size

    def mean_loss(self) -> float:
        """Over all of the data."""
        with self.ready(), torch.no_grad():
            pairs = [self.loss(self.model, batch) for batch in self.batches]
        total = sum(size for _, size in pairs)
        if not total:
            raise ValueError("there is no data to take the loss of")
        return sum(float(loss) * size for loss, size in pairs) / total

    def _over_the_data(
        self,
        vector: list[Tensor],
        batches: Iterable[Any],
        product: Callable[[Any, list[Tensor]], tuple[Sequence[Tensor], int]],
    ) -> list[Tensor]:
        # In double precision: a sum over many batches must not depend on how many they are.
        total = [torch.zeros_like(p, dtype=torch.float64) for p in self.params]
        count = 0
        with self.ready():
            for batch in batches:
                found, size = product(batch, vector)
                for t, f in zip(total, found):
                    t.add_(f.detach(), alpha=size)
                count += size
        if not count:
            raise ValueError("there is no data to take the curvature of")
        return [
            (t / count).to(torch.promote_types(p.dtype, torch.float32))
            for t, p in zip(total, self.params)
        ]

    def _gradient(self, batch: Batch, _: list[Tensor]) -> tuple[Sequence[Tensor], int]:
        loss, size = self.loss(self.model, batch)
        return _grad(loss, self.params), size

    def _product(self, batch: Batch, vector: list[Tensor]) -> tuple[Sequence[Tensor], int]:
        if self.kind == "ggn":
            return self._gauss_newton(batch, vector)
        if self.method == "forward":
            return self._forward_over_reverse(batch, vector)
        return self._along(self._slopes(batch), vector)

    def _slopes(self, batch: Batch) -> _Slopes:
        """The gradients that depend on the parameters, with graphs, by parameter; and how many examples they are of."""
        loss, size = self.loss(self.model, batch)
        found = torch.autograd.grad(loss, self.params, create_graph=True, allow_unused=True)
        slopes = [(g, i) for i, g in enumerate(found) if g is not None and g.requires_grad]
        return slopes, size

    def _along(
        self, slopes: _Slopes, vector: list[Tensor], keep: bool = False
    ) -> tuple[Sequence[Tensor], int]:
        gradients, size = slopes
        if not gradients:  # a linear loss
            return [torch.zeros_like(p) for p in self.params], size
        weights = [vector[i] for _, i in gradients]
        products = _grad([g for g, _ in gradients], self.params, weights, keep=keep)
        return products, size

    def _forward_over_reverse(
        self, batch: Batch, vector: list[Tensor]
    ) -> tuple[Sequence[Tensor], int]:
        sizes: list[int] = []

        def loss(params: dict[str, Tensor]) -> Tensor:
            value, size = self.loss_at(params, batch)
            sizes.append(size)
            return value

        params = dict(zip(self.names, (p.detach() for p in self.params)))
        tangent = dict(zip(self.names, vector))
        product = torch.func.jvp(torch.func.grad(loss), (params,), (tangent,))[1]
        return [product[name] for name in self.names], sizes[0]

    def _gauss_newton(self, batch: Batch, vector: list[Tensor]) -> tuple[Sequence[Tensor], int]:
        seen: list[Tensor] = []

        def cut_off(module: nn.Module, inputs: Any, outputs: Any) -> Tensor:
            if seen or not isinstance(outputs, Tensor):
                raise ValueError(
                    "for the Gauss-Newton matrix the loss must call the model once, for a tensor"
                )
            seen.extend((outputs, outputs.detach().requires_grad_()))
            return seen[-1]

        hook = self.model.register_forward_hook(cut_off)
        try:
            loss, size = self.loss(self.model, batch)
        finally:
            hook.remove()
        if not seen:
            raise ValueError("for the Gauss-Newton matrix the loss must call the model")
        outputs, cut = seen
        # J·v by a vector-Jacobian product of a vector-Jacobian product: the first is linear in its dummy.
        dummy = torch.zeros_like(outputs, requires_grad=True)
        back = torch.autograd.grad(
            outputs, self.params, dummy, create_graph=True, allow_unused=True
        )
        used = [(b, v) for b, v in zip(back, vector) if b is not None]
        (along,) = torch.autograd.grad(
            [b for b, _ in used], dummy, [v for _, v in used], retain_graph=True
        )
        (slope,) = torch.autograd.grad(loss, cut, create_graph=True)
        (curved,) = torch.autograd.grad(slope, cut, along)
        return _grad(outputs, self.params, curved), size

    # ------------------------------------------------------------------------------------------- modes

    def loss_at(self, params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, int]:
        """A batch's loss with other parameters in the model, for transforms of ``torch.func``."""
        whole = _WithLoss(self.model, self.loss)
        named = {f"model.{name}": p for name, p in params.items()}
        found: tuple[Tensor, int] = torch.func.functional_call(whole, named, (batch,))
        return found

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Dropout off, BatchNorm as wanted; all modes and statistics as they were afterwards."""
        modes = {module: module.training for module in self.model.modules()}
        statistics = {}
        lent: list[nn.Module] = []
        self.model.eval()
        for module in self.model.modules():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            statistics[module] = (module.running_mean, module.running_var)
            if self.batchnorm == "train":
                # Without running statistics it takes the batch's, and has none to change.
                module.running_mean = module.running_var = None
            elif (
                type(module) in _TORCHS_OWN
                and "forward" not in module.__dict__
                and module.running_var is not None
            ):
                # The same function, but torch's own has a second derivative that takes a quarter of a product's time.
                module.forward = partial(_batchnorm_in_evaluation, module)  # type: ignore[method-assign]
                lent.append(module)
        try:
            with torch.enable_grad():
                yield
        finally:
            for module, training in modes.items():
                module.training = training
            for module, (mean, variance) in statistics.items():
                module.running_mean, module.running_var = mean, variance
            for module in lent:
                del module.forward


_TORCHS_OWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _batchnorm_in_evaluation(module: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    """(x − μ)/σ·γ + β, as one product and one sum."""
    module._check_input_dim(x)
    mean, variance = module.running_mean, module.running_var
    assert mean is not None
    assert variance is not None
    scale = (variance + module.eps).rsqrt()
    shift = -mean * scale
    if module.affine:
        scale, shift = scale * module.weight, shift * module.weight + module.bias
    sides = (1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(sides).to(x.dtype), x, scale.view(sides).to(x.dtype))


class _WithLoss(nn.Module):
    """The model and its loss as one module: whatever the loss takes from the model has the parameters it is called with."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> tuple[Tensor, int]:
        return self.loss(self.model, batch)


def _grad(
    outputs: Tensor | Sequence[Tensor],
    params: list[Tensor] | list[nn.Parameter],
    weights: Tensor | Sequence[Tensor] | None = None,
    keep: bool = False,
) -> list[Tensor]:
    """With zeros for parameters that do not matter."""
    found = torch.autograd.grad(outputs, params, weights, retain_graph=keep, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params)]
