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
from gadam._names import did_you_mean, is_path
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
    "suggest_setting",
]


Mode = Literal["max", "min"]  # whether a larger or a smaller metric is better


class RecipeError(UserError, ValueError):
    """A recipe is invalid. The message says what is wrong, and what to do.

    Args:
        *problems: One sentence per problem. Several become a list in one message.

    Attributes:
        problems: The sentences.

    Example:
        >>> print(RecipeError("epochs must be at least 1, got 0.", "lr must be a number."))
        Fix 2 settings:
        - epochs must be at least 1, got 0.
        - lr must be a number.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        listed = "".join(f"\n- {problem}" for problem in problems)
        super().__init__(
            problems[0] if len(problems) == 1 else f"Fix {len(problems)} settings:{listed}"
        )


def _unless(condition: bool, message: str) -> Iterator[str]:
    if not condition:
        yield message


class _Settings:
    """Base class of settings that check themselves and report all problems at once."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise RecipeError(*problems)

    def _problems(self) -> Iterator[str]:
        """Iterate over what is wrong, one sentence each."""
        return iter(())


@dataclass(frozen=True)
class Data(_Settings):
    """The training data.

    Args:
        name: The data set, or the path of your own: a folder of images with a subfolder per class,
            an ``.npz`` file, or, for a language model, a folder of texts.
        validation: Training examples to hold out for validation: a number, or a fraction below 1.
            A data set with validation images of its own uses these. A text has a validation file.
        label_noise: Fraction of the training labels that are redrawn at random.
        examples: Use only this many training examples, or words of a text.
        words: Vocabulary size of a text: keep the most frequent words, map the rest to ``<unk>``.
        size: Resize images to this height and width.
        augment: Apply random crops (padded by ``pad``) and flips to images.
        pad: Padding for ``augment``, in pixels.
        workers: Processes that decode images stored as files.
    """

    name: str = "fashion-mini"
    validation: int | float = 0
    label_noise: float = 0.0
    examples: int | None = None
    words: int | None = None
    size: int | None = None
    augment: bool = True
    pad: int = 4
    workers: int = 4

    def _problems(self) -> Iterator[str]:
        yield from _unless(
            0 <= self.label_noise <= 1,
            f"data.label_noise must be between 0 and 1, got {self.label_noise}.",
        )
        yield from _unless(
            self.validation >= 0, f"data.validation must be non-negative, got {self.validation}."
        )
        yield from _unless(
            self.validation < 1 or self.validation == int(self.validation),
            f"data.validation must be a whole number or a fraction below 1, got {self.validation}.",
        )
        yield from _unless(
            self.examples is None or self.examples > self.validation,
            f"data.examples must be greater than data.validation, got {self.examples} and "
            f"{self.validation}.",
        )
        yield from _unless(
            self.words is None or self.words >= 2,
            f"data.words must be at least 2, got {self.words}.",
        )
        yield from _unless(
            self.size is None or self.size >= 1, f"data.size must be at least 1, got {self.size}."
        )
        for name in ("pad", "workers"):
            value = getattr(self, name)
            yield from _unless(value >= 0, f"data.{name} must be non-negative, got {value}.")


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
class Optimizer(_Settings):
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

    def _problems(self) -> Iterator[str]:
        yield from _unless(self.lr >= 0, f"lr must be non-negative, got {self.lr}.")
        yield from _unless(
            self.weight_decay >= 0, f"weight_decay must be non-negative, got {self.weight_decay}."
        )
        yield from _unless(
            not self.lookahead or self.name not in ("ranger", "schedule-free"),
            f"{self.name} does not support lookahead. Set optimizer.lookahead=false.",
        )


@dataclass(frozen=True)
class Schedule(_Settings):
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
class Average(_Settings):
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

    def _problems(self) -> Iterator[str]:
        yield from _unless(
            not isinstance(self.start, int) or self.start >= 0,
            f"average.start must be non-negative, got {self.start}.",
        )
        yield from _unless(
            not isinstance(self.every, int) or self.every >= 1,
            f"average.every must be at least 1, got {self.every}.",
        )


@dataclass(frozen=True)
class Language(_Settings):
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

    def _problems(self) -> Iterator[str]:
        least = 10 if self.vary_bptt else 1
        yield from _unless(
            self.bptt >= least,
            f"language.bptt must be at least {least}, got {self.bptt}."
            + (" Or set language.vary_bptt=false." if self.vary_bptt else ""),
        )
        for name, p in self.dropouts.items():
            yield from _unless(
                0 <= p < 1, f"language.{name} must be at least 0 and less than 1, got {p}."
            )
        for name in ("ar_alpha", "tar_beta"):
            value = getattr(self, name)
            yield from _unless(value >= 0, f"language.{name} must be non-negative, got {value}.")

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
class Recipe(_Settings):
    """A training run, up to its seed.

    Args:
        name: The recipe's name.
        model: The network, or "package.module:factory" for one of your own.
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
        refresh_batches: Training batches for these statistics before the last evaluation, which
            uses all of them; None for all of them always. Does not change the final metrics.
        keep_iterates: Keep the weights of the last N epochs, one file each, for `gadam analyze`.
        blocks: Store the mean of every N steps, to choose the start of the average after training
            with `gadam tails`; 0 stores nothing.
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
    refresh_batches: int | None = None
    keep_iterates: int = 0
    blocks: int = 0

    def _problems(self) -> Iterator[str]:
        for section in (self.data, self.optimizer, self.schedule, self.average, self.language):
            if section is not None:
                yield from section._problems()
        for name in ("epochs", "batch_size", "accumulate", "evaluate_every"):
            value = getattr(self, name)
            yield from _unless(value >= 1, f"{name} must be at least 1, got {value}.")
        yield from _unless(
            self.clip_grad_norm is None or self.clip_grad_norm > 0,
            f"clip_grad_norm must be positive, got {self.clip_grad_norm}.",
        )
        yield from _unless(
            self.keep_iterates >= 0,
            f"keep_iterates must be non-negative, got {self.keep_iterates}.",
        )
        yield from _unless(self.blocks >= 0, f"blocks must be non-negative, got {self.blocks}.")
        yield from _unless(
            self.refresh_batches is None or self.refresh_batches >= 1,
            f"refresh_batches must be at least 1, got {self.refresh_batches}.",
        )
        yield from _unless(
            bool(self.evaluate_on), "evaluate_on must name validation, test, or both."
        )
        if self.average is not None and isinstance(self.average.start, int):
            yield from _unless(
                self.average.start < self.epochs or self.epochs < 1,
                f"average.start={self.average.start} leaves nothing to average in {self.epochs} "
                "epochs. Set average.start too.",
            )
        yield from _unless(
            self.optimizer.name != "asgd" or self.average is not None,
            "asgd is SGD with an average. Set average.start.",
        )
        yield from _unless(
            self.optimizer.name != "schedule-free" or self.average is None,
            "schedule-free has its own average. Remove `average`.",
        )
        if self.schedule.name in ("linear-ia", "frozen-linear"):
            yield from _unless(
                self.average is not None and isinstance(self.average.start, int),
                f"The schedule {self.schedule.name!r} needs an average with a fixed start. Set "
                "average.start to a number of epochs.",
            )
        if self.average is not None and not isinstance(self.average.start, int):
            yield from _unless(
                self.data.validation > 0 or self.language is not None or self.task is not None,
                f"average.start={self.average.start!r} needs a validation metric. Set "
                "data.validation.",
            )
            yield from _unless(
                self.evaluate_every == 1,
                f"average.start={self.average.start!r} needs evaluate_every=1.",
            )
            yield from _unless(
                self.refresh_batches is None,
                f"average.start={self.average.start!r} needs refresh_batches=none: any evaluation "
                "may be the last.",
            )
        if self.language is not None:
            for name, required in IMAGE_SETTINGS.items():
                yield from _unless(
                    getattr(self.data, name) == required,
                    f"data.{name} applies to images. Leave it at {required} for a text.",
                )
            yield from _unless(
                not (self.compile and self.language.vary_bptt),
                "compile=true needs language.vary_bptt=false: otherwise every length is compiled "
                "separately.",
            )

    @property
    def code_path(self) -> str | None:
        """The file or module of the user's own task or network, or None if it is gadam's."""
        if self.task is not None:
            return self.task.path
        return self.model.rpartition(":")[0] or None

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


def _build(cls: Any, values: Document, *, check: bool = True) -> Any:
    hints = _hints(cls)
    unknown = set(values) - set(hints)
    if unknown:
        raise RecipeError(
            f"The recipe was written by another version of gadam: it has {sorted(unknown)}."
        )
    missing = [name for name in _required(cls) if name not in values]
    if missing:
        raise RecipeError(f"The recipe has no {' and no '.join(missing)}.")
    restored = {name: _restore(hints[name], value) for name, value in values.items()}
    if check:
        return cls(**restored)
    # The recipe checks its sections, to report the problems of all of them at once.
    made = object.__new__(cls)
    for f in fields(cls):
        object.__setattr__(made, f.name, restored.get(f.name, f.default))
    return made


def _required(cls: Any) -> list[str]:
    return [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]


def _restore(hint: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return _build(_dataclass_in(hint), value, check=False)
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

    A path as ``data.name`` is data of your own. The recipe's choices for its own data set do not
    apply to it: ``data.label_noise``, ``examples``, ``size`` and ``words`` have their defaults, and
    ``data.validation`` is 0.1 if the recipe needs validation data, unless they are set as well.

    Args:
        recipe: The recipe to derive from.
        settings: Each is ``key=value``. A key is a path such as ``optimizer.lr``, or its last name
            if that is unique (``lr``).

    Raises:
        RecipeError: Keys are unknown or values are invalid. It lists all problems.
    """
    values = asdict(recipe)  # validated once all are set: the order must not matter
    problems: list[str] = []
    given: set[str] = set()
    unclear: set[str] = set()  # settings whose value is not known
    for setting in settings:
        try:
            *outer, name = _path(setting)
            text = setting.partition("=")[2].strip()
            path = ".".join([*outer, name])
            given.add(path)
            unclear.add(path)
            target, cls = values, Recipe
            for section in outer:
                cls = _dataclass_in(_hints(cls)[section])
                if section == "language" and target[section] is None:
                    raise RecipeError(
                        f"{recipe.name} trains on images. It has no language settings."
                    )
                if target[section] is None:  # add an average to a recipe without one
                    target[section] = asdict(cls())
                target = target[section]
            target[name] = _parse(text, _hints(cls)[name], path)
            unclear.discard(path)
        except RecipeError as error:
            problems += error.problems
            unclear |= {p for p in _paths(Recipe) if f"'{p}'" in str(error)}
    if is_path(values["data"]["name"]) and not is_path(recipe.data.name):
        for name, default in _of_own_data(recipe).items():
            if f"data.{name}" not in given:
                values["data"][name] = default
    try:
        changed = Recipe.from_dict(values)
    except RecipeError as error:
        # A setting that could not be understood has its old value. Do not complain about that.
        problems += [p for p in error.problems if not any(path in p for path in unclear)]
    if problems:
        raise RecipeError(*dict.fromkeys(problems))
    return changed


def _of_own_data(recipe: Recipe) -> dict[str, Any]:
    validation = 0.1 if recipe.data.validation else 0
    return {
        "validation": validation,
        "label_noise": 0.0,
        "examples": None,
        "words": None,
        "size": None,
    }


def applies_to(setting: str, recipe: Recipe) -> bool:
    """Return True if the recipe has what this ``key=value`` sets: an average, a text, images.

    Args:
        setting: As for :func:`override`.
        recipe: The recipe in question.
    """
    first, *rest = _path(setting)
    if recipe.task is not None and first in ("model", "data", "language"):
        return False  # the user's file decides
    if first in ("average", "language"):
        return getattr(recipe, first) is not None
    return recipe.language is None or not (first == "data" and rest[0] in IMAGE_SETTINGS)


# Where users look for a setting, if not under its name.
_SYNONYMS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "opt": "optimizer.name",
    "scheduler": "schedule.name",
    "dataset": "data.name",
    "network": "model",
    "batch": "batch_size",
    "noise": "data.label_noise",
    "model.name": "model",
}
_COMMAND_OPTIONS = ("seed", "seeds", "out", "device", "threads", "scale")
# The setting that users mean by the name of its group.
_MAIN_SETTINGS = {"optimizer": "name", "schedule": "name", "data": "name", "average": "start"}
_AVERAGED = {"swa": "sgd", "gadam": "adamw", "gadamx": "padamw"}  # methods, and their optimizers


def _path(setting: str) -> list[str]:
    """Return the path of the setting in ``key=value``."""
    key, equals, text = (part.strip() for part in setting.partition("="))
    if not equals:
        raise RecipeError(f"--set takes KEY=VALUE, got {setting!r}.")
    paths = _paths(Recipe)
    # "name" alone is ambiguous: the optimizer, the data set and the schedule have one too.
    matching = [p for p in paths if p == key != "name"] or [
        p for p in paths if p.split(".")[-1] == key
    ]
    if key in _MAIN_SETTINGS and text.lower() != "none":
        raise RecipeError(_explain_group(key, text))
    if len(matching) == 1:
        return matching[0].split(".")
    if matching:
        raise RecipeError(f"{key!r} is ambiguous. Use one of {', '.join(matching)}.")
    if key in _COMMAND_OPTIONS:
        raise RecipeError(f"{key!r} is an option of the command. Use --{key} {text}.")
    near = _SYNONYMS.get(key) or did_you_mean(key, [*paths, *(p.split(".")[-1] for p in paths)])
    hint = f"Did you mean {near!r}?" if near else f"Use one of {', '.join(paths)}."
    raise RecipeError(f"A recipe has no setting {key!r}. {hint}")


def suggest_setting(key: str, text: str) -> str | None:
    """Return the ``key=value`` that a user may have meant, or None.

    Args:
        key: What the user typed, such as an unknown option of a command.
        text: The value.

    Example:
        >>> suggest_setting("learning_rate", "0.1"), suggest_setting("optimizer", "adamw")
        ('lr=0.1', 'optimizer.name=adamw')
    """
    if key in _MAIN_SETTINGS:
        return f"{key}.{_MAIN_SETTINGS[key]}={text}"
    suggestion = f"{_SYNONYMS.get(key, key)}={text}"
    try:
        _path(suggestion)
    except RecipeError:
        return None
    return suggestion


def _explain_group(group: str, text: str) -> str:
    inner = _dataclass_in(_hints(Recipe)[group])
    main = _MAIN_SETTINGS[group]
    try:
        _parse(text, _hints(inner)[main], f"{group}.{main}")
        hint = f"Did you mean {group}.{main}={text}?"
    except RecipeError as error:
        hint = str(error)
    return f"{group!r} is a group of settings. {hint}"


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
    if name == "optimizer.name" and text.lower() in _AVERAGED:
        base = _AVERAGED[text.lower()]
        suggestion = (
            f" {text} is {base} with an average: set optimizer.name={base} and average.start."
        )
    kinds = [option for option in options if option is not int or float not in options]
    expected = " or ".join(map(_describe, kinds))
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
