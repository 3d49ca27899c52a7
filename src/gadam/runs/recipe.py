"""Recipes: everything that decides a training run but its seed, as a frozen value.

Derive one recipe from another with :func:`dataclasses.replace`, or by name as on the command line:

>>> recipe = Recipe("mine", model="vgg-mini", optimizer=Optimizer("sgd", lr=0.1), epochs=20)
>>> override(recipe, ["lr=0.2", "data.label_noise=0.3", "average.start=10"]).average
Average(start=10, every='epoch', weighting='mean', decay=0.99, size=5, patience=10)
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from gadam import schedule
from gadam._errors import UserError
from gadam._names import did_you_mean
from gadam.runs.files import Document

__all__ = [
    "IMAGE_SETTINGS",
    "Average",
    "Data",
    "Language",
    "Mode",
    "Optimizer",
    "OwnTask",
    "Recipe",
    "RecipeError",
    "Schedule",
    "applies_to",
    "differences",
    "override",
]


Mode = Literal["max", "min"]  # whether a larger or a smaller metric is better


class RecipeError(UserError, ValueError):
    """A recipe is invalid. The message says what is wrong, and what to do."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RecipeError(message)


@dataclass(frozen=True)
class Data:
    """The training data.

    Args:
        name: The data set. For a language model, a text.
        validation: Number of training examples to hold out for validation. A text has a
            validation file instead.
        label_noise: Fraction of the training labels that are redrawn at random.
        examples: Use only this many training examples, or words of a text.
        words: Vocabulary size of a text: keep the most frequent words, map the rest to ``<unk>``.
        size: Downsample images to this height and width.
        augment: Apply random crops (padded by ``pad``) and flips to images.
        pad: Padding for ``augment``, in pixels.
        workers: Processes that decode images stored as files.
    """

    name: str = "fashion-mini"
    validation: int = 0
    label_noise: float = 0.0
    examples: int | None = None
    words: int | None = None
    size: int | None = None
    augment: bool = True
    pad: int = 4
    workers: int = 4

    def __post_init__(self) -> None:
        _require(
            0 <= self.label_noise <= 1,
            f"data.label_noise must be between 0 and 1, got {self.label_noise}.",
        )
        _require(
            self.validation >= 0, f"data.validation must be non-negative, got {self.validation}."
        )
        _require(
            self.examples is None or self.examples > self.validation,
            f"data.examples must be greater than data.validation, got {self.examples} and "
            f"{self.validation}.",
        )
        _require(
            self.words is None or self.words >= 2,
            f"data.words must be at least 2, got {self.words}.",
        )
        _require(
            self.size is None or self.size >= 1, f"data.size must be at least 1, got {self.size}."
        )
        for name in ("pad", "workers"):
            value = getattr(self, name)
            _require(value >= 0, f"data.{name} must be non-negative, got {value}.")


# Settings of Data that apply only to images, with the values they must have for a text.
IMAGE_SETTINGS = {
    "validation": 0,
    "label_noise": 0.0,
    "size": None,
    "augment": False,
    "pad": 4,
    "workers": 4,
}


@dataclass(frozen=True)
class Optimizer:
    """The optimizer. With an average, AdamW is Gadam, PadamW is GadamX, and SGD is SWA.

    Args:
        name: The method.
        lr: Initial learning rate.
        weight_decay: Decoupled for adamw, padamw and schedule-free; L2 for the others.
        momentum: Momentum of sgd.
        betas: Decay rates of the moments of the Adam family.
        eps: Added to the denominator of the Adam family.
        amsgrad: Use the running maximum of the second moment.
        partial: Exponent p of padam and padamw.
        form: "official" or "paper" update of padam and padamw.
        lookahead: Wrap the optimizer in Lookahead. With an averaged AdamW or PadamW, Lookahead
            ends where averaging starts (Gadam + LH).
        lookahead_k: Steps between Lookahead's synchronizations.
        lookahead_alpha: Lookahead's interpolation factor.
    """

    name: Literal["sgd", "asgd", "adam", "adamw", "padam", "padamw", "ranger", "schedule-free"] = (
        "sgd"
    )
    lr: float = 0.1
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False
    partial: float = 0.125
    form: Literal["official", "paper"] = "official"
    lookahead: bool = False
    lookahead_k: int = 5
    lookahead_alpha: float = 0.5

    def __post_init__(self) -> None:
        _require(self.lr >= 0, f"lr must be non-negative, got {self.lr}.")
        _require(
            self.weight_decay >= 0, f"weight_decay must be non-negative, got {self.weight_decay}."
        )
        _require(
            not self.lookahead or self.name not in ("ranger", "schedule-free"),
            f"{self.name} does not support lookahead. Set optimizer.lookahead=false.",
        )


@dataclass(frozen=True)
class Schedule:
    """The learning rate per epoch; it is constant within an epoch.

    Args:
        name: constant; linear (decays to ``final`` over the second half); linear-ia (decays to
            ``final`` until averaging starts, then constant); frozen-linear (linear, frozen where
            averaging starts); step; cosine (decays to ``final``).
        final: The last factor. None means the paper's: 0.5 for linear-ia, 0.01 for linear, 0 for
            cosine.
        milestones: Epochs at which step multiplies the learning rate by 0.1.
    """

    name: Literal["constant", "linear", "linear-ia", "frozen-linear", "step", "cosine"] = "constant"
    final: float | None = None
    milestones: tuple[int, ...] = ()


@dataclass(frozen=True)
class Average:
    """Which iterates enter the average.

    Args:
        start: Epochs before averaging. With ``every="epoch"`` the first sample is taken after
            ``start + 1`` epochs. Or a trigger: "plateau" (GadamAuto, SWA-Auto) or "non-monotone"
            (NT-ASGD).
        every: "epoch", or a number of steps.
        weighting: "mean", "ema" with ``decay``, or "window" (LAWA) of the last ``size`` samples.
        decay: Decay of "ema".
        size: Samples in "window".
        patience: Epochs without improvement before a trigger fires.
    """

    start: int | Literal["plateau", "non-monotone"] = 0
    every: int | Literal["epoch"] = "epoch"
    weighting: Literal["mean", "ema", "window"] = "mean"
    decay: float = 0.99
    size: int = 5
    patience: int = 10

    def __post_init__(self) -> None:
        _require(
            not isinstance(self.start, int) or self.start >= 0,
            f"average.start must be non-negative, got {self.start}.",
        )
        _require(
            not isinstance(self.every, int) or self.every >= 1,
            f"average.every must be at least 1, got {self.every}.",
        )


@dataclass(frozen=True)
class Language:
    """How a language model trains on a text, after Merity, Keskar and Socher (2017).

    Args:
        bptt: Words that gradients are propagated through.
        vary_bptt: Draw the length of each step around ``bptt`` (sometimes around half of it), and
            scale the learning rate in proportion.
        dropout: Dropout of the last layer's outputs.
        dropout_hidden: Dropout between layers.
        dropout_input: Dropout of embedded words.
        dropout_words: Dropout of whole words.
        weight_drop: Dropout of recurrent weights.
        ar_alpha: Weight α of activation regularization (AR), the mean square of the last layer's
            outputs.
        tar_beta: Weight β of temporal activation regularization (TAR), the mean square of their
            change from word to word.
    """

    bptt: int = 70
    vary_bptt: bool = True
    dropout: float = 0.4
    dropout_hidden: float = 0.25
    dropout_input: float = 0.65
    dropout_words: float = 0.1
    weight_drop: float = 0.5
    ar_alpha: float = 2.0
    tar_beta: float = 1.0

    def __post_init__(self) -> None:
        least = 10 if self.vary_bptt else 1
        _require(
            self.bptt >= least,
            f"language.bptt must be at least {least}, got {self.bptt}."
            + (" Or set language.vary_bptt=false." if self.vary_bptt else ""),
        )
        for name, p in self.dropouts.items():
            _require(0 <= p < 1, f"language.{name} must be at least 0 and less than 1, got {p}.")
        for name in ("ar_alpha", "tar_beta"):
            value = getattr(self, name)
            _require(value >= 0, f"language.{name} must be non-negative, got {value}.")

    @property
    def dropouts(self) -> dict[str, float]:
        """The dropout rates that the network takes."""
        names = ("dropout", "dropout_hidden", "dropout_input", "dropout_words", "weight_drop")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class OwnTask:
    """A task that a user's Python file defines; see :class:`gadam.train.Task`.

    :func:`gadam.train.tasks.own.describe` fills in all fields from the file.

    Args:
        path: The file, such as "my_task.py", or an importable module, such as "package.module".
        function: The function in it that returns the task. It takes no arguments.
        metric: The metric that rates a run.
        mode: Whether a larger ("max") or smaller ("min") metric is better.
        code: The hash of the file and of the modules beside it that it imports. Empty if it is
            not known yet.
    """

    path: str
    function: str = "task"
    metric: str = "accuracy"
    mode: Mode = "max"
    code: str = ""


@dataclass(frozen=True)
class Recipe:
    """A training run, up to its seed.

    Args:
        name: The recipe's name.
        model: The network.
        data: The training data.
        optimizer: The optimizer.
        schedule: The learning rate per epoch.
        average: Which iterates to average; None for no average.
        language: Settings of a language model; None for image classification.
        task: A user's own task, which has its own model and data; None for the built-in tasks.
        epochs: The budget. A plateau trigger may end training earlier.
        batch_size: Examples per step. For a text, the number of columns read in parallel.
        accumulate: Micro-batches per step, to save memory.
        clip_grad_norm: Largest norm of the gradient.
        amp: Compute in "bf16" or "fp16" under torch's autocast.
        compile: Compile the model with torch.compile.
        evaluate_every: Epochs between evaluations. The last epoch is always evaluated.
        evaluate_on: The splits to evaluate, if the task has them. Tuning leaves out "test".
        refresh_batchnorm: Recompute BatchNorm statistics of each point before evaluating it.
        keep_iterates: Keep the weights of the last N epochs, one file each, for `gadam analyze`.
    """

    name: str
    model: str
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    average: Average | None = None
    language: Language | None = None
    task: OwnTask | None = None
    epochs: int = 20
    batch_size: int = 128
    accumulate: int = 1
    clip_grad_norm: float | None = None
    amp: Literal["bf16", "fp16"] | None = None
    compile: bool = False
    evaluate_every: int = 1
    evaluate_on: tuple[Literal["validation", "test"], ...] = ("validation", "test")
    refresh_batchnorm: bool = True
    keep_iterates: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "evaluate_every"):
            value = getattr(self, name)
            _require(value >= 1, f"{name} must be at least 1, got {value}.")
        _require(
            self.clip_grad_norm is None or self.clip_grad_norm > 0,
            f"clip_grad_norm must be positive, got {self.clip_grad_norm}.",
        )
        _require(
            self.keep_iterates >= 0,
            f"keep_iterates must be non-negative, got {self.keep_iterates}.",
        )
        _require(bool(self.evaluate_on), "evaluate_on must name validation, test, or both.")
        if self.average is not None and isinstance(self.average.start, int):
            _require(
                self.average.start < self.epochs,
                f"average.start={self.average.start} leaves nothing to average in {self.epochs} "
                "epochs. Set average.start too.",
            )
        _require(
            self.optimizer.name != "asgd" or self.average is not None,
            "asgd is SGD with an average. Set average.start.",
        )
        _require(
            self.optimizer.name != "schedule-free" or self.average is None,
            "schedule-free has its own average. Remove `average`.",
        )
        if self.schedule.name in ("linear-ia", "frozen-linear"):
            _require(
                self.average is not None and isinstance(self.average.start, int),
                f"The schedule {self.schedule.name!r} needs an average with a fixed start. Set "
                "average.start to a number of epochs.",
            )
        if self.average is not None and not isinstance(self.average.start, int):
            _require(
                self.data.validation > 0 or self.language is not None or self.task is not None,
                f"average.start={self.average.start!r} needs a validation metric. Set "
                "data.validation.",
            )
            _require(
                self.evaluate_every == 1,
                f"average.start={self.average.start!r} needs evaluate_every=1.",
            )
        if self.language is not None:
            for name, required in IMAGE_SETTINGS.items():
                _require(
                    getattr(self.data, name) == required,
                    f"data.{name} applies to images. Leave it at {required} for a text.",
                )
            _require(
                not (self.compile and self.language.vary_bptt),
                "compile=true needs language.vary_bptt=false: otherwise every length is compiled "
                "separately.",
            )

    @property
    def metric(self) -> str:
        """The metric that rates the run."""
        if self.task is not None:
            return self.task.metric
        return "accuracy" if self.language is None else "perplexity"

    @property
    def mode(self) -> Mode:
        """Whether a larger ("max") or smaller ("min") :attr:`metric` is better."""
        if self.task is not None:
            return self.task.mode
        return "max" if self.language is None else "min"

    @property
    def method(self) -> str:
        """The paper's name for the method."""
        base = {"sgd": "SGD", "asgd": "ASGD", "adam": "Adam", "adamw": "AdamW", "padam": "Padam"}
        base |= {"padamw": "PadamW", "ranger": "Ranger", "schedule-free": "Schedule-Free AdamW"}
        name = base[self.optimizer.name]
        if self.average is not None:
            averaged = {"SGD": "SWA", "AdamW": "Gadam", "PadamW": "GadamX", "ASGD": "ASGD"}
            if self.language is not None:  # the paper's language models use L2
                averaged |= {"Adam": "Gadam", "Padam": "GadamX"}
            if self.average.weighting == "mean":
                name = averaged.get(name, f"{name}-IA")
            else:
                name += " + " + {"ema": "EMA", "window": "LAWA"}[self.average.weighting]
            if self.average.start == "plateau":
                name += "-Auto"
            if self.average.start == "non-monotone":
                name = f"NT-{name}"
        return f"{name} + LH" if self.optimizer.lookahead else name

    def learning_rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch.

        Args:
            epoch: Counted from 0.
        """
        return self.optimizer.lr * self._rate_factor(epoch)

    def _rate_factor(self, epoch: int) -> float:
        name, total = self.schedule.name, self.epochs
        given = {} if self.schedule.final is None else {"final": self.schedule.final}
        start = self.average.start if self.average is not None else None
        if name == "linear":
            return schedule.linear(epoch, total, **given)
        if name == "linear-ia":
            # An average that starts at once leaves nothing to decay before its start.
            return schedule.linear_for_averaging(epoch, max(int(start or 0), 1), **given)
        if name == "frozen-linear":
            return schedule.frozen_linear(epoch, total, int(start or 0), **given)
        if name == "step":
            return schedule.step(epoch, self.schedule.milestones)
        if name == "cosine":
            final = self.schedule.final or 0.0
            return final + (1 - final) * (1 + math.cos(math.pi * epoch / total)) / 2
        return schedule.constant(epoch)

    def to_dict(self) -> Document:
        """Return the recipe as plain data."""
        plain: Document = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, values: Document) -> Recipe:
        """Return the recipe that :meth:`to_dict` wrote.

        Args:
            values: Plain data. Settings that are left out have their defaults.

        Raises:
            RecipeError: A setting is unknown, missing or invalid.
        """
        try:
            recipe: Recipe = _build(cls, values)
        except (TypeError, AttributeError) as error:  # of a value with the wrong type
            raise RecipeError(f"The recipe is not what gadam writes ({error}).") from None
        return recipe


# ---------------------------------------------------------------------------------- plain data


def _build(cls: type, values: Document) -> Any:
    hints = _hints(cls)
    unknown = set(values) - set(hints)
    _require(
        not unknown,
        f"The recipe was written by another version of gadam: it has {sorted(unknown)}.",
    )
    missing = [name for name in _required(cls) if name not in values]
    _require(not missing, f"The recipe has no {' and no '.join(missing)}.")
    return cls(**{name: _restore(hints[name], value) for name, value in values.items()})


def _required(cls: Any) -> list[str]:
    return [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]


def _restore(hint: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return _build(_dataclass_in(hint), value)
    return tuple(value) if isinstance(value, list) else value


def differences(a: Recipe, b: Recipe) -> list[str]:
    """Return the settings that differ, each as `path: a → b`.

    Args:
        a: One recipe.
        b: Another.
    """
    left, right = dict(_leaves(a)), dict(_leaves(b))
    return [
        f"{path}: {left.get(path)} → {right.get(path)}"
        for path in dict.fromkeys([*left, *right])
        if left.get(path) != right.get(path)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not is_dataclass(value):
        yield path, value
        return
    for f in fields(value):
        yield from _leaves(getattr(value, f.name), f"{path}.{f.name}" if path else f.name)


# ---------------------------------------------------------------------------------- overriding


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """Return the recipe with some settings replaced.

    Args:
        recipe: The recipe to derive from.
        settings: Each is ``key=value``. A key is a path such as ``optimizer.lr``, or its last name
            if that is unique (``lr``).

    Raises:
        RecipeError: A key is unknown or a value is invalid.
    """
    values = asdict(recipe)  # validated once all are set: the order must not matter
    for setting in settings:
        key, equals, text = setting.partition("=")
        _require(bool(equals), f"--set takes KEY=VALUE, got {setting!r}.")
        *outer, name = _path(key.strip())
        target, cls = values, Recipe
        for section in outer:
            cls = _dataclass_in(_hints(cls)[section])
            _require(
                section != "language" or target[section] is not None,
                f"{recipe.name} trains on images. It has no language settings.",
            )
            if target[section] is None:  # add an average to a recipe without one
                target[section] = asdict(cls())
            target = target[section]
        target[name] = _parse(text.strip(), _hints(cls)[name], name)
    return Recipe.from_dict(values)


def applies_to(setting: str, recipe: Recipe) -> bool:
    """Return True if the recipe has what this ``key=value`` sets: an average, a text, images.

    Args:
        setting: As for :func:`override`.
        recipe: The recipe in question.
    """
    first, *rest = _path(setting.partition("=")[0].strip())
    if recipe.task is not None and first in ("model", "data", "language"):
        return False  # the user's file decides
    if first in ("average", "language"):
        return getattr(recipe, first) is not None
    return recipe.language is None or not (first == "data" and rest[0] in IMAGE_SETTINGS)


def _path(key: str) -> list[str]:
    paths = _paths(Recipe)
    # "name" alone is ambiguous: the optimizer, the data set and the schedule have one too.
    matching = [p for p in paths if p == key != "name"] or [
        p for p in paths if p.split(".")[-1] == key
    ]
    if len(matching) == 1:
        return matching[0].split(".")
    if matching:
        raise RecipeError(f"{key!r} is ambiguous. Use one of {', '.join(matching)}.")
    near = did_you_mean(key, [*paths, *(p.split(".")[-1] for p in paths)])
    hint = f"Did you mean {near!r}?" if near else f"Use one of {', '.join(paths)}."
    raise RecipeError(f"A recipe has no setting {key!r}. {hint}")


@cache
def _paths(cls: Any) -> tuple[str, ...]:
    paths = []
    for name, hint in _hints(cls).items():
        inner = _dataclass_in(hint)
        if inner is OwnTask:  # the user's file decides
            continue
        paths += [name] if inner is None else [f"{name}.{path}" for path in _paths(inner)]
        if inner is not None and type(None) in get_args(hint):
            paths.append(name)
    return tuple(paths)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _dataclass_in(hint: Any) -> Any:
    return next((h for h in (hint, *get_args(hint)) if is_dataclass(h)), None)


def _parse(text: str, hint: Any, name: str) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        try:
            return _parse_as(text, option)
        except ValueError:
            continue
    words = [str(w) for o in options if get_origin(o) is Literal for w in get_args(o)]
    near = did_you_mean(text, words)
    suggestion = f" Did you mean {near!r}?" if near else ""
    expected = " or ".join(_describe(option) for option in options)
    raise RecipeError(f"{name} must be {expected}, got {text!r}.{suggestion}")


def _parse_as(text: str, kind: Any) -> Any:
    if kind is type(None):
        return None if text.lower() == "none" else _fail()
    if kind is bool:
        words = {"true": True, "yes": True, "false": False, "no": False}
        return words[text.lower()] if text.lower() in words else _fail()
    if kind is float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    if kind in (int, str):
        return kind(text)
    if get_origin(kind) is Literal:
        return text if text in get_args(kind) else _fail()
    if get_origin(kind) is tuple:
        inner, *more = get_args(kind)
        parts = [part for part in text.strip("()[]").split(",") if part.strip()]
        if more and more[0] is not Ellipsis and len(parts) != len(get_args(kind)):
            raise ValueError
        return tuple(_parse_as(part.strip(), inner) for part in parts)
    return _fail()


def _fail() -> typing.NoReturn:
    raise ValueError


def _describe(kind: Any) -> str:
    if kind is type(None):
        return "none"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "numbers separated by commas"
    named = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
    return named.get(kind, "a group of settings (set them one by one)")
