"""Recipes: everything that decides a training run, as a frozen value.

A recipe is derived from another by :func:`dataclasses.replace`, or by name as on the command line:

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
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from gadam._names import did_you_mean

__all__ = [
    "Average",
    "Data",
    "Language",
    "Optimizer",
    "Recipe",
    "RecipeError",
    "Schedule",
    "concerns",
    "differences",
    "from_dict",
    "override",
    "to_dict",
]


class RecipeError(ValueError):
    """A recipe that cannot be: the message says what is wrong, and what to do."""


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RecipeError(what)


@dataclass(frozen=True)
class Data:
    """What to learn from.

    Args:
        name: the data set; a language model's is a text
        validation: how many training examples to hold out for validation; a text has a part for it
        label_noise: the fraction of the training labels that is redrawn at random
        examples: use only so many of the training examples, or of the words of a text
        words: of a text only so many different ones, the most frequent; others are ``<unk>``
        size: pool the pictures to this size
        augment: random crops (padded by ``pad``) and flips, of pictures
        pad: see ``augment``
        workers: processes that decode pictures, where they come from files
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
            0 <= self.label_noise <= 1, f"label_noise must lie in [0, 1], not {self.label_noise}"
        )
        _require(self.validation >= 0, f"validation must not be negative, as {self.validation} is")
        _require(
            self.examples is None or self.examples > self.validation,
            f"examples ({self.examples}) must be more than those held out ({self.validation})",
        )
        _require(
            self.words is None or self.words >= 2,
            f"data.words must be at least 2, not {self.words}",
        )
        _require(
            self.size is None or self.size >= 1, f"data.size must be at least 1, not {self.size}"
        )
        for name in ("pad", "workers"):
            _require(
                getattr(self, name) >= 0, f"data.{name} must not be negative: {getattr(self, name)}"
            )


# What of Data is of pictures alone, and what it is where there are none.
PICTURE_SETTINGS = {
    "validation": 0,
    "label_noise": 0.0,
    "size": None,
    "augment": False,
    "pad": 4,
    "workers": 4,
}


@dataclass(frozen=True)
class Optimizer:
    """Whose iterates. With an average AdamW is Gadam, PadamW is GadamX, SGD is SWA.

    Args:
        name: the method
        lr: initial learning rate
        weight_decay: decoupled for adamw, padamw and schedule-free, L2 for the others
        momentum: of sgd
        betas, eps, amsgrad: of the Adam family
        partial, form: of padam and padamw
        lookahead: put Lookahead around it; around AdamW and PadamW with an average it ends where
            averaging starts (Gadam + LH)
        lookahead_k, lookahead_alpha: its settings
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
        _require(self.lr >= 0, f"lr must not be negative, as {self.lr} is")
        _require(self.weight_decay >= 0, f"weight_decay must not be negative: {self.weight_decay}")
        _require(
            not self.lookahead or self.name not in ("ranger", "schedule-free"),
            f"{self.name} cannot have a Lookahead around it",
        )


@dataclass(frozen=True)
class Schedule:
    """The learning rate over epochs, constant within one.

    Args:
        name: constant; linear (to ``final`` over the second half); linear-ia (to ``final`` until
            averaging starts, then constant); frozen-linear (linear, frozen where averaging starts);
            step; cosine (to ``final``)
        final: the last factor; None is the paper's: 0.5 for linear-ia, 0.01 for linear, 0 for cosine
        milestones: epochs at which step multiplies the rate by 0.1
    """

    name: Literal["constant", "linear", "linear-ia", "frozen-linear", "step", "cosine"] = "constant"
    final: float | None = None
    milestones: tuple[int, ...] = ()


@dataclass(frozen=True)
class Average:
    """Which iterates enter the average.

    Args:
        start: the epochs before averaging: the first sample of ``every="epoch"`` is taken after
            ``start + 1`` epochs. Or "plateau" (GadamAuto, SWA-Auto) or "non-monotone" (NT-ASGD)
        every: "epoch", or a number of steps
        weighting: "mean"; "ema" with ``decay``; "window" (LAWA) of the last ``size`` samples
        decay, size: see ``weighting``
        patience: of the triggers
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
            f"average.start must not be negative, as {self.start} is",
        )
        _require(
            not isinstance(self.every, int) or self.every >= 1,
            f"average.every must be at least 1, not {self.every}",
        )


@dataclass(frozen=True)
class Language:
    """How a language model learns from a text: by the methods of Merity, Keskar and Socher (2017).

    Args:
        bptt: words that gradients go back through
        vary_bptt: draw each step's length anew around ``bptt`` (now and then around half of it), with the
            learning rate in proportion
        dropout: of the last layer's outputs
        dropout_hidden: between layers
        dropout_input: of the embedded words
        dropout_words: of whole words
        weight_drop: of recurrent weights
        activation: α of activation regularisation (AR): α times the mean square of the last layer's outputs
            is added to the loss
        slowness: β of temporal activation regularisation (TAR): β times the mean square of their change from
            word to word, likewise
    """

    bptt: int = 70
    vary_bptt: bool = True
    dropout: float = 0.4
    dropout_hidden: float = 0.25
    dropout_input: float = 0.65
    dropout_words: float = 0.1
    weight_drop: float = 0.5
    activation: float = 2.0
    slowness: float = 1.0

    def __post_init__(self) -> None:
        least = 10 if self.vary_bptt else 1
        _require(
            self.bptt >= least,
            f"language.bptt must be at least {least}, not {self.bptt}"
            + (" (or set language.vary_bptt=false)" if self.vary_bptt else ""),
        )
        for name, p in self.dropouts.items():
            _require(0 <= p < 1, f"language.{name} must lie in [0, 1), not {p}")
        for name in ("activation", "slowness"):
            value = getattr(self, name)
            _require(value >= 0, f"language.{name} must not be negative, as {value} is")

    @property
    def dropouts(self) -> dict[str, float]:
        """Those that the network takes."""
        names = ("dropout", "dropout_hidden", "dropout_input", "dropout_words", "weight_drop")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Recipe:
    """A training run, up to its seed.

    Args:
        name: what it is called
        model: the network
        data, optimizer, schedule, average: see there
        language: of a language model, see there; None where pictures are classified
        epochs: the budget (a plateau may end it earlier)
        batch_size: examples in a step; of a text the places where it is read at a time
        accumulate: parts into which a batch is split to save memory
        clip: the largest norm of the gradient
        amp: compute in "bf16" or "fp16" where torch's autocast does
        compile: torch.compile the model
        evaluate_every: epochs between evaluations; the last one always is
        refresh_batchnorm: give both points statistics of their own before they are evaluated
        keep: keep the weights of the last so many epochs, one file each, for `gadam analyse`
    """

    name: str
    model: str
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    average: Average | None = None
    language: Language | None = None
    epochs: int = 20
    batch_size: int = 128
    accumulate: int = 1
    clip: float | None = None
    amp: Literal["bf16", "fp16"] | None = None
    compile: bool = False
    evaluate_every: int = 1
    refresh_batchnorm: bool = True
    keep: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "evaluate_every"):
            _require(
                getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}"
            )
        _require(self.clip is None or self.clip > 0, f"clip must be positive, not {self.clip}")
        _require(self.keep >= 0, f"keep must not be negative, as {self.keep} is")
        if self.average is not None and isinstance(self.average.start, int):
            _require(
                self.average.start < self.epochs,
                f"average.start={self.average.start} leaves nothing to average in {self.epochs} epochs: "
                "set average.start too",
            )
        _require(
            self.optimizer.name != "asgd" or self.average is not None,
            "asgd is SGD with an average: say when it starts, by average.start",
        )
        _require(
            self.optimizer.name != "schedule-free" or self.average is None,
            "schedule-free has an average of its own: leave out `average`",
        )
        if self.schedule.name in ("linear-ia", "frozen-linear"):
            _require(
                self.average is not None and isinstance(self.average.start, int),
                f"the schedule {self.schedule.name!r} needs an average with a fixed start: say "
                "average.start",
            )
        if self.average is not None and not isinstance(self.average.start, int):
            _require(
                self.data.validation > 0 or self.language is not None,
                f"average.start={self.average.start!r} needs a validation metric: set data.validation",
            )
            _require(
                self.evaluate_every == 1,
                f"average.start={self.average.start!r} needs evaluate_every=1",
            )
        if self.language is not None:
            for name, usual in PICTURE_SETTINGS.items():
                _require(
                    getattr(self.data, name) == usual,
                    f"data.{name} is of pictures: with a text leave it at {usual}",
                )
            _require(
                not (self.compile and self.language.vary_bptt),
                "compile=true needs language.vary_bptt=false: every length would be compiled anew",
            )

    @property
    def metric(self) -> str:
        """What it is judged by."""
        return "accuracy" if self.language is None else "perplexity"

    @property
    def method(self) -> str:
        """What the paper would call it."""
        base = {"sgd": "SGD", "asgd": "ASGD", "adam": "Adam", "adamw": "AdamW", "padam": "Padam"}
        base |= {"padamw": "PadamW", "ranger": "Ranger", "schedule-free": "Schedule-Free AdamW"}
        name = base[self.optimizer.name]
        if self.average is not None:
            averaged = {"SGD": "SWA", "AdamW": "Gadam", "PadamW": "GadamX", "ASGD": "ASGD"}
            if self.language is not None:  # where the paper's own have L2
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


# ----------------------------------------------------------------------------- to and from plain data


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON knows it."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return plain


def from_dict(values: dict[str, Any]) -> Recipe:
    """The recipe that :func:`to_dict` gave."""
    recipe: Recipe = _build(Recipe, values)
    return recipe


def _build(cls: type, values: dict[str, Any]) -> Any:
    hints = _hints(cls)
    unknown = set(values) - set(hints)
    _require(not unknown, f"a recipe of another version of gadam: it has {sorted(unknown)}")
    return cls(**{name: _restore(hints[name], value) for name, value in values.items()})


def _restore(hint: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return _build(_dataclass_in(hint), value)
    return tuple(value) if isinstance(value, list) else value


def differences(a: Recipe, b: Recipe) -> list[str]:
    """What differs, as `path: a → b`."""
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


# --------------------------------------------------------------------------------------- overriding


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """The recipe with some values replaced.

    Args:
        recipe: to derive from
        settings: each ``key=value``; a key is a path such as ``optimizer.lr``, or its last part where
            that is the only one of its name (``lr``)
    """
    values = asdict(recipe)  # checked when all is set: the order must not matter
    for setting in settings:
        key, equals, text = setting.partition("=")
        _require(bool(equals), f"--set takes key=value, not {setting!r}")
        *outer, name = _path(key.strip())
        target, cls = values, Recipe
        for part in outer:
            cls = _dataclass_in(_hints(cls)[part])
            _require(
                part != "language" or target[part] is not None,
                f"{recipe.name} learns from pictures: it has no language settings",
            )
            if target[part] is None:  # an average for a recipe that had none
                target[part] = asdict(cls())
            target = target[part]
        target[name] = _parse(text.strip(), _hints(cls)[name], name)
    return from_dict(values)


def concerns(setting: str, recipe: Recipe) -> bool:
    """Whether this ``key=value`` is about something that the recipe has: an average, a text, pictures."""
    first, *rest = _path(setting.partition("=")[0].strip())
    if first in ("average", "language"):
        return getattr(recipe, first) is not None
    return recipe.language is None or not (first == "data" and rest[0] in PICTURE_SETTINGS)


def _path(key: str) -> list[str]:
    paths = _paths(Recipe)
    # "name" alone could mean the optimiser's, the data set's or the schedule's: say which.
    matching = [p for p in paths if p == key != "name"] or [
        p for p in paths if p.split(".")[-1] == key
    ]
    if len(matching) == 1:
        return matching[0].split(".")
    if matching:
        raise RecipeError(f"{key!r} could be any of {', '.join(matching)}: say which")
    near = did_you_mean(key, [*paths, *(p.split(".")[-1] for p in paths)])
    hint = f": did you mean {near!r}?" if near else f" (there are {', '.join(paths)})"
    raise RecipeError(f"a recipe has no {key!r}{hint}")


@cache
def _paths(cls: Any) -> tuple[str, ...]:
    paths = []
    for name, hint in _hints(cls).items():
        inner = _dataclass_in(hint)
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
    """The text as a value of this type."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        try:
            return _parse_as(text, option)
        except ValueError:
            continue
    words = [str(w) for o in options if get_origin(o) is Literal for w in get_args(o)]
    near = did_you_mean(text, words)
    hint_text = f": did you mean {near!r}?" if near else ""
    expected = " or ".join(_describe(option) for option in options)
    raise RecipeError(f"{name} must be {expected}, not {text!r}{hint_text}")


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
    return named.get(kind, "a value (set its parts)")
