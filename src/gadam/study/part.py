"""What a part of `gadam analyze` is, and how parts are found.

To add a part, add one file to this package with a subclass of :class:`Part`. The command line, the
measurements and the report pick it up from there.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from gadam._names import did_you_mean
from gadam.runs.collect import Collection
from gadam.runs.files import Document, Json
from gadam.runs.folder import RunFolder
from gadam.study.measured import Measured
from gadam.study.points import Points
from gadam.study.section import SectionBuilder
from gadam.study.settings import Settings, StudyError
from gadam.train.loop import Stopped

__all__ = ["Part", "Study", "Unit", "find", "parts"]


@dataclass(frozen=True)
class Unit:
    """One value to measure.

    Args:
        name: The name of the value within the run.
        key: Everything that determines the value: what it is, the weights, the settings. Results
            on disk are found by it, so neither its content nor the order of its items may change.
        compute: Measures the value. Returns plain data.
        is_valid: Whether a value from the notebook can still be used.
    """

    name: str
    key: Document
    compute: Callable[[], Json]
    is_valid: Callable[[Json], bool] = lambda value: True


@dataclass
class Study:
    """One run under analysis, as parts see it.

    Args:
        run: The run's folder.
        settings: How closely to measure.
        points: The points of the run.
        should_stop: Polled often; the analysis stops if it returns True.
        on_notice: Receives sentences for the user.
    """

    run: RunFolder
    settings: Settings
    points: Points
    should_stop: Callable[[], bool]
    on_notice: Callable[[str], None]
    _said: set[str] = field(default_factory=set)

    @property
    def is_language(self) -> bool:
        """True if the run trains a language model."""
        return self.run.recipe.language is not None

    def notice(self, sentence: str) -> None:
        """Tell the user something, once even if several parts say it.

        Args:
            sentence: What to say.
        """
        if sentence not in self._said:
            self._said.add(sentence)
            self.on_notice(sentence)

    def check_stop(self) -> None:
        """Raise :class:`gadam.train.loop.Stopped` if the user asked to stop."""
        if self.should_stop():
            raise Stopped


class Part(ABC):
    """One part of the analysis: what it needs, what it measures, and its section of the report.

    Attributes:
        name: Its name on the command line and in files.
        order: Its position among the parts, in steps of 10.
        title: The heading of its section, and its line in ``gadam analyze --help``.
        needs: What runs must have for it; empty if every run will do.
        needs_weights: False if the records of the runs are enough.
        on_request: True if it is measured only if it is named, because it takes long.
    """

    name: ClassVar[str]
    order: ClassVar[int]
    title: ClassVar[str]
    needs: ClassVar[str] = ""
    needs_weights: ClassVar[bool] = True
    on_request: ClassVar[bool] = False

    def is_possible(self, collection: Collection) -> bool:
        """Return True if the finished runs have what this part needs.

        Args:
            collection: The runs.
        """
        return True

    def units(self, study: Study) -> Iterable[Unit]:
        """Return what to measure at one run, in order. Parts may share units.

        Args:
            study: The run. It did not diverge.
        """
        return ()

    @abstractmethod
    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add tables and charts to the section. Add nothing if nothing was measured.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """


def parts() -> dict[str, Part]:
    """Return all parts by name, in order: those that the modules of this package define."""
    package = importlib.import_module(__package__ or "gadam.study")
    found: list[Part] = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        found += [
            value()
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Part)
            and not inspect.isabstract(value)
            and value.__module__ == module.__name__
        ]
    return {part.name: part for part in sorted(found, key=lambda part: part.order)}


def find(names: Sequence[str]) -> list[Part]:
    """Return the parts of these names, each once.

    Args:
        names: The names.

    Raises:
        StudyError: There is no part of that name.
    """
    known = parts()
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            hint = f"Did you mean {near!r}?" if near else f"Use one of {', '.join(known)}."
            raise StudyError(f"There is no part {name!r}. {hint}")
    return [known[name] for name in dict.fromkeys(names)]
