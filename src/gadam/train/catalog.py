"""The paper's tables and figures at full scale, one function per name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from gadam.runs.experiment import Experiment
from gadam.runs.recipe import Average, Data, Language, Optimizer, Recipe, Schedule

__all__ = ["BASES", "LINEAR", "LINEAR_IA", "PAPER", "bases_in", "side_by_side"]


# -------------------------------------------------------------------------- the paper's settings

_VISION_START = 161  # of 300 epochs
BASES = {"SWA": "SGD", "Gadam": "AdamW", "GadamX": "PadamW"}
LINEAR, LINEAR_IA = Schedule("linear"), Schedule("linear-ia")


def _settings(
    sgd: tuple[float, float], adamw: tuple[float, float], padamw: tuple[float, float]
) -> dict[str, Optimizer]:
    return {
        "sgd": Optimizer("sgd", *sgd),
        "adamw": Optimizer("adamw", *adamw),
        "padamw": Optimizer("padamw", *padamw),
    }


_NETWORKS: dict[str, dict[str, Optimizer]] = {
    "vgg16-bn": _settings((0.1, 5e-4), (5e-4, 0.25), (0.1, 2.5e-3)),
    "vgg16": _settings((0.1, 5e-4), (5e-4, 0.25), (0.1, 2.5e-3)),
    "preresnet110": _settings((0.1, 5e-4), (1e-3, 0.1), (0.1, 2.5e-3)),
    "resnext29": _settings((0.1, 5e-4), (1e-3, 0.3), (0.1, 3e-3)),
    "wrn28-10": _settings((0.03, 1e-4), (1e-3, 0.01), (0.03, 3e-4)),
}


def _cifar(model: str, data: str, optimizer: Optimizer, start: int | None = None) -> Recipe:
    """Return a run of 300 epochs: with the linear schedule, or averaged from ``start`` on."""
    return Recipe(
        name="",
        model=model,
        data=Data(data),
        optimizer=optimizer,
        schedule=LINEAR if start is None else LINEAR_IA if start else Schedule("constant"),
        average=None if start is None else Average(start),
        epochs=300,
    )


def _six(model: str, data: str) -> dict[str, Recipe]:
    """Return SGD, AdamW and PadamW, each plain and averaged."""
    settings = _NETWORKS[model]
    # The authors used AMSGrad in their Padam runs, not in their GadamX runs.
    amsgrad = replace(settings["padamw"], amsgrad=True)
    return {
        "SGD": _cifar(model, data, settings["sgd"]),
        "SWA": _cifar(model, data, settings["sgd"], _VISION_START),
        "AdamW": _cifar(model, data, settings["adamw"]),
        "PadamW": _cifar(model, data, amsgrad),
        "Gadam": _cifar(model, data, settings["adamw"], _VISION_START),
        "GadamX": _cifar(model, data, settings["padamw"], _VISION_START),
    }


def _imagenet32() -> dict[str, Recipe]:
    def run(optimizer: Optimizer, averaged: bool) -> Recipe:
        return Recipe(
            name="",
            model="wrn28-10",
            data=Data("imagenet32"),
            optimizer=optimizer,
            schedule=Schedule("frozen-linear") if averaged else LINEAR,
            average=Average(30) if averaged else None,
            epochs=50,
        )

    settings = _NETWORKS["wrn28-10"]
    padam = Optimizer("padam", 0.03, 1e-4, amsgrad=True)
    return {
        "SGD": run(settings["sgd"], False),
        "SWA": run(settings["sgd"], True),
        "AdamW": run(settings["adamw"], False),
        "Padam": run(padam, False),
        "Gadam": run(settings["adamw"], True),
        "GadamX": run(settings["padamw"], True),
    }


def _imagenet(
    model: str, optimizer: Optimizer, start: int | None = None, step: bool = True
) -> Recipe:
    schedule = Schedule("step", milestones=(30, 60)) if step else LINEAR
    return Recipe(
        name="",
        model=model,
        data=Data("imagenet"),
        optimizer=optimizer,
        schedule=schedule if start is None else LINEAR_IA,
        average=None if start is None else Average(start),
        epochs=90,
        batch_size=256,
    )


_GADAM_LIKE_SGD = Optimizer("adamw", 0.5, 1e-4, eps=1.0)
_GADAMX_IMAGENET = Optimizer("padamw", 0.3, 1e-4, eps=1e-4)


def _imagenet_rows(model: str) -> dict[str, Recipe]:
    return {
        "SGD": _imagenet(model, Optimizer("sgd", 0.1, 1e-4)),
        "SWA": _imagenet(model, Optimizer("sgd", 0.1, 1e-4), 61),
        "AdamW": _imagenet(model, Optimizer("adamw", 1e-3, 1e-2), step=False),
        "Ranger": _imagenet(model, Optimizer("ranger", 1e-3, 1e-2)),
        "Gadam": _imagenet(model, _GADAM_LIKE_SGD, 61),
        "GadamX": _imagenet(model, _GADAMX_IMAGENET, 61),
    }


_PTB_START = 100  # of 200 epochs
_PTB_EVERY = 1  # the authors' script samples every iteration


def _ptb(
    optimizer: Optimizer, average: Average | None = None, schedule: Schedule | None = None
) -> Recipe:
    """Return the 3-layer LSTM on Penn Treebank, by default at a constant learning rate."""
    return Recipe(
        name="",
        model="awd-lstm",
        data=Data("ptb", augment=False),
        optimizer=optimizer,
        schedule=schedule or Schedule("constant"),
        average=average,
        language=Language(),
        epochs=200,
        batch_size=20,
        clip_grad_norm=0.25,
    )


# Weight decay is L2 here, not decoupled, so Gadam averages Adam's iterates and GadamX averages
# Padam's. The paper searched the learning rate of Adam and Gadam but does not print the result;
# 1e-3 is the usual value of its grid.
_PTB_ASGD = Optimizer("asgd", 30.0, 1.2e-6)
_PTB_ADAM = Optimizer("adam", 1e-3, 1.2e-6)
_PTB_PADAM = Optimizer("padam", 1.0, 1.2e-6, partial=0.2)
_PTB_STEPS = Schedule("step", milestones=(100, 150))


def _ptb_gadam(start: int = _PTB_START, every: int | Literal["epoch"] = _PTB_EVERY) -> Recipe:
    return _ptb(_PTB_ADAM, Average(start, every))


def _ptb_gadamx() -> Recipe:
    return _ptb(_PTB_PADAM, Average(_PTB_START, _PTB_EVERY))


def _ptb_nt_asgd(patience: int) -> Recipe:
    return _ptb(_PTB_ASGD, Average("non-monotone", _PTB_EVERY, patience=patience))


def _labeled(groups: Mapping[str, Mapping[str, Recipe]]) -> dict[str, Recipe]:
    return {f"{group} {row}": r for group, rows in groups.items() for row, r in rows.items()}


def bases_in(rows: Mapping[str, Recipe]) -> dict[str, str]:
    """Return the base row of each averaged row, found by the last word of their labels.

    Args:
        rows: Recipes by row label.
    """
    bases = {}
    for row in rows:
        group, _, method = row.rpartition(" ")
        base = f"{group} {BASES.get(method, '')}".strip()
        if base not in rows:  # some tables have Padam instead of PadamW
            base = base.removesuffix("W")
        if base in rows and method in BASES:
            bases[row] = base
    return bases


# ----------------------------------------------------------------------- one function per name

PAPER: dict[str, Callable[[], Experiment]] = {}


def _reproduces(function: Callable[[], Experiment]) -> Callable[[], Experiment]:
    PAPER[function.__name__.replace("_", "-")] = function
    return function


def side_by_side(
    title: str, rows: Mapping[str, Recipe], published: str = "", **kwargs: Any
) -> Experiment:
    """Return an experiment of these rows.

    Args:
        title: What it shows.
        rows: Recipes by row label.
        published: The paper's numbers in the order of the rows, separated by blanks.
        **kwargs: Other fields of :class:`Experiment`.
    """
    numbers = [float(number) for number in published.split()]
    return Experiment(
        name="",
        title=title,
        recipes=rows,
        bases=bases_in(rows),
        published=dict(zip(rows, numbers)),
        **kwargs,
    )


def _theory_run(weight_decay: float, averaged: bool, final: float = 0.2) -> Recipe:
    """Return VGG-16 without BatchNorm or augmentation.

    At epoch 60 the learning rate drops, or averaging starts. The paper does not print the number
    of epochs; it is 100 here.
    """
    return Recipe(
        name="",
        model="vgg16",
        data=Data("cifar100", augment=False),
        optimizer=Optimizer("sgd", 0.05, weight_decay),
        schedule=Schedule("linear-ia", final=final)
        if averaged
        else Schedule("step", milestones=(60,)),
        average=Average(60) if averaged else None,
        epochs=100,
        keep_iterates=40 if averaged else 0,
    )


_DECAYS = {"no decay": 0.0, "low decay": 1e-4, "high decay": 5e-4}


def _over_decay() -> dict[str, Recipe]:
    """Keep the learning rate the same before and during averaging, as the paper describes."""
    return _labeled(
        {
            label: {"SGD": _theory_run(decay, False), "SWA": _theory_run(decay, True, final=1.0)}
            for label, decay in _DECAYS.items()
        }
    )


@_reproduces
def fig1a() -> Experiment:
    rows = {"SGD": _theory_run(5e-4, False)}
    for rate in (0.03, 0.01, 0.003):
        rows[f"SWA at rate {rate:g}"] = _theory_run(5e-4, True, final=rate / 0.05)
    bases = {row: "SGD" for row in rows if row != "SGD"}
    return replace(
        side_by_side("VGG-16 without BatchNorm: averaging versus a sharp learning-rate drop", rows),
        bases=bases,
    )


@_reproduces
def fig1b() -> Experiment:
    return side_by_side(
        "Averaging versus a sharp learning-rate drop over weight decay, and iterate diversity",
        _over_decay(),
        seeds=10,
        analysis=("diversity",),
    )


@_reproduces
def fig1c() -> Experiment:
    rows = {row: r for row, r in _over_decay().items() if row.endswith("SGD")}
    title = "Gain of an ensemble of independent networks over weight decay"
    return side_by_side(title, rows, seeds=10, analysis=("networks",))


@_reproduces
def fig1d() -> Experiment:
    rows = {row: r for row, r in _over_decay().items() if row.endswith("SWA")}
    title = "Gain of averaging, and of an ensemble of iterates, over weight decay"
    return side_by_side(title, rows, seeds=10, analysis=("ensemble",))


def _diversity_rows() -> dict[str, Recipe]:
    model, data = "preresnet110", "cifar100"
    optimizers = {
        "SWA": Optimizer("sgd", 0.1, 5e-4),
        "Adam-IA": Optimizer("adam", 1e-3, 1e-4),
        "Gadam": Optimizer("adamw", 1e-3, 0.25),
    }
    return {
        row: replace(
            _cifar(model, data, optimizer, _VISION_START), keep_iterates=300 - _VISION_START
        )
        for row, optimizer in optimizers.items()
    }


@_reproduces
def fig2a() -> Experiment:
    return side_by_side(
        "PreResNet-110, CIFAR-100: averages of SGD, Adam and AdamW", _diversity_rows()
    )


@_reproduces
def fig2b() -> Experiment:
    title = "PreResNet-110, CIFAR-100: diversity of the iterates of SGD, Adam and AdamW"
    return side_by_side(title, _diversity_rows(), analysis=("diversity",))


def _with_and_without_batchnorm() -> dict[str, Recipe]:
    return _labeled(
        {
            name: {
                "AdamW": _cifar(model, "cifar100", _NETWORKS[model]["adamw"]),
                "Gadam": _cifar(model, "cifar100", _NETWORKS[model]["adamw"], _VISION_START),
            }
            for name, model in (("with BN", "vgg16-bn"), ("without BN", "vgg16"))
        }
    )


@_reproduces
def fig2c() -> Experiment:
    title = "VGG-16 with and without BatchNorm: gain of averaging"
    return side_by_side(title, _with_and_without_batchnorm(), analysis=("rate",))


@_reproduces
def fig2d() -> Experiment:
    title = "VGG-16 with and without BatchNorm: effective learning rate"
    return side_by_side(title, _with_and_without_batchnorm(), analysis=("rate",))


@_reproduces
def fig3a() -> Experiment:
    numbers = "74.15 74.57 73.26 74.56 75.73 76.85"
    return side_by_side("VGG-16 on CIFAR-100", _six("vgg16-bn", "cifar100"), numbers)


@_reproduces
def fig3b() -> Experiment:
    numbers = "81.47 82.95 80.16 82.37 82.13 83.27"
    return side_by_side("ResNeXt-29 8x64d on CIFAR-100", _six("resnext29", "cifar100"), numbers)


@_reproduces
def fig3c() -> Experiment:
    numbers = "83.52 84.23 79.09 81.74 82.56 84.75"
    return side_by_side("WRN-28-10 on ImageNet-32, top 5", _imagenet32(), numbers, metric="top5")


@_reproduces
def fig3d() -> Experiment:
    rows = _labeled(
        {
            "VGG-16": _six("vgg16-bn", "cifar100"),
            "PRN-110": _six("preresnet110", "cifar100"),
            "ResNeXt-29": _six("resnext29", "cifar100"),
        }
    )
    title = "Gain of averaging versus number of parameters"
    return side_by_side(title, rows, analysis=("parameters",))


_IMAGENET_NUMBERS = "75.63 76.32 74.04 75.64 76.79 77.31 77.37 78.08 74.48 75.62 78.53 78.72"


@_reproduces
def tab_imagenet() -> Experiment:
    rows = _labeled(
        {"ResNet-50": _imagenet_rows("resnet50"), "ResNet-101": _imagenet_rows("resnet101")}
    )
    small = {
        "SGD": _imagenet("resnet18", Optimizer("sgd", 0.1, 1e-4)),
        "AdamW": _imagenet("resnet18", Optimizer("adamw", 1e-3, 1e-2), step=False),
        "Gadam": _imagenet("resnet18", Optimizer("adamw", 1e-3, 1e-2), 61),
    }
    rows |= _labeled({"ResNet-18": small})
    numbers = f"{_IMAGENET_NUMBERS} 69.72 69.92 70.11"
    return side_by_side("ResNet-50, -101 and -18 on ImageNet", rows, numbers, seeds=1)


@_reproduces
def fig_imagenet() -> Experiment:
    rows = {
        row: r
        for row, r in tab_imagenet().recipes.items()
        if row.split()[1] in ("SGD", "SWA", "GadamX")
    }
    rows = {row: r for row, r in rows.items() if not row.startswith("ResNet-18")}
    return side_by_side("Final epochs on ImageNet", rows, seeds=1)


@_reproduces
def tab_cifar() -> Experiment:
    rows = _labeled(
        {
            f"{short} {label}": _six(model, data)
            for data, label in (("cifar10", "C-10"), ("cifar100", "C-100"))
            for model, short in (("vgg16-bn", "VGG-16"), ("preresnet110", "PRN-110"))
        }
    )
    numbers = "94.14 94.69 93.90 94.13 94.62 94.88 95.40 95.55 94.69 95.28 95.27 95.95 "
    numbers += "74.15 74.57 73.26 74.56 75.73 76.85 77.22 77.92 75.47 77.30 77.37 77.90"
    return side_by_side("VGG-16 and PreResNet-110 on CIFAR-10 and CIFAR-100", rows, numbers)


def _cifar10_rows() -> dict[str, Recipe]:
    return _labeled(
        {"VGG-16": _six("vgg16-bn", "cifar10"), "PRN-110": _six("preresnet110", "cifar10")}
    )


@_reproduces
def tab_c10() -> Experiment:
    numbers = "94.14 94.69 93.90 94.13 94.62 94.88 95.40 95.55 94.69 95.28 95.27 95.95"
    return side_by_side("VGG-16 and PreResNet-110 on CIFAR-10", _cifar10_rows(), numbers)


@_reproduces
def fig_c10() -> Experiment:
    return side_by_side("VGG-16 and PreResNet-110 on CIFAR-10: learning curves", _cifar10_rows())


@_reproduces
def tab_resnext() -> Experiment:
    return replace(fig3b(), title="ResNeXt-29 8x64d on CIFAR-100")


@_reproduces
def tab_imagenet32() -> Experiment:
    numbers = "61.33 62.32 55.51 59.65 60.50 63.04"
    rows = _imagenet32()
    for optimizer, row in (("sgd", "SGD"), ("adamw", "AdamW"), ("padamw", "PadamW")):
        lr, wd = {"sgd": (0.1, 1e-5), "adamw": (1e-3, 1e-3), "padamw": (0.1, 3e-4)}[optimizer]
        base = Optimizer(optimizer, lr, wd)  # type: ignore[arg-type]
        recipe = replace(_cifar("preresnet110", "imagenet32", base), epochs=200)
        amsgrad = replace(base, amsgrad=optimizer == "padamw")
        rows[f"PRN-110 {row}"] = replace(recipe, optimizer=amsgrad)
        averaged = next(name for name, b in BASES.items() if b == row)
        rows[f"PRN-110 {averaged}"] = replace(recipe, schedule=LINEAR_IA, average=Average(100))
    return side_by_side("WRN-28-10 and PreResNet-110 on ImageNet-32", rows, numbers)


@_reproduces
def tab_ptb() -> Experiment:
    rows = {
        "ASGD": _ptb(_PTB_ASGD, Average(_PTB_START, _PTB_EVERY)),
        "Adam": _ptb(_PTB_ADAM),
        # The authors used AMSGrad in their Padam runs, not in their GadamX runs.
        "Padam": _ptb(replace(_PTB_PADAM, amsgrad=True), schedule=_PTB_STEPS),
        "Gadam": _ptb_gadam(),
        "GadamX": _ptb_gadamx(),
    }
    return replace(
        side_by_side(
            "Word-level language model, Penn Treebank", rows, "61.98 63.16 62.15 58.77 60.45"
        ),
        bases={"Gadam": "Adam", "GadamX": "Padam"},
    )


@_reproduces
def fig_ptb() -> Experiment:
    return replace(
        tab_ptb(), title="Penn Treebank: validation perplexity during training", split="validation"
    )


@_reproduces
def tab_ptb_nt() -> Experiment:
    rows = {
        "NT-ASGD": _ptb_nt_asgd(patience=10),
        "Scheduled Adam": _ptb(_PTB_ADAM, schedule=_PTB_STEPS),
        "Gadam": _ptb_gadam(),
        "GadamX": _ptb_gadamx(),
    }
    title = "Penn Treebank: automatic start of averaging, and a decaying learning rate"
    return replace(
        side_by_side(title, rows, "64.73 61.51 58.77 60.45"),
        bases={"Gadam": "Scheduled Adam", "GadamX": "Scheduled Adam"},
    )


@_reproduces
def fig_ptb_nt() -> Experiment:
    title = "Validation perplexity of NT-ASGD and scheduled Adam"
    return replace(tab_ptb_nt(), title=title, split="validation")


@_reproduces
def fig_lookahead() -> Experiment:
    groups = {}
    for short, model in (("VGG-16", "vgg16-bn"), ("PRN-110", "preresnet110")):
        rows = _six(model, "cifar100")
        rows = {row: rows[row] for row in ("SGD", "AdamW", "Gadam")}
        for row, recipe in list(rows.items()):
            ahead = replace(recipe.optimizer, lookahead=True)
            rows[f"{row} + LH"] = replace(recipe, optimizer=ahead)
        groups[short] = rows
    labeled = _labeled(groups)
    bases = {row: row.removesuffix(" + LH") for row in labeled if row.endswith("+ LH")}
    bases |= {f"{short} Gadam": f"{short} AdamW" for short in groups}
    return replace(side_by_side("Lookahead, alone and with Gadam", labeled), bases=bases)


@_reproduces
def fig_frequency() -> Experiment:
    gadam = _six("vgg16-bn", "cifar100")["Gadam"]
    every: tuple[int | Literal["epoch"], ...] = (1, 10, 100, "epoch")
    rows = {}
    for n in every:
        often = f"every {'iteration' if n == 1 else n}"
        rows[f"LSTM {often}"] = _ptb_gadam(every=n)
        rows[f"VGG-16 {often}"] = replace(gadam, average=Average(_VISION_START, every=n))
    rows = dict(sorted(rows.items(), key=lambda row: row[0].split()[0]))
    return side_by_side("Averaging frequency: LSTM on Penn Treebank, VGG-16 on CIFAR-100", rows)


def _over_start() -> dict[str, Recipe]:
    """Start averaging at several epochs, at the learning rate the schedule has there."""
    rows = {}
    for short, model, method in (
        ("VGG-16", "vgg16-bn", "Gadam"),
        ("VGG-16", "vgg16-bn", "GadamX"),
        ("PRN-110", "preresnet110", "Gadam"),
        ("PRN-110", "preresnet110", "GadamX"),
    ):
        optimizer = _NETWORKS[model]["adamw" if method == "Gadam" else "padamw"]
        for start in (0, 60, 100, 161, 200, 250):
            rows[f"{short} {method} from {start}"] = _cifar(model, "cifar100", optimizer, start)
    for start in (0, 25, 50, 100, 150):
        rows[f"LSTM Gadam from {start}"] = _ptb_gadam(start)
    wide = _imagenet32()["GadamX"]
    for start in (10, 20, 30, 40):
        rows[f"WRN-28-10 GadamX from {start}"] = replace(wide, average=Average(start))
    return rows


@_reproduces
def fig_tavg() -> Experiment:
    return side_by_side("When to start averaging", _over_start(), seeds=1)


@_reproduces
def tab_tavg() -> Experiment:
    return side_by_side(
        "Best results when the start of averaging is tuned",
        _over_start(),
        seeds=1,
        note="The paper's best: VGG-16 Gadam 76.11, GadamX 77.22; PRN-110 Gadam 77.41, GadamX "
        "79.41; WRN-28-10 GadamX 84.75 (top 5); LSTM Gadam 58.61 (perplexity).",
    )


@_reproduces
def tab_auto() -> Experiment:
    def auto(optimizer: Optimizer) -> Recipe:
        return Recipe(
            name="",
            model="vgg16-bn",
            data=Data("cifar100", validation=5000),
            optimizer=optimizer,
            average=Average("plateau", patience=10),
            epochs=300,
        )

    settings = _NETWORKS["vgg16-bn"]
    rows = {"Gadam-Auto": auto(settings["adamw"]), "SWA-Auto": auto(settings["sgd"])}
    note = "Triggers need a validation metric: 5,000 training examples are held out."
    return side_by_side("Automatic start and stop of averaging", rows, "75.39 73.93", note=note)


@_reproduces
def fig_imagenet_lr() -> Experiment:
    rows = {
        f"SGD lr {lr:g}": _imagenet("resnet50", Optimizer("sgd", lr, 1e-4))
        for lr in (0.03, 0.1, 0.3)
    }
    return side_by_side("SGD on ImageNet at three learning rates", rows, seeds=1)


@_reproduces
def fig_tradeoff() -> Experiment:
    rows = {
        "AdamW": _imagenet("resnet50", Optimizer("adamw", 1e-3, 1e-2), step=False),
        "Gadam": _imagenet("resnet50", Optimizer("adamw", 1e-3, 1e-2), 61),
        "Gadam, lr 0.003": _imagenet("resnet50", Optimizer("adamw", 3e-3, 1e-2), 61),
        "Gadam, lr 0.5, eps 1": _imagenet("resnet50", _GADAM_LIKE_SGD, 61),
        "GadamX": _imagenet("resnet50", Optimizer("padamw", 0.3, 1e-4), 61),
        "GadamX, eps 1e-4": _imagenet("resnet50", _GADAMX_IMAGENET, 61),
    }
    numbers = "74.04 75.52 76.53 76.79 77.19 77.31"
    return side_by_side("Speed versus error on ImageNet", rows, numbers, seeds=1)


@_reproduces
def tab_linear_step() -> Experiment:
    rows = {}
    for short, model in (("VGG-16", "vgg16-bn"), ("PRN-110", "preresnet110")):
        for method in ("SGD", "AdamW", "PadamW"):
            recipe = _six(model, "cifar100")[method]
            stepped = replace(recipe, schedule=Schedule("step", milestones=(150, 250)))
            rows[f"{short} {method} step"] = stepped
            rows[f"{short} {method} linear"] = recipe
    bases = {row: row.replace(" linear", " step") for row in rows if row.endswith("linear")}
    numbers = "73.28 74.15 73.20 73.26 74.46 74.56 77.23 77.22 75.27 75.47 73.95 77.30"
    return replace(side_by_side("Linear versus step schedules", rows, numbers), bases=bases)


@_reproduces
def tab_sharpness() -> Experiment:
    def run(optimizer: Optimizer, final: float, averaged: bool) -> Recipe:
        recipe = _cifar("vgg16", "cifar100", optimizer, _VISION_START if averaged else None)
        return replace(recipe, schedule=replace(recipe.schedule, final=final))

    # Initial learning rates follow from the printed terminal ones, which are 1/100 of them.
    adamw, sgd = Optimizer("adamw", 3e-4, 0.25), Optimizer("sgd", 0.03, 5e-4)
    rows = {
        "AdamW to 1/100": run(adamw, 0.01, False),
        "Gadam at 1/10": run(adamw, 0.1, True),
        "Gadam at full rate": run(adamw, 1.0, True),
        "SGD to 1/100": run(sgd, 0.01, False),
        "SWA at 1/10": run(sgd, 0.1, True),
        "SWA at full rate": run(sgd, 1.0, True),
    }
    bases = {row: "AdamW to 1/100" for row in rows if row.startswith("Gadam")}
    bases |= {row: "SGD to 1/100" for row in rows if row.startswith("SWA")}
    numbers = "69.43 69.67 71.55 71.64 71.32 73.40"
    note = (
        "The paper does not print initial learning rates and weight decays for these runs; they "
        "are those of its other VGG-16 runs."
    )
    title = "VGG-16 without BatchNorm: curvature of the loss"
    found = side_by_side(title, rows, numbers, note=note, analysis=("curvature",))
    return replace(found, bases=bases)


@_reproduces
def tab_baselines() -> Experiment:
    rows = _labeled(
        {
            "VGG-16 C-100": {"SGD": _six("vgg16-bn", "cifar100")["SGD"]},
            "PRN-110 C-100": {"SGD": _six("preresnet110", "cifar100")["SGD"]},
            "ResNeXt-29 C-100": {"SGD": _six("resnext29", "cifar100")["SGD"]},
            "VGG-16 C-10": {"SGD": _six("vgg16-bn", "cifar10")["SGD"]},
            "PRN-110 C-10": {"SGD": _six("preresnet110", "cifar10")["SGD"]},
            "WRN-28-10 ImageNet-32": {"SGD": _imagenet32()["SGD"]},
            # The run of Merity, Keskar and Socher, with the dropout of their published command.
            "LSTM PTB": {
                "NT-ASGD": replace(
                    _ptb_nt_asgd(patience=5), epochs=500, language=Language(dropout_input=0.4)
                )
            },
        }
    )
    note = "Published numbers are those of earlier work, as the paper cites them."
    numbers = "73.80 76.35 82.20 93.90 95.06 59.04 58.8"
    return side_by_side("Baselines beside earlier work", rows, numbers, note=note)


@_reproduces
def fig_iaprevious() -> Experiment:
    return replace(
        fig3d(), title="Gain of averaging versus number of parameters, beside earlier work"
    )


@_reproduces
def mnist_logistic() -> Experiment:
    sgd = Optimizer("sgd", 0.1, 0.0)
    base = Recipe(
        name="",
        model="logistic",
        data=Data("mnist", augment=False),
        optimizer=sgd,
        schedule=LINEAR,
        epochs=50,
    )
    rows = {"SGD": base, "SWA": replace(base, schedule=LINEAR_IA, average=Average(25))}
    return side_by_side("Logistic regression on MNIST", rows)
