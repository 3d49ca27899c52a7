"""What a run is: its recipe, its record on disk, and experiments made of several runs."""

from gadam.runs.collect import Collection, RunRecord, collect
from gadam.runs.experiment import Experiment, more_is_better
from gadam.runs.files import RunError
from gadam.runs.folder import RunFolder
from gadam.runs.recipe import (
    Average,
    Data,
    Language,
    Optimizer,
    OwnTask,
    Recipe,
    RecipeError,
    Schedule,
)
from gadam.runs.record import EpochRecord, RunHeader, RunResult

__all__ = [
    "Average",
    "Collection",
    "Data",
    "EpochRecord",
    "Experiment",
    "Language",
    "Optimizer",
    "OwnTask",
    "Recipe",
    "RecipeError",
    "RunError",
    "RunFolder",
    "RunHeader",
    "RunRecord",
    "RunResult",
    "Schedule",
    "collect",
    "more_is_better",
]
