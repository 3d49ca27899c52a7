"""Networks of your own: ``package.module:factory``, as a recipe names them.

The factory is any callable that returns an :class:`torch.nn.Module`, such as the class of a
network. It is imported from the working directory or the environment.
"""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from gadam._names import did_you_mean
from gadam.runs.code import CodeError, find_file
from gadam.runs.recipe import RecipeError
from gadam.train import user_code
from gadam.train.user_code import first_on_path, import_code

__all__ = ["build", "is_own", "module_of"]

_Shape = tuple[int, int, int]


def is_own(name: str) -> bool:
    """Return True if a recipe's ``model`` names a factory instead of a network of gadam.

    Args:
        name: The recipe's ``model``.

    Example:
        >>> is_own("mynet:Net"), is_own("vgg-mini")
        (True, False)
    """
    return ":" in name


def module_of(name: str) -> str:
    """Return the module or file of a factory.

    Args:
        name: A recipe's ``model``, such as "package.module:factory" or "nets/mine.py:Net".

    Example:
        >>> module_of("package.module:Factories.small")
        'package.module'
    """
    return name.rpartition(":")[0]


def build(name: str, num_classes: int, input_shape: _Shape) -> nn.Module:
    """Call a factory, and check that its network classifies images.

    The factory is called with those of ``num_classes`` and ``input_shape`` that it accepts. Then
    the network is applied to two blank images, which also initializes lazy layers.

    Args:
        name: "package.module:factory", with dots in ``factory`` for attributes. A file such as
            "nets/mine.py" can take the place of the module.
        num_classes: Number of scores per image.
        input_shape: Channels, height, and width of the images.

    Returns:
        The network, in training mode.

    Raises:
        RecipeError: The factory cannot be found or called, or its network does not fit.
    """
    # A caller may ask for the meta device. A user's code need not support it.
    with torch.device("cpu"):
        factory, root = _find(name)
    with torch.device("cpu"), first_on_path(root):
        network = _call(name, factory, {"num_classes": num_classes, "input_shape": input_shape})
        _check_scores(name, network, num_classes, input_shape)
    if not any(weight.requires_grad for weight in network.parameters()):
        raise RecipeError(f"{name} returned a network without weights to train.")
    return network.train()


def check_name(name: str) -> None:
    """Raise an error if a factory cannot be found. It is not called.

    Args:
        name: As for :func:`build`.

    Raises:
        RecipeError: There is no such module or factory.
    """
    _find(name)


# --------------------------------------------------------------------------------------- finding


def _find(name: str) -> tuple[Callable[..., object], Path]:
    """Return a factory, and the folder that its imports start from."""
    module = module_of(name)
    if not module:
        raise RecipeError("model must be package.module:factory, with a module before the colon.")
    try:
        root = find_file(module)[1]
        found: object = import_code(module)
    except CodeError as error:
        near = did_you_mean(module, [file.stem for file in Path.cwd().glob("*.py")])
        hint = f"Did you mean {near!r}?" if near else "Check `model`."
        if "There is no" not in str(error):
            raise RecipeError(str(error)) from None
        raise RecipeError(
            f"There is no module {module!r} in the working directory or the environment. {hint}"
        ) from None
    except Exception as error:
        raise RecipeError(f"Cannot import {module}: {_describe(error)}") from error
    place = module
    for attribute in name.rpartition(":")[2].split("."):
        if not hasattr(found, attribute):
            near = did_you_mean(attribute, _public_names(found))
            hint = f" Did you mean {near!r}?" if near else ""
            raise RecipeError(f"{place} has no {attribute!r}.{hint}")
        found = getattr(found, attribute)
        place = f"{place}.{attribute}"
    if not callable(found):
        raise RecipeError(
            f"{name} is not callable, but of type {type(found).__name__}. Name a function or class "
            "that returns a network."
        )
    return found, root


def _public_names(found: object) -> list[str]:
    if isinstance(found, ModuleType):
        return [name for name, value in vars(found).items() if callable(value)]
    return [name for name in dir(found) if not name.startswith("_")]


def _describe(error: Exception) -> str:
    """Return an error in one sentence, with the line of the user's code that raised it."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    torch_folder = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        ours = frame.filename in (__file__, user_code.__file__) or frame.filename.startswith("<")
        if not ours and not frame.filename.startswith((torch_folder, importlib.__path__[0])):
            return f"{said.rstrip('.')} ({Path(frame.filename).name}, line {frame.lineno})."
    return f"{said.rstrip('.')}."


# --------------------------------------------------------------------------------------- calling


def _call(name: str, factory: Callable[..., object], offered: dict[str, object]) -> nn.Module:
    accepted, takes_any = _accepted(name, factory, offered)
    state = torch.get_rng_state()
    while True:
        try:
            made = factory(**accepted)
            break
        except Exception as error:
            # A function that passes **kwargs on, as torchvision's do, accepts only some of them.
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if takes_any and refused and accepted.pop(refused[1], None) is not None:
                torch.set_rng_state(state)
                continue
            raise RecipeError(f"{name} failed: {_describe(error)}") from error
    if not isinstance(made, nn.Module):
        raise RecipeError(
            f"{name} must return a torch.nn.Module, got an object of type {type(made).__name__}."
        )
    return made


def _accepted(
    name: str, factory: Callable[..., object], offered: dict[str, object]
) -> tuple[dict[str, object], bool]:
    """Return the arguments that a factory accepts by keyword, and if it accepts any."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return {}, False
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered), True
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind is not p.VAR_POSITIONAL
        and (p.name not in offered or p.name not in by_name)
    ]
    if required:
        raise RecipeError(
            f"{name} requires {', '.join(required)}, but gadam passes only num_classes and "
            "input_shape. Give other arguments a default, or wrap it in a function."
        )
    return {key: value for key, value in offered.items() if key in by_name}, False


def _check_scores(name: str, network: nn.Module, num_classes: int, shape: _Shape) -> None:
    blank = torch.zeros(2, *shape)
    try:
        with torch.no_grad():
            scores = network.eval()(blank)
    except Exception as error:
        raise RecipeError(
            f"{name} failed on images of shape {shape}, which are channels, height and width: "
            f"{_describe(error)}"
        ) from error
    if not isinstance(scores, Tensor):
        raise RecipeError(
            f"{name} must map images to a tensor of scores, got an object of type "
            f"{type(scores).__name__}."
        )
    if scores.shape != (2, num_classes):
        raise RecipeError(
            f"{name} must map 2 images to scores of shape (2, {num_classes}), one per class, got "
            f"{tuple(scores.shape)}. Use the argument num_classes, which gadam passes if the "
            "factory accepts it."
        )
