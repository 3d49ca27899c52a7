"""Curvature of a loss over a dataset: products of its Hessian with vectors.

The loss can be any mean over examples, and the data can come from any loader. Products are exact
over the whole dataset. They are accumulated batch by batch, so without cached graphs they need only
a few copies of the parameters in memory.

Dropout is off. BatchNorm runs either in evaluation mode or in training mode. Training mode uses
each batch's statistics and differentiates through them. Running statistics never change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from gadam._modes import preserved_modes
from gadam._torch import BATCHNORM_TYPES, versions

__all__ = ["Curvature", "Loss"]

Batch = Any
"""One item of the loader. Only the loss function looks inside it."""
Loss = Callable[[nn.Module, Batch], tuple[Tensor, int]]
"""Maps a model and a batch to the mean loss of the batch and its number of examples."""
_BatchGradient = tuple[list[tuple[Tensor, int]], int]
"""(gradient with graph, parameter index) pairs, and the number of examples in the batch."""


def classification(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Compute the cross-entropy of an (input, label) batch. This is the default loss.

    Args:
        model: Classifier that returns logits.
        batch: Inputs and labels.

    Returns:
        The mean loss and the number of examples.
    """
    x, y = batch
    return nn.functional.cross_entropy(model(x), y), len(y)


class Curvature:
    r"""The Hessian of the mean loss, or its Gauss-Newton matrix, at the model's current weights.

    For the loss :math:`L(w) = \frac{1}{N} \sum_n \ell(f_w(x_n), y_n)`, ``curvature @ v`` returns

    .. math::
        H v = \nabla^2 L(w)\, v
        \qquad\text{or}\qquad
        G v = \frac{1}{N} \sum_n J_n^\top \, \nabla_f^2 \ell_n \, J_n v,

    where :math:`J_n` is the Jacobian of the network's outputs with respect to the parameters.

    Args:
        model: Model to measure. Parameters without ``requires_grad`` are held fixed.
        batches: The data, iterated once per product. Pass a list, or a loader that yields the same
            examples every time.
        loss: Returns a batch's mean loss and its number of examples. Defaults to the cross-entropy
            of (input, label) batches.
        kind: ``"hessian"``, or ``"ggn"`` for the generalized Gauss-Newton matrix.
        batchnorm: ``"eval"`` uses running statistics, ``"train"`` uses each batch's statistics.
        method: How to compute a Hessian product: ``"reverse"`` (double backward) or ``"forward"``
            (forward over reverse).
        graph_memory: Maximum number of bytes for caching the graphs of the gradients between
            Hessian products. Caching makes products a third faster. If the whole dataset needs
            more, as estimated from the first batch, graphs are rebuilt for each product, as they
            are after any change of the weights. 0 disables caching.

    Raises:
        ValueError: If an option is unknown, ``batches`` is a one-shot iterator, or no parameter
            requires a gradient.
        TypeError: At the first product, if ``loss`` does not return a scalar tensor and a number.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 2)
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> hessian = Curvature(model, data)
        >>> v = torch.ones(hessian.dimension)
        >>> bool(v @ hessian @ v >= -1e-6)  # Logistic regression is convex.
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
            raise ValueError(f"kind must be 'hessian' or 'ggn', got {kind!r}.")
        if batchnorm not in ("eval", "train"):
            raise ValueError(f"batchnorm must be 'eval' or 'train', got {batchnorm!r}.")
        if method not in ("reverse", "forward"):
            raise ValueError(f"method must be 'reverse' or 'forward', got {method!r}.")
        if isinstance(batches, Iterator):
            raise ValueError(
                "batches is iterated many times. Pass a list or a loader, not an iterator."
            )
        self.model, self.batches = model, batches
        self.loss: Loss = partial(_call_loss, loss)
        self.kind, self.batchnorm, self.method = kind, batchnorm, method
        self.graph_memory = graph_memory if (kind, method) == ("hessian", "reverse") else 0
        self._graphs: list[_BatchGradient] = []
        # The version and a copy of every tensor at the time the graphs were built.
        self._graphs_built_at: tuple[list[int], list[Tensor]] = ([], [])
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.params = [p for p in model.parameters() if p.requires_grad]
        if not self.params:
            raise ValueError("The model has no parameters that require a gradient.")

    @property
    def dimension(self) -> int:
        """The number of parameters P."""
        return sum(p.numel() for p in self.params)

    # --------------------------------------------------------------------------------- flat vectors

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors with the parameters' shapes into one vector.

        Args:
            tensors: One tensor per parameter.

        Returns:
            A vector of length ``dimension``.
        """
        return torch.cat([t.reshape(-1) for t in tensors])

    def shaped(self, vector: Tensor) -> list[Tensor]:
        """Split a vector into tensors with the parameters' shapes.

        Args:
            vector: A vector of length ``dimension``.

        Returns:
            One tensor per parameter, with its shape, dtype, and device.
        """
        if vector.shape != (self.dimension,):
            raise ValueError(
                f"Expected a vector of shape ({self.dimension},), got {tuple(vector.shape)}."
            )
        sizes = [p.numel() for p in self.params]
        return [v.to(p).view_as(p) for v, p in zip(torch.split(vector, sizes), self.params)]

    # ------------------------------------------------------------------------------------- products

    def __matmul__(self, vector: Tensor) -> Tensor:
        """Multiply with a vector, exactly over the whole dataset."""
        shaped = self.shaped(vector)
        if self.graph_memory and self._cache_graphs():
            product = partial(self._differentiate, retain_graph=True)
            return self.flat(self._mean_over_data(shaped, self._graphs, product))
        return self.flat(self._mean_over_data(shaped, self.batches, self._product))

    def _cache_graphs(self) -> bool:
        """Build the gradients' graphs at the current weights if they fit in memory.

        Returns:
            True if the cache holds the graphs of the whole dataset.
        """
        tensors = [*self.model.parameters(), *self.model.buffers()]
        writes = versions(tensors)
        if writes is None:  # Changes cannot be detected, so a cache could be stale.
            self.graph_memory = 0
            return False
        if self._graphs and self._is_current(tensors, writes):
            return True
        self._graphs = []  # Free the old graphs first: there may not be room for both sets.
        self._graphs_built_at = ([], [])
        graphs: list[_BatchGradient] = []
        needed = first = 0.0
        with self.ready():
            for batch in self.batches:
                first = first or self._graph_bytes(batch)
                # Only the loss knows the batch size. Assume the size of the previous batch.
                share = graphs[-1][1] / graphs[0][1] if graphs else 1.0
                needed += first * share
                if needed > self.graph_memory:
                    self.graph_memory = 0  # They will not fit next time either.
                    return False
                graphs.append(self._batch_gradient(batch))
        self._graphs = graphs
        self._graphs_built_at = (writes, [t.detach().clone() for t in tensors])
        return bool(graphs)

    def _is_current(self, tensors: Sequence[Tensor], writes: list[int]) -> bool:
        """Return True if no tensor has changed since the graphs were built.

        Autograd rejects graphs of tensors with a new version, but writes to ``p.data`` do not
        change the version. Only the values show them.
        """
        versions_then, values_then = self._graphs_built_at
        return writes == versions_then and all(
            t.shape == then.shape and t.dtype == then.dtype and torch.equal(t, then)
            for t, then in zip(tensors, values_then)
        )

    def _graph_bytes(self, batch: Batch) -> float:
        """Estimate the memory of a batch's graphs from the tensors saved in the forward pass.

        The backward pass's own graph takes about twice as much as the forward pass's.
        """
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        seen: dict[int, int] = {}

        def count(t: Tensor) -> None:
            if t.untyped_storage().data_ptr() not in own:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()

        with torch.autograd.graph.saved_tensors_hooks(count, lambda unused: unused):
            self.loss(self.model, batch)
        return 3.0 * sum(seen.values())

    def __rmatmul__(self, vector: Tensor) -> Tensor:
        return self @ vector  # The matrix is symmetric.

    def gradient(self) -> Tensor:
        """Return the gradient of the mean loss over the whole dataset."""
        return self.flat(self._mean_over_data([], self.batches, self._gradient))

    def batch_gradients(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the gradient of each batch's mean loss and the batch's number of examples."""
        with self.ready():
            for batch in self.batches:
                gradient, size = self._gradient(batch, [])
                yield self.flat(gradient), size

    def mean_loss(self) -> float:
        """Return the mean loss over the whole dataset."""
        with self.ready(), torch.no_grad():
            pairs = [self.loss(self.model, batch) for batch in self.batches]
        total = sum(size for _, size in pairs)
        if not total:
            raise ValueError("batches is empty: there is no data to compute the loss on.")
        return sum(float(loss) * size for loss, size in pairs) / total

    def _mean_over_data(
        self,
        vector: list[Tensor],
        batches: Iterable[Any],
        product: Callable[[Any, list[Tensor]], tuple[Sequence[Tensor], int]],
    ) -> list[Tensor]:
        # Accumulate in double precision, so that the result does not depend on the batch count.
        total = [torch.zeros_like(p, dtype=torch.float64) for p in self.params]
        count = 0
        with self.ready():
            for batch in batches:
                result, size = product(batch, vector)
                for t, r in zip(total, result):
                    t.add_(r.detach(), alpha=size)
                count += size
        if not count:
            raise ValueError("batches is empty: there is no data to compute the curvature on.")
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
        return self._differentiate(self._batch_gradient(batch), vector)

    def _batch_gradient(self, batch: Batch) -> _BatchGradient:
        """Compute the gradients that depend on the parameters, with their graphs."""
        loss, size = self.loss(self.model, batch)
        gradients = torch.autograd.grad(loss, self.params, create_graph=True, allow_unused=True)
        kept = [(g, i) for i, g in enumerate(gradients) if g is not None and g.requires_grad]
        return kept, size

    def _differentiate(
        self, gradient: _BatchGradient, vector: list[Tensor], retain_graph: bool = False
    ) -> tuple[Sequence[Tensor], int]:
        """Differentiate the gradient along a vector: the second backward pass."""
        gradients, size = gradient
        if not gradients:  # The loss is linear.
            return [torch.zeros_like(p) for p in self.params], size
        weights = [vector[i] for _, i in gradients]
        products = _grad([g for g, _ in gradients], self.params, weights, retain_graph=retain_graph)
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

        def detach_outputs(module: nn.Module, inputs: Any, outputs: Any) -> Tensor:
            if seen or not isinstance(outputs, Tensor):
                raise ValueError(
                    "kind='ggn' needs a loss that calls the model exactly once, and a model that "
                    "returns a single tensor."
                )
            seen.extend((outputs, outputs.detach().requires_grad_()))
            return seen[-1]

        hook = self.model.register_forward_hook(detach_outputs)
        try:
            loss, size = self.loss(self.model, batch)
        finally:
            hook.remove()
        if not seen:
            raise ValueError("kind='ggn' needs a loss that calls the model.")
        outputs, detached = seen
        # Jv takes two vector-Jacobian products: uᵀJ is linear in the dummy u, so differentiate it.
        dummy = torch.zeros_like(outputs, requires_grad=True)
        backward = torch.autograd.grad(
            outputs, self.params, dummy, create_graph=True, allow_unused=True
        )
        used = [(b, v) for b, v in zip(backward, vector) if b is not None]
        (jacobian_product,) = torch.autograd.grad(
            [b for b, _ in used], dummy, [v for _, v in used], retain_graph=True
        )
        (gradient,) = torch.autograd.grad(loss, detached, create_graph=True)
        (hessian_product,) = torch.autograd.grad(gradient, detached, jacobian_product)
        return _grad(outputs, self.params, hessian_product), size

    # ---------------------------------------------------------------------------------------- modes

    def loss_at(self, params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, int]:
        """Compute a batch's loss at other parameters, for ``torch.func`` transforms.

        Args:
            params: Parameters by name. They replace the model's own during the call.
            batch: One batch of the data.

        Returns:
            The mean loss and the number of examples.
        """
        module = _WithLoss(self.model, self.loss)
        named = {f"model.{name}": p for name, p in params.items()}
        result: tuple[Tensor, int] = torch.func.functional_call(module, named, (batch,))
        return result

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Disable dropout and set up BatchNorm. Restore modes and statistics on exit."""
        statistics: dict[_BatchNorm, tuple[Tensor | None, Tensor | None]] = {}
        replaced: list[nn.Module] = []
        with preserved_modes(self.model):
            self.model.eval()
            for module in self.model.modules():
                if not isinstance(module, BATCHNORM_TYPES):
                    continue
                layer = cast("_BatchNorm", module)  # All types share the attributes used here.
                statistics[layer] = (layer.running_mean, layer.running_var)
                if self.batchnorm == "train":
                    # Without running statistics the layer uses the batch's and has none to update.
                    layer.running_mean = layer.running_var = None
                elif (
                    type(layer) in _INPUT_DIMS
                    and "forward" not in layer.__dict__
                    and layer.running_var is not None
                ):
                    # The same function. The second derivative of torch's own takes a quarter of the
                    # time of a Hessian product.
                    layer.forward = partial(_eval_batchnorm, layer)  # type: ignore[method-assign]
                    replaced.append(layer)
            try:
                with torch.enable_grad():
                    yield
            finally:
                for layer, (mean, variance) in statistics.items():
                    layer.running_mean, layer.running_var = mean, variance
                for module in replaced:
                    del module.forward


def _call_loss(loss: Loss, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Call a loss function and check what it returns."""
    result: object = loss(model, batch)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            "loss must return the mean loss of the batch and its number of examples, such as "
            f"`return loss, len(labels)`, got a {type(result).__name__}."
        )
    value, size = result
    if not (isinstance(value, Tensor) and value.numel() == 1):
        kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"loss must return the mean loss as a scalar tensor first, got {kind}.")
    return value, size


_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_INPUT_DIMS: dict[type[nn.Module], range] = {
    nn.BatchNorm1d: range(2, 4),
    nn.BatchNorm2d: range(4, 5),
    nn.BatchNorm3d: range(5, 6),
    nn.SyncBatchNorm: range(2, 65),
}


def _eval_batchnorm(module: _BatchNorm, x: Tensor) -> Tensor:
    """Compute (x − μ)/σ·γ + β as one multiply-add."""
    layer_type: type[nn.Module] = type(module)
    if x.dim() not in _INPUT_DIMS[layer_type]:
        result: Tensor = layer_type.forward(module, x)  # Raises torch's own error.
        return result
    mean, variance = module.running_mean, module.running_var
    assert mean is not None
    assert variance is not None
    scale = (variance + module.eps).rsqrt()
    shift = -mean * scale
    if module.affine:
        scale, shift = scale * module.weight, shift * module.weight + module.bias
    shape = (1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(shape).to(x.dtype), x, scale.view(shape).to(x.dtype))


class _WithLoss(nn.Module):
    """The model and its loss as one module.

    With ``functional_call``, everything the loss reads from the model uses the given parameters.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> tuple[Tensor, int]:
        return self.loss(self.model, batch)


def _grad(
    outputs: Tensor | Sequence[Tensor],
    params: list[Tensor] | list[nn.Parameter],
    weights: Tensor | Sequence[Tensor] | None = None,
    retain_graph: bool = False,
) -> list[Tensor]:
    """Call ``torch.autograd.grad`` with zeros for unused parameters."""
    grads = torch.autograd.grad(
        outputs, params, weights, retain_graph=retain_graph, allow_unused=True
    )
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params)]
