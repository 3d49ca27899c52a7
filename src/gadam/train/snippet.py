"""Write a recipe as code to copy: the optimizer, the schedule, and the average."""

from __future__ import annotations

from dataclasses import fields

from gadam.runs.recipe import Average, Optimizer, Recipe, RecipeError

__all__ = ["code"]

_CLASSES = {
    ("sgd", False): "torch.optim.SGD",
    ("sgd", True): "torch.optim.SGD",
    ("adamw", False): "torch.optim.AdamW",
    ("adamw", True): "gadam.Gadam",
    ("padamw", False): "gadam.PadamW",
    ("padamw", True): "gadam.GadamX",
}
_OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps", "amsgrad"),
    "padamw": ("betas", "eps", "amsgrad", "partial", "form"),
}


def code(recipe: Recipe, steps_per_epoch: int) -> str:
    """Return code that trains a model as a recipe does.

    The code expects ``model`` and, if it averages, evaluates with ``loader``, the training data.

    Args:
        recipe: A recipe of sgd, adamw or padamw, with the mean of iterates or without an average.
        steps_per_epoch: Recipes count epochs, averages steps.

    Raises:
        RecipeError: The recipe has another optimizer or average.

    Example:
        >>> from gadam.runs.recipe import Schedule
        >>> recipe = Recipe(
        ...     "gadam", "vgg-mini", optimizer=Optimizer("adamw", 0.003, 0.5),
        ...     schedule=Schedule("linear-ia"), average=Average(10), epochs=20,
        ... )
        >>> print(code(recipe, steps_per_epoch=16))
        import gadam
        <BLANKLINE>
        optimizer = gadam.Gadam(
            model.parameters(),
            lr=0.003,
            weight_decay=0.5,
            average=gadam.Averaging(start=176, every=16),
        )
        scheduler = gadam.schedule.LinearForAveraging(optimizer, start=10)
        # Train for 20 epochs of 16 steps: optimizer.step() per batch, scheduler.step() per epoch.
        # Then evaluate, or save, the averaged weights:
        with optimizer.average.applied(model, batchnorm=loader):
            ...
    """
    average = recipe.average
    name = _CLASSES.get((recipe.optimizer.name, average is not None))
    other_form = recipe.optimizer.name == "adamw" and recipe.optimizer.form != "official"
    if average is not None and not _is_fixed_mean(average):
        name = None
    if name is None or other_form or recipe.optimizer.lookahead:
        raise RecipeError(f"There is no code for {recipe.method}.")
    arguments = ["model.parameters()", *_arguments(recipe.optimizer)]
    plan = "" if average is None else _averaging(average, steps_per_epoch)
    built_in = name.startswith("gadam.") and bool(plan)
    lines = [f"optimizer = {name}("]
    lines += [f"    {argument}," for argument in arguments]
    lines += [f"    average={plan},"] if built_in else []
    lines += [")"]
    lines += [f"average = gadam.IterateAverage(optimizer, {plan})"] if plan and not built_in else []
    schedule = _schedule(recipe)
    lines += [f"scheduler = {schedule}"] if schedule else []
    per_epoch = ", scheduler.step() per epoch" if schedule else ""
    steps = "1 step" if steps_per_epoch == 1 else f"{steps_per_epoch} steps"
    epochs = "1 epoch" if recipe.epochs == 1 else f"{recipe.epochs} epochs"
    lines += [f"# Train for {epochs} of {steps}: optimizer.step() per batch{per_epoch}."]
    if plan:
        point = "optimizer.average" if built_in else "average"
        lines += ["# Then evaluate, or save, the averaged weights:"]
        lines += [f"with {point}.applied(model, batchnorm=loader):", "    ..."]
    text = "\n".join(lines)
    imports = [f"import {module}" for module in ("gadam", "torch") if f" {module}." in text]
    return "\n".join([*imports, "", text])


def _is_fixed_mean(average: Average) -> bool:
    return isinstance(average.start, int) and average.weighting == "mean"


def _arguments(optimizer: Optimizer) -> list[str]:
    """Return the arguments that matter: what was tuned, and what is not the default."""
    defaults = {f.name: f.default for f in fields(Optimizer)}
    given = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.name == "sgd":
        given = {"lr": optimizer.lr, "momentum": optimizer.momentum} | given
    for name in _OPTIONS.get(optimizer.name, ()):
        value = getattr(optimizer, name)
        given |= {name: value} if value != defaults[name] else {}
    return [f"{name}={value!r}" for name, value in given.items()]


def _averaging(average: Average, steps_per_epoch: int) -> str:
    every = steps_per_epoch if average.every == "epoch" else average.every
    start = int(average.start) * steps_per_epoch + every
    return f"gadam.Averaging(start={start}, every={every})"


def _schedule(recipe: Recipe) -> str:
    """Return the scheduler, which is stepped once per epoch."""
    schedule, total = recipe.schedule, recipe.epochs
    start = 0 if recipe.average is None else int(recipe.average.start)
    final = "" if schedule.final is None else f", final={schedule.final!r}"
    if schedule.name == "cosine":
        lowest = (schedule.final or 0.0) * recipe.optimizer.lr
        end = f", eta_min={lowest:.6g}" if lowest else ""
        return f"torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max={total}{end})"
    return {
        "constant": "",
        "linear": f"gadam.schedule.Linear(optimizer, total={total}{final})",
        "linear-ia": f"gadam.schedule.LinearForAveraging(optimizer, start={max(start, 1)}{final})",
        "frozen-linear": (
            f"gadam.schedule.FrozenLinear(optimizer, total={total}, freeze={start}{final})"
        ),
        "step": f"gadam.schedule.Step(optimizer, milestones={list(schedule.milestones)})",
    }[schedule.name]
