"""Check the networks: their sizes, the inputs they accept, and that they can be trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gadam.train import models

MINIS = [name for name in models.names() if "mini" in name]
WITHOUT_BATCHNORM = ["logistic", "vgg16", "vgg-mini-nobn"]
# Small enough for one core, large enough for the last BatchNorm layers to see several values.
SMALL = {
    "logistic": (1, 28, 28),
    "vgg16": (3, 32, 32),
    "vgg16-bn": (3, 32, 32),
    "resnet18": (3, 64, 64),
    "resnet50": (3, 64, 64),
    "resnet101": (3, 64, 64),
}


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "num_classes", "parameters"),
    [
        ("logistic", 10, 7_850),
        ("vgg16", 10, 15_245_130),
        ("vgg16", 100, 15_291_300),
        ("vgg16-bn", 10, 15_253_578),
        ("vgg16-bn", 100, 15_299_748),
        ("preresnet110", 10, 1_146_842),
        ("preresnet110", 100, 1_169_972),
        ("resnext29", 10, 34_426_698),
        ("resnext29", 100, 34_518_948),
        ("wrn28-10", 1000, 37_123_880),
        ("resnet18", 1000, 11_689_512),
        ("resnet50", 1000, 25_557_032),
        ("resnet101", 1000, 44_549_160),
    ],
)
def test_parameter_count_matches_the_paper(name, num_classes, parameters):
    with torch.device("meta"):
        assert size(models.build(name, num_classes)) == parameters


@pytest.mark.parametrize("name", MINIS)
def test_mini_networks_are_small(name):
    assert 10_000 < size(models.build(name, 100)) < 350_000


@pytest.mark.parametrize("name", models.names())
def test_output_shape_for_default_input(name):
    shapes = {"logistic": (1, 28, 28)} | dict.fromkeys(
        ["resnet18", "resnet50", "resnet101"], (3, 224, 224)
    )
    with torch.device("meta"):
        scores = models.build(name, 7)(torch.zeros(2, *shapes.get(name, (3, 32, 32))))
    assert scores.shape == (2, 7)


@pytest.mark.parametrize("name", models.names())
def test_output_shape_for_other_channels(name):
    shape = (5, 32, 32)
    with torch.device("meta"):
        assert models.build(name, 7, shape)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "resnext29"])
def test_bottlenecks_stride_in_the_3x3_convolution(name):
    with torch.device("meta"):
        convolutions = [m for m in models.build(name, 10).modules() if isinstance(m, nn.Conv2d)]
    halving = [c.kernel_size for c in convolutions if c.stride == (2, 2)]
    stages = 2 if name == "resnext29" else 3
    assert halving.count((3, 3)) == halving.count((1, 1)) == stages


@pytest.mark.parametrize("name", models.names())
def test_every_parameter_has_a_gradient(name):
    shape = SMALL.get(name, (3, 16, 16))
    model = models.build(name, 5, shape)
    nn.functional.cross_entropy(
        model(torch.randn(4, *shape)), torch.tensor([0, 1, 2, 3])
    ).backward()
    # BatchNorm cancels the bias of the convolution before it.
    idle = {
        module.bias
        for module in model.modules()
        if isinstance(module, nn.Conv2d) and has_batchnorm(model)
    }
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter in idle or parameter.grad.any(), key


@pytest.mark.parametrize("shape", [(1, 14, 14), (3, 32, 32), (2, 8, 11)])
@pytest.mark.parametrize("name", MINIS)
def test_mini_networks_learn_to_separate_dark_from_bright(name, shape):
    model = models.build(name, 2, shape)
    labels = torch.arange(8) % 2
    images = torch.randn(8, *shape) + 2 * labels.reshape(8, 1, 1, 1) - 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", models.names())
def test_batchnorm_is_present_as_the_name_says(name):
    with torch.device("meta"):
        assert has_batchnorm(models.build(name, 10)) == (name not in WITHOUT_BATCHNORM)


@pytest.mark.parametrize("name", [*MINIS, "resnet18"])
def test_hessian_is_symmetric(name):
    shape = SMALL.get(name, (1, 8, 8))
    model = models.build(name, 3, shape).double()
    weights = list(model.parameters())
    images = torch.randn(4, *shape, dtype=torch.float64)
    loss = nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 0]))
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    u, v = ([torch.randn_like(w) for w in weights] for _ in range(2))

    def dot(left, right):
        return sum((a * b).sum() for a, b in zip(left, right))

    hessian_u, hessian_v = (
        torch.autograd.grad(dot(gradients, direction), weights, retain_graph=True)
        for direction in (u, v)
    )
    assert dot(v, hessian_u).item() == pytest.approx(dot(u, hessian_v).item(), rel=1e-6)
    assert dot(v, hessian_u).item() != 0


@pytest.mark.parametrize("name", [*MINIS, "resnet18"])
def test_copied_compiled_and_channels_last_models_agree(name):
    shape = SMALL.get(name, (3, 8, 8))
    model = models.build(name, 3, shape).eval()
    images = torch.randn(2, *shape)
    scores = model(images)
    assert torch.equal(copy.deepcopy(model)(images), scores)
    torch.testing.assert_close(
        torch.compile(model, backend="eager", fullgraph=True)(images), scores
    )
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(
        model(images.to(memory_format=torch.channels_last)), scores, rtol=1e-4, atol=1e-5
    )


def test_convolutions_use_he_initialization():
    """Normal weights with the fan-out variance, and zero biases."""
    layers = models.build("vgg16", 10).modules()
    convolution = next(m for m in layers if isinstance(m, nn.Conv2d) and m.out_channels == 256)
    assert convolution.weight.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.02)
    assert convolution.bias is not None
    assert not convolution.bias.any()


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("VGG-16 BN", "vgg16-bn"),
        ("vgg16bn", "vgg16-bn"),
        ("VGG_16", "vgg16"),
        ("PreResNet-110", "preresnet110"),
        ("resnext29-8x64d", "resnext29"),
        ("WRN-28-10", "wrn28-10"),
        ("WideResNet 28-10", "wrn28-10"),
        ("logistic-regression", "logistic"),
        ("ResNet-50", "resnet50"),
        ("VGG-mini (no BN)", "vgg-mini-nobn"),
    ],
)
def test_names_ignore_case_and_punctuation(spelling, name):
    with torch.device("meta"):
        assert size(models.build(spelling, 10)) == size(models.build(name, 10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnt-18", 10), r"'resnt-18'. Did you mean 'resnet18'\? Choose from logistic, vgg16,"),
        (("?", 10), r"Unknown network '\?'. Choose from logistic"),
        (("VGG16", 10, (3, 28, 28)), "vgg16 requires images of 32x32, got 28x28"),
        (("vgg16", 10, (3, 64, 32)), "vgg16 requires images of 32x32, got 64x32"),
        (("vgg-mini", 10, (3, 32, 7)), "vgg-mini requires images of at least 8x8, got 32x7"),
        (("resnet18", 10, (3, 28, 28)), "resnet18 requires images of at least 32x32, got 28x28"),
        (("logistic", 10, (28, 28)), r"\(channels, height, width\), all positive, got \(28, 28\)"),
        (("logistic", 10, (0, 28, 28)), "all positive"),
        (("logistic", 0), "num_classes must be positive, got 0"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.build(*arguments)
