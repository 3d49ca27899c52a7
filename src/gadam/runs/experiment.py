"""An experiment: recipes to run side by side, and how to read the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from gadam.runs.fields import Record, mapping_of, number, one_of, parse, sequence_of, text, whole
from gadam.runs.files import Document
from gadam.runs.recipe import Mode, Recipe

__all__ = ["Experiment", "more_is_better"]


def more_is_better(metric: str) -> bool:
    """Return True if a larger value of a built-in metric is better.

    Use :meth:`Experiment.mode_of` or :attr:`Recipe.mode` where there is a recipe: users define
    metrics of their own.

    Args:
        metric: Its name. Accuracies are in percent.
    """
    return metric in ("accuracy", "top5")


@dataclass(frozen=True)
class Experiment(Record):
    """Recipes to run side by side.

    Args:
        name: Its name on the command line.
        title: What it shows.
        recipes: By row label.
        bases: For each row, the row its paired difference is taken against.
        published: The paper's number for a row, if it prints one.
        metric: The metric of rows of image classification. Other rows have their recipe's.
        split: The split to draw learning curves of.
        seeds: Seeds per row.
        note: What to know when reading the table.
        analysis: The parts that `gadam analyze` measures and the report shows.
        command: The command that reproduces it.
        floors: The best possible value by metric, then split, if it is known and the same for
            all rows.
        extra: Fields written by a newer version, kept as they are.
    """

    name: str
    title: str
    recipes: Mapping[str, Recipe]
    bases: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    metric: str = "accuracy"
    split: str = "test"
    seeds: int = 3
    note: str = ""
    analysis: tuple[str, ...] = ()
    command: str = ""
    floors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def metric_of(self, row: str) -> str:
        """Return the metric that rates a row.

        Args:
            row: Its label.
        """
        recipe = self.recipes[row]
        is_images = recipe.language is None and recipe.task is None
        return self.metric if is_images else recipe.metric

    def mode_of(self, row: str) -> Mode:
        """Return whether a larger ("max") or smaller ("min") metric of a row is better.

        Args:
            row: Its label.
        """
        if self.recipes[row].task is not None:
            return self.recipes[row].mode
        return "max" if more_is_better(self.metric_of(row)) else "min"

    @property
    def metrics(self) -> list[str]:
        """The metrics that rate its rows, each once."""
        return list(dict.fromkeys(map(self.metric_of, self.recipes))) or [self.metric]

    def restricted_to(self, recipes: Mapping[str, Recipe]) -> Experiment:
        """Return the experiment with these rows, and what refers to others left out.

        Args:
            recipes: By row label.
        """
        return replace(
            self,
            recipes=recipes,
            bases={a: b for a, b in self.bases.items() if a in recipes and b in recipes},
            published={row: n for row, n in self.published.items() if row in recipes},
        )

    def renamed(self, names: Mapping[str, str]) -> Experiment:
        """Return the experiment with other row labels.

        Args:
            names: New labels by old ones; rows that are not named keep theirs.
        """
        return replace(
            self,
            recipes={names.get(row, row): recipe for row, recipe in self.recipes.items()},
            bases={names.get(a, a): names.get(b, b) for a, b in self.bases.items()},
            published={names.get(row, row): n for row, n in self.published.items()},
        )

    def to_dict(self) -> Document:
        """Return the experiment as plain data."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        content["recipes"] = {row: recipe.to_dict() for row, recipe in self.recipes.items()}
        content["analysis"] = list(self.analysis)
        for name in ("bases", "published"):
            content[name] = dict(content[name])
        content["floors"] = {metric: dict(floor) for metric, floor in self.floors.items()}
        return {**content, **self.extra}

    @classmethod
    def from_dict(cls, values: Document) -> Experiment:
        """Return the experiment that :meth:`to_dict` wrote.

        Args:
            values: Plain data; unknown fields are kept in :attr:`extra`.

        Raises:
            RunError: A field is missing or has the wrong type.
            RecipeError: A recipe is not valid.
        """
        return parse(
            cls,
            values,
            {
                "name": text,
                "title": text,
                "recipes": mapping_of(Recipe.from_dict),
                "bases": mapping_of(text),
                "published": mapping_of(number),
                "metric": text,
                "split": one_of("validation", "test"),
                "seeds": whole,
                "note": text,
                "analysis": sequence_of(text),
                "command": text,
                "floors": mapping_of(mapping_of(number)),
            },
        )
