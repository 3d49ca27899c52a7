"""Problems on real data, in double precision, for benchmarks/predictions.py.

Each function is a task, as in docs/tasks.md. A run records a hash of this file.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from gadam.train import SupervisedTask, data


def _task(name: str, model: Callable[[int], nn.Module], regression: bool = False) -> SupervisedTask:
    """Return a problem of 4,000 images of 14×14 pixels, in double precision."""
    found = data.load(name)

    def split(images: data.Images) -> tuple[Tensor, Tensor]:
        pixels = images.images[:4000].double() / 255
        if pixels.shape[-1] == 28:
            pixels = nn.functional.avg_pool2d(pixels, 2)
        x, y = (pixels.flatten(1) - 0.3) / 0.35, images.labels[:4000]
        return x, nn.functional.one_hot(y, 10).double() if regression else y

    train, test = split(found.train), split(found.test)  # type: ignore[arg-type]
    return SupervisedTask(
        model=lambda: model(train[0].shape[1]).double(),
        train=train,
        validation=test,
        test=test,
        loss=_half_squared_error if regression else nn.functional.cross_entropy,
        metric="loss",
        batch_size=50,
    )


def _half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1).mean() / 2


def linear_regression() -> SupervisedTask:
    """Regress the one-hot labels of Fashion-MNIST. The loss is a quadratic."""
    return _task("fashion-mini", lambda size: nn.Linear(size, 10), regression=True)


def softmax_regression() -> SupervisedTask:
    """Classify MNIST digits. The loss is convex."""
    return _task("mnist", lambda size: nn.Linear(size, 10))


def perceptron() -> SupervisedTask:
    """Classify Fashion-MNIST with a hidden layer. The loss is not convex."""
    return _task(
        "fashion-mini",
        lambda size: nn.Sequential(nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, 10)),
    )
