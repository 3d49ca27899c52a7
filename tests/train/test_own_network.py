"""Networks of your own: how a factory is found, called and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gadam.runs.recipe import RecipeError
from gadam.train import models, own_network

SHAPE = (3, 6, 6)
NETS = """
import torch
from torch import nn
from helper import width

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.out = nn.Linear(3 * 6 * 6, num_classes)
        self.width = width

    def forward(self, x):
        return self.out(x.view(x.size(0), -1))

    @classmethod
    def small(cls):
        return cls(4)

def no_arguments():
    return Net(4)

def shaped(*, input_shape, num_classes=1000, hidden=8):
    size = input_shape[0] * input_shape[1] * input_shape[2]
    layers = nn.Linear(size, hidden), nn.Linear(hidden, num_classes)
    return nn.Sequential(nn.Flatten(), *layers)

def lazy(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

def any_arguments(**arguments):
    assert sorted(arguments) == ["input_shape", "num_classes"]
    return Net(arguments["num_classes"])

def like_torchvision(*, weights=None, **kwargs):
    torch.rand(7)
    return Net(**kwargs)

number = 3
def wrong_type(): return 3
def raises(): raise KeyError("weights.pt")
def needs_more(num_classes, depth): return Net(num_classes)
def without_weights(): return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(4))
def ten(): return Net(10)
def pair(num_classes):
    class Pair(Net):
        def forward(self, x): return super().forward(x), None
    return Pair(num_classes)
def too_large(): return nn.Linear(50, 4)
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., nn.Module]]:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "helper.py").write_text("width = 1\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)

    def call(name: str) -> nn.Module:
        return models.build(name, 4, SHAPE)

    yield call
    assert sys.path == path
    for module in ("nets", "helper", "package", "package.inner"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    "factory",
    [
        "Net",
        "Net.small",
        "no_arguments",
        "shaped",
        "lazy",
        "any_arguments",
        "like_torchvision",
    ],
)
def test_every_kind_of_factory(factory, build):
    network = build(f"nets:{factory}")
    assert network(torch.zeros(5, *SHAPE)).shape == (5, 4)
    assert network.training
    assert not any(weight.is_meta for weight in network.parameters())


def test_module_in_a_package_and_file_in_another_folder(build, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner.py").write_text("from nets import Net as Inner\n")
    assert type(build("package.inner:Inner")).__name__ == "Net"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.py").write_text(NETS.replace("from helper import", "import"))
    (tmp_path / "elsewhere" / "width.py").write_text("")
    assert type(build("elsewhere/mine.py:Net")).__name__ == "Net"
    assert type(build("nets.py:Net")).__name__ == "Net"


def test_weights_depend_on_the_seed_only(build):
    def first(name: str) -> torch.Tensor:
        torch.manual_seed(3)
        return next(build(name).parameters())

    assert first("nets:Net").equal(first("nets:Net"))
    assert first("nets:lazy").equal(first("nets:lazy"))
    torch.manual_seed(3)
    torch.rand(7)
    expected = torch.nn.Linear(108, 4).weight
    assert first("nets:like_torchvision").equal(expected), "the failed attempt leaves no trace"


def test_meta_device_of_the_caller_is_not_used(build):
    with torch.device("meta"):
        assert not next(build("nets:Net").parameters()).is_meta


def test_edited_and_moved_modules_are_imported_again(build, tmp_path, monkeypatch):
    assert build("nets:Net").width == 1
    (tmp_path / "helper.py").write_text("width = 22\n")
    assert build("nets:Net").width == 22
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "nets.py").write_text(NETS.replace("from helper import width", "width=3"))
    monkeypatch.chdir(tmp_path / "other")
    assert build("nets:Net").width == 3


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nest:Net", "There is no module 'nest' in the working directory or the environment. Did"),
        ("gone.py:Net", "There is no module 'gone.py'"),
        (":Net", "with a module before the colon"),
        ("nets:", "nets has no ''."),
        ("nets:Nett", "nets has no 'Nett'. Did you mean 'Net'?"),
        ("nets:Net.smal", "nets.Net has no 'smal'. Did you mean 'small'?"),
        ("nets:number", "nets:number is not callable, but of type int."),
        ("nets:wrong_type", "must return a torch.nn.Module, got an object of type int"),
        ("nets:raises", "nets:raises failed: KeyError: 'weights.pt' (nets.py, line "),
        ("nets:needs_more", "requires depth, but gadam passes only num_classes and input_shape."),
        ("nets:without_weights", "without weights to train"),
        ("nets:ten", "scores of shape (2, 4), one per class, got (2, 10). Use the argument num"),
        ("nets:pair", "to a tensor of scores, got an object of type tuple"),
        ("nets:too_large", "nets:too_large failed on images of shape (3, 6, 6)"),
    ],
)
def test_problems_get_a_sentence(name, sentence, build):
    with pytest.raises(RecipeError) as error:
        build(name)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith((".", "?"))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def Net(:", "nets.py, line 1"),
        ("import no_such_package", "No module named 'no_such_package' (nets.py, line 1)"),
        ("1 / 0", "Cannot import nets: ZeroDivisionError: division by zero (nets.py, line 1)."),
    ],
)
def test_modules_that_cannot_be_imported(code, sentence, build, tmp_path):
    (tmp_path / "nets.py").write_text(code)
    with pytest.raises(RecipeError) as error:
        build("nets:Net")
    assert sentence in str(error.value)


def test_module_of():
    assert own_network.is_own("a.b:c")
    assert not own_network.is_own("vgg-mini")
    assert own_network.module_of("a.b:c.d") == "a.b"


def test_network_of_the_documentation(build, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "own-data.md").read_text()
    (tmp_path / "nets.py").write_text(page.split("```python\n")[1].split("```")[0])
    assert build("nets:Net")(torch.zeros(2, *SHAPE)).shape == (2, 4)


def test_a_helper_of_the_same_name_in_another_folder_is_not_used(tmp_path, monkeypatch):
    for folder, width in (("a", 3), ("b", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "widths.py").write_text(f"width = {width}\n")
        (tmp_path / folder / f"net_{folder}.py").write_text(
            "from torch import nn\nfrom widths import width\n\n\n"
            "def net(input_shape):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(width))\n"
        )
        monkeypatch.chdir(tmp_path / folder)
        network = own_network.build(f"net_{folder}:net", width, (1, 4, 4))
        assert network(torch.zeros(2, 1, 4, 4)).shape == (2, width)


def test_a_file_does_not_replace_the_standard_library(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text(
        "from torch import nn\n\n\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    before = sys.modules["random"], list(sys.path)
    assert own_network.build("random.py:net", 3, (1, 4, 4)) is not None
    assert (sys.modules["random"], sys.path) == before
