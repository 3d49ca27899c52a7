"""The paper's image networks, and small versions of them for machines with few cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from gadam._names import find
from gadam.train import own_network

__all__ = ["build", "check_name", "names"]

Shape = tuple[int, int, int]
"""Channels, height, and width of an image."""


def names() -> list[str]:
    """Return the names of the networks that :func:`build` accepts."""
    return list(_NETWORKS)


def build(name: str, num_classes: int, input_shape: Shape | None = None) -> nn.Module:
    """Build a freshly initialized network.

    Args:
        name: One of :func:`names`, where only letters and digits count, and case does not. Or a
            network of your own, "package.module:factory"; see :mod:`gadam.train.own_network`.
        num_classes: Number of scores per image.
        input_shape: Channels, height, and width of the images. Defaults to the shape that the
            network is usually trained on.

    Returns:
        A network that maps images (N, C, H, W) to scores (N, ``num_classes``).

    Raises:
        ValueError: If the network is unknown or does not support the image size.

    Example:
        >>> import torch
        >>> from gadam.train import models
        >>> model = models.build("VGG-mini", num_classes=10, input_shape=(1, 14, 14))
        >>> model(torch.zeros(2, 1, 14, 14)).shape
        torch.Size([2, 10])
    """
    own = own_network.is_own(name)
    name = name if own else _canonical(name)
    shape = input_shape or (_CIFAR if own else _NETWORKS[name].default_shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(
            f"input_shape must be (channels, height, width), all positive, got {shape}."
        )
    if num_classes < 1:
        raise ValueError(f"num_classes must be positive, got {num_classes}.")
    if own:
        return own_network.build(name, num_classes, shape)
    network = _NETWORKS[name]
    _, height, width = shape
    if min(height, width) < network.smallest or max(height, width) > network.largest:
        bound = "" if network.largest == network.smallest else "at least "
        raise ValueError(
            f"{name} requires images of {bound}{network.smallest}x{network.smallest}, "
            f"got {height}x{width}."
        )
    model = network.factory(shape, num_classes)
    model.apply(_initialize)
    return model


def check_name(name: str) -> None:
    """Raise an error if :func:`build` does not know a network.

    Args:
        name: As for :func:`build`.

    Raises:
        RecipeError: There is no such network of the user's own.
        ValueError: The network is unknown.
    """
    if own_network.is_own(name):
        own_network.check_name(name)
    else:
        _canonical(name)


def _canonical(name: str) -> str:
    found, near = find(name, {each: each for each in _NETWORKS} | _ALIASES)
    if found is not None:
        return found
    hint = f" Did you mean {near!r}?" if near else ""
    raise ValueError(
        f"Unknown network {name!r}.{hint} Choose from {', '.join(_NETWORKS)}, or name your own: "
        "package.module:factory."
    )


def _initialize(module: nn.Module) -> None:
    # He initialization for convolutions. BatchNorm and linear layers keep torch's defaults.
    # Weights on "meta" have no values, and drawing them makes torch import its compiler.
    if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# --------------------------------------------------------------------------------------- blocks


def _convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, *, groups: int = 1, bias: bool = False
) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=bias)


def _basic(inputs: int, outputs: int, stride: int, *, bias: bool = False) -> list[nn.Conv2d]:
    return [
        _convolution(inputs, outputs, 3, stride, bias=bias),
        _convolution(outputs, outputs, 3, bias=bias),
    ]


def _bottleneck(
    inputs: int, outputs: int, stride: int, *, inner: float = 1 / 4, groups: int = 1
) -> list[nn.Conv2d]:
    width = int(inner * outputs)
    return [
        _convolution(inputs, width, 1),
        _convolution(width, width, 3, stride, groups=groups),
        _convolution(width, outputs, 1),
    ]


def _projection(branch: Sequence[nn.Conv2d]) -> nn.Conv2d | None:
    """Return the 1x1 convolution that maps a block's input to the shape of the branch's output.

    Returns None if the shapes are equal.
    """
    inputs, outputs = branch[0].in_channels, branch[-1].out_channels
    stride = math.prod(convolution.stride[0] for convolution in branch)
    if inputs == outputs and stride == 1:
        return None
    return _convolution(inputs, outputs, 1, stride, bias=branch[-1].bias is not None)


def _norm_relu(channels: int) -> list[nn.Module]:
    # Activations are never in place, so that hooks and second derivatives see unmodified outputs.
    return [nn.BatchNorm2d(channels), nn.ReLU()]


class _PostActivation(nn.Module):
    """Residual block with the last ReLU after the sum (He et al., 2015)."""

    def __init__(self, branch: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        layers = [layer for c in branch for layer in (c, *_norm_relu(c.out_channels))]
        self.branch = nn.Sequential(*layers[:-1])
        self.relu = nn.ReLU()
        project = _projection(branch)
        self.shortcut = (
            nn.Identity()
            if project is None
            else nn.Sequential(project, nn.BatchNorm2d(project.out_channels))
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


class _PreActivation(nn.Module):
    """Residual block with nothing after the sum (He et al., 2016).

    A projection acts on the activated input, like the branch.
    """

    def __init__(self, branch: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        layers = [layer for c in branch for layer in (*_norm_relu(c.in_channels), c)]
        self.activate = nn.Sequential(*layers[:2])
        self.branch = nn.Sequential(*layers[2:])
        self.project = _projection(branch)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activate(x)
        shortcut = x if self.project is None else self.project(activated)
        out: Tensor = self.branch(activated) + shortcut
        return out


def _stages(
    block: Callable[[list[nn.Conv2d]], nn.Module],
    branch: Callable[[int, int, int], list[nn.Conv2d]],
    inputs: int,
    widths: Sequence[int],
    depths: Sequence[int],
) -> list[nn.Module]:
    """Return the blocks of all stages. Each stage but the first halves the image."""
    blocks = []
    for stage, (outputs, depth) in enumerate(zip(widths, depths)):
        for position in range(depth):
            stride = 2 if stage > 0 and position == 0 else 1
            blocks.append(block(branch(inputs, outputs, stride)))
            inputs = outputs
    return blocks


def _pool_and_classify(width: int, num_classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)]


# ------------------------------------------------------------------------------------- networks


def _logistic(shape: Shape, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))


def _vgg_features(
    channels: int, stages: Sequence[Sequence[int]], *, batchnorm: bool, bias: bool
) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for stage in stages:
        for width in stage:
            layers.append(_convolution(channels, width, 3, bias=bias))
            layers.extend(_norm_relu(width) if batchnorm else [nn.ReLU()])
            channels = width
        layers.append(nn.MaxPool2d(2))
    return layers


def _vgg16(shape: Shape, num_classes: int, *, batchnorm: bool) -> nn.Module:
    stages = [[64] * 2, [128] * 2, [256] * 3, [512] * 3, [512] * 3]
    hidden = [layer for _ in range(2) for layer in (nn.Dropout(), nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(
        *_vgg_features(shape[0], stages, batchnorm=batchnorm, bias=True),
        nn.Flatten(),
        *hidden,
        nn.Linear(512, num_classes),
    )


def _vgg_mini(
    shape: Shape, num_classes: int, *, batchnorm: bool = True, width: int = 16
) -> nn.Module:
    stages = [[width] * 2, [2 * width] * 2, [4 * width] * 2]
    features = _vgg_features(shape[0], stages, batchnorm=batchnorm, bias=not batchnorm)
    return nn.Sequential(*features[:-1], *_pool_and_classify(4 * width, num_classes))


def _preresnet(
    shape: Shape,
    num_classes: int,
    *,
    branch: Callable[..., list[nn.Conv2d]],
    widths: Sequence[int],
    depth: int,
    bias: bool = False,
) -> nn.Module:
    return nn.Sequential(
        _convolution(shape[0], 16, 3, bias=bias),
        *_stages(_PreActivation, branch, 16, widths, [depth] * len(widths)),
        *_norm_relu(widths[-1]),
        *_pool_and_classify(widths[-1], num_classes),
    )


# Zagoruyko and Komodakis (2016), with biases as in the paper's runs.
_wide_resnet = partial(_preresnet, branch=partial(_basic, bias=True), bias=True)


def _resnext29(shape: Shape, num_classes: int) -> nn.Module:
    # 8 groups of width 64 are twice the 256 outputs of the first stage. The ratio is the same in
    # later stages.
    branch = partial(_bottleneck, inner=2, groups=8)
    return nn.Sequential(
        _convolution(shape[0], 64, 3),
        *_norm_relu(64),
        *_stages(_PostActivation, branch, 64, (256, 512, 1024), (3, 3, 3)),
        *_pool_and_classify(1024, num_classes),
    )


def _resnet(
    shape: Shape,
    num_classes: int,
    *,
    branch: Callable[..., list[nn.Conv2d]],
    narrowest: int,
    depths: Sequence[int],
) -> nn.Module:
    widths = [narrowest * 2**stage for stage in range(4)]
    return nn.Sequential(
        _convolution(shape[0], 64, 7, 2),
        *_norm_relu(64),
        nn.MaxPool2d(3, 2, 1),
        *_stages(_PostActivation, branch, 64, widths, depths),
        *_pool_and_classify(widths[-1], num_classes),
    )


_bottleneck_resnet = partial(_resnet, branch=_bottleneck, narrowest=256)


class _Network(NamedTuple):
    factory: Callable[[Shape, int], nn.Module]
    default_shape: Shape
    smallest: int  # Minimum height and width.
    largest: float = math.inf


_CIFAR, _IMAGENET = (3, 32, 32), (3, 224, 224)
_NETWORKS = {
    "logistic": _Network(_logistic, (1, 28, 28), 1),
    "vgg16": _Network(partial(_vgg16, batchnorm=False), _CIFAR, 32, 32),
    "vgg16-bn": _Network(partial(_vgg16, batchnorm=True), _CIFAR, 32, 32),
    "preresnet110": _Network(
        partial(_preresnet, branch=_bottleneck, widths=(64, 128, 256), depth=12), _CIFAR, 8
    ),
    "resnext29": _Network(_resnext29, _CIFAR, 8),
    "wrn28-10": _Network(partial(_wide_resnet, widths=(160, 320, 640), depth=4), _CIFAR, 8),
    "resnet18": _Network(
        partial(_resnet, branch=_basic, narrowest=64, depths=(2, 2, 2, 2)), _IMAGENET, 32
    ),
    "resnet50": _Network(partial(_bottleneck_resnet, depths=(3, 4, 6, 3)), _IMAGENET, 32),
    "resnet101": _Network(partial(_bottleneck_resnet, depths=(3, 4, 23, 3)), _IMAGENET, 32),
    "vgg-mini": _Network(_vgg_mini, _CIFAR, 8),
    "vgg-mini-narrow": _Network(partial(_vgg_mini, width=8), _CIFAR, 8),
    "vgg-mini-wide": _Network(partial(_vgg_mini, width=32), _CIFAR, 8),
    "vgg-mini-nobn": _Network(partial(_vgg_mini, batchnorm=False), _CIFAR, 8),
    "preresnet-mini": _Network(
        partial(_preresnet, branch=_basic, widths=(16, 32, 64), depth=1), _CIFAR, 8
    ),
    "wrn-mini": _Network(partial(_wide_resnet, widths=(32, 64), depth=1), _CIFAR, 8),
}
_ALIASES = {
    "logisticregression": "logistic",
    "resnext298x64d": "resnext29",
    "wideresnet2810": "wrn28-10",
}
