"""Recipes: round trips, settings by name, validation, names of methods, learning rates."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam import schedule
from gadam._errors import UserError
from gadam.runs.recipe import (
    IMAGE_SETTINGS,
    Average,
    Data,
    Language,
    Optimizer,
    OwnTask,
    Recipe,
    RecipeError,
    Schedule,
    applies_to,
    differences,
    override,
    suggest_setting,
)

RECIPE = Recipe("r", model="vgg-mini")
AVERAGED = replace(RECIPE, average=Average(3), schedule=Schedule("linear-ia"))
TEXT = Recipe("t", "awd-lstm-mini", Data("toy-language", augment=False), language=Language())


# ------------------------------------------------------------------------------------ plain data


@given(
    lr=st.floats(0, 10),
    betas=st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)),
    milestones=st.lists(st.integers(1, 100), max_size=3).map(tuple),
    average=st.sampled_from([None, Average(3), Average(0, every=7), Average(2, weighting="ema")]),
)
def test_survives_json(lr, betas, milestones, average):
    recipe = Recipe(
        "r",
        model="vgg-mini",
        optimizer=Optimizer("adamw", lr, betas=betas),
        schedule=Schedule("step", milestones=milestones),
        average=average,
    )
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_a_language_recipe_survives_json():
    assert Recipe.from_dict(json.loads(json.dumps(TEXT.to_dict()))) == TEXT


def test_missing_settings_have_their_defaults():
    assert Recipe.from_dict({"name": "r", "model": "vgg-mini"}) == RECIPE


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({**RECIPE.to_dict(), "gone": 1}, r"another version of gadam: it has \['gone'\]"),
        ({**RECIPE.to_dict(), "optimizer": {"rate": 1}}, r"another version .* \['rate'\]"),
        ({"name": "r"}, "has no model"),
        ({}, "has no name and no model"),
        ({**RECIPE.to_dict(), "epochs": "many"}, "not what gadam writes"),
        ({**RECIPE.to_dict(), "epochs": {"a": 1}}, "not what gadam writes"),
        ({**RECIPE.to_dict(), "epochs": 0}, "epochs must be at least 1, got 0"),
        (3, "not what gadam writes"),
        ([], "The recipe"),
    ],
)
def test_wrong_plain_data_is_refused_with_a_sentence(values, sentence):
    with pytest.raises(RecipeError, match=sentence):
        Recipe.from_dict(values)


def test_errors_are_for_users():
    assert issubclass(RecipeError, UserError)
    assert issubclass(RecipeError, ValueError)


# ------------------------------------------------------------------------------------ overriding


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("lr=0.25", "optimizer.lr", 0.25),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
        ("epochs=7", "epochs", 7),
        ("data.augment=no", "data.augment", False),
        ("compile=True", "compile", True),
        ("amp=bf16", "amp", "bf16"),
        ("clip_grad_norm=none", "clip_grad_norm", None),
        ("clip_grad_norm=0.5", "clip_grad_norm", 0.5),
        ("keep_iterates=3", "keep_iterates", 3),
        ("blocks=100", "blocks", 100),
        ("betas=0.8,0.9", "optimizer.betas", (0.8, 0.9)),
        ("milestones=3,5,7", "schedule.milestones", (3, 5, 7)),
        ("optimizer.name=padamw", "optimizer.name", "padamw"),
        ("average.start=4", "average.start", 4),
        ("average.every=10", "average.every", 10),
        ("average=none", "average", None),
    ],
)
def test_override(setting, path, value):
    found = override(RECIPE, [setting])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("setting", ["ar_alpha=0.5", "language.ar_alpha=0.5"])
def test_override_language_settings(setting):
    changed = override(TEXT, [setting])
    assert changed.language is not None
    assert changed.language.ar_alpha == 0.5
    with pytest.raises(RecipeError, match=r"r trains on images\. It has no language settings"):
        override(RECIPE, [setting])


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("lr", "--set takes KEY=VALUE, got 'lr'"),
        ("lrr=1", "Did you mean 'lr'"),
        ("optimizer.weight_decy=1", "Did you mean 'optimizer.weight_decay'"),
        ("size=5", "'size' is ambiguous. Use one of data.size, average.size"),
        ("name=x", "'name' is ambiguous"),
        ("lr=fast", "lr must be a number, got 'fast'"),
        ("lr=nan", "lr must be a number, got 'nan'"),
        ("epochs=2.5", "epochs must be a whole number, got '2.5'"),
        ("epochs=0", "epochs must be at least 1, got 0"),
        ("optimizer.name=adamww", "Did you mean 'adamw'"),
        ("betas=0.9", "numbers separated by commas"),
        ("augment=maybe", "true or false"),
        ("label_noise=2", "data.label_noise must be between 0 and 1, got 2.0"),
        ("lr=-1", "lr must be non-negative, got -1.0"),
        ("clip_grad_norm=0", "clip_grad_norm must be positive, got 0.0"),
        ("keep_iterates=-1", "keep_iterates must be non-negative, got -1"),
        ("blocks=-1", "blocks must be non-negative, got -1"),
        ("average.start=-1", "average.start must be non-negative, got -1"),
        ("average.every=0", "average.every must be at least 1, got 0"),
        ("average.start=20", "average.start=20 leaves nothing to average in 20 epochs"),
        ("schedule.name=linear-ia", "needs an average with a fixed start"),
        ("average.start=plateau", "needs a validation metric. Set data.validation"),
        ("refresh_batches=0", "refresh_batches must be at least 1, got 0"),
        ("optimizer.name=asgd", "asgd is SGD with an average. Set average.start"),
        ("zzzzzz=1", "A recipe has no setting 'zzzzzz'. Use one of name, model"),
        ("learning_rate=1", "no setting 'learning_rate'. Did you mean 'lr'"),
        ("model.name=x", "no setting 'model.name'. Did you mean 'model'"),
        ("optimizer=adamw", "'optimizer' is a group of settings. Did you mean optimizer.name=ad"),
        ("optimizer=adamww", "'optimizer' is a group of settings. .* Did you mean 'adamw'"),
        ("average=10", "'average' is a group of settings. Did you mean average.start=10"),
        ("data=photos/x", "'data' is a group of settings. Did you mean data.name=photos/x"),
        ("optimizer.name=gadamx", "set optimizer.name=padamw and average.start"),
        ("seed=3", "'seed' is an option of the command. Use --seed 3"),
        ("data.validation=1.5", "a whole number or a fraction below 1, got 1.5"),
        ("data.validation=x", "data.validation must be a number, got 'x'"),
    ],
)
def test_override_refuses_with_a_sentence(setting, sentence):
    with pytest.raises(RecipeError, match=sentence):
        override(RECIPE, [setting])


def test_all_problems_are_reported_at_once():
    settings = ["lrr=1", "epochs=0", "label_noise=2", "weight_decay=-1", "optimizer.name=asgd"]
    with pytest.raises(RecipeError) as error:
        override(RECIPE, settings)
    first, *lines = str(error.value).splitlines()
    assert first == "Fix 5 settings:"
    assert [line.removeprefix("- ") for line in lines] == list(error.value.problems)
    for line, word in zip(lines, ("lrr", "label_noise", "weight_decay", "epochs", "asgd")):
        assert word in line
    with pytest.raises(RecipeError, match=r"^epochs must be at least 1, got 0\.$"):
        override(RECIPE, settings[1:2])


@given(st.lists(st.sampled_from(["lrr=1", "pad=-1", "lr=x", "bptt=5", "amp=fp8"]), unique=True))
def test_every_problem_has_one_line(settings):
    if not settings:
        assert override(RECIPE, settings) == RECIPE
        return
    with pytest.raises(RecipeError) as error:
        override(RECIPE, settings)
    assert len(error.value.problems) == len(settings)
    assert all("\n" not in problem for problem in error.value.problems)


def test_settings_that_were_not_understood_cause_no_other_problems():
    settings = ["average.start=soon", "epochs=2"]  # the old start is after the end
    with pytest.raises(RecipeError, match=r"^average.start must be .* got 'soon'\.$"):
        override(AVERAGED, settings)
    with pytest.raises(RecipeError, match=r"^A recipe has no setting 'average.strat'\. Did you"):
        override(AVERAGED, ["average.strat=1", "epochs=2"])


def test_sections_are_checked_when_a_recipe_is_read():
    values = {**RECIPE.to_dict(), "data": {"pad": -1}, "optimizer": {"lr": -1}}
    with pytest.raises(RecipeError, match=r"Fix 2 settings:\n- data.pad .*\n- lr must be"):
        Recipe.from_dict(values)


@pytest.mark.parametrize("name", ["photos/flowers", "./mnist", "digits.npz", "~/flowers"])
def test_own_data_starts_from_the_defaults(name):
    chosen = Data("mini", 500, label_noise=0.3, examples=1000, size=14, augment=False, pad=2)
    recipe = replace(RECIPE, data=chosen)
    expected = Data(name, validation=0.1, augment=False, pad=2)
    assert override(recipe, [f"data.name={name}"]).data == expected
    settings = [f"data.name={name}", "size=8", "validation=7"]
    for each in (settings, settings[::-1]):
        with pytest.raises(RecipeError, match="ambiguous"):
            override(recipe, each)
        each = [setting.replace("size", "data.size") for setting in each]
        assert override(recipe, each).data == replace(expected, size=8, validation=7)
    without = replace(recipe, data=replace(chosen, validation=0))
    assert override(without, [f"data.name={name}"]).data.validation == 0
    assert override(recipe, ["data.name=mnist"]).data == replace(chosen, name="mnist")


def test_a_folder_in_the_working_directory_is_own_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    noisy = replace(RECIPE, data=Data(label_noise=0.3))
    assert override(noisy, ["data.name=flowers"]).data.label_noise == 0.3
    (tmp_path / "flowers").mkdir()
    assert override(noisy, ["data.name=flowers"]).data.label_noise == 0


def test_suggest_setting():
    assert suggest_setting("lr", "0.1") == "lr=0.1"
    assert suggest_setting("wd", "0.1") == "weight_decay=0.1"
    assert suggest_setting("average", "3") == "average.start=3"
    assert suggest_setting("name", "x") is None
    assert suggest_setting("color", "red") is None


def test_code_path():
    assert RECIPE.code_path is None
    assert replace(RECIPE, model="package.nets:Small.deep").code_path == "package.nets"
    assert replace(RECIPE, task=OwnTask("my_task.py")).code_path == "my_task.py"


def test_the_order_of_settings_does_not_matter():
    settings = ["average.start=plateau", "data.validation=100"]
    with pytest.raises(RecipeError, match="validation"):
        override(RECIPE, settings[:1])
    assert override(RECIPE, settings) == override(RECIPE, settings[::-1])


@pytest.mark.parametrize(
    ("setting", "recipe", "expected"),
    [
        ("lr=1", RECIPE, True),
        ("average.start=1", RECIPE, False),
        ("average.start=1", AVERAGED, True),
        ("bptt=20", RECIPE, False),
        ("bptt=20", TEXT, True),
        ("data.size=8", TEXT, False),
        ("data.size=8", RECIPE, True),
        ("examples=8", TEXT, True),
    ],
)
def test_applies_to(setting, recipe, expected):
    assert applies_to(setting, recipe) is expected


@pytest.mark.parametrize("name", IMAGE_SETTINGS)
def test_a_text_refuses_settings_of_images(name):
    other = {"augment": "true", "label_noise": "0.5"}.get(name, "7")
    with pytest.raises(RecipeError, match=f"data.{name} applies to images"):
        override(TEXT, [f"data.{name}={other}"])


def test_differences_lists_changed_settings():
    other = replace(AVERAGED, optimizer=Optimizer("sgd", 0.2), average=None, schedule=Schedule())
    assert "optimizer.lr: 0.1 → 0.2" in differences(AVERAGED, other)
    assert differences(AVERAGED, AVERAGED) == []
    assert any(d.startswith("average") for d in differences(AVERAGED, other))


# ------------------------------------------------------------------------------- names and rates


@pytest.mark.parametrize(
    ("optimizer", "average", "method"),
    [
        (Optimizer("sgd"), Average(1), "SWA"),
        (Optimizer("adamw"), Average(1), "Gadam"),
        (Optimizer("padamw"), Average(1), "GadamX"),
        (Optimizer("adam"), Average(1), "Adam-IA"),
        (Optimizer("adamw"), None, "AdamW"),
        (Optimizer("adamw", lookahead=True), Average(1), "Gadam + LH"),
        (Optimizer("sgd"), Average("plateau"), "SWA-Auto"),
        (Optimizer("adamw"), Average(1, weighting="ema"), "AdamW + EMA"),
        (Optimizer("adamw"), Average(1, weighting="window"), "AdamW + LAWA"),
    ],
)
def test_methods_have_the_names_of_the_paper(optimizer, average, method):
    data = Data(validation=10)
    assert Recipe("r", "vgg-mini", data, optimizer, average=average).method == method


def rates(schedule_: Schedule, average: Average | None = None) -> list[float]:
    recipe = replace(RECIPE, epochs=10, schedule=schedule_, average=average)
    assert recipe.optimizer.lr == 0.1
    return [recipe.learning_rate(epoch) / 0.1 for epoch in range(recipe.epochs)]


def test_a_constant_learning_rate():
    assert rates(Schedule("constant")) == [1.0] * 10


@pytest.mark.parametrize(("final", "used"), [(None, 0.01), (0.2, 0.2)])
def test_a_linear_learning_rate_decays_from_the_middle(final, used):
    found = rates(Schedule("linear", final))
    assert found == pytest.approx([schedule.linear(e, 10, final=used) for e in range(10)])
    assert found[:5] == pytest.approx([1.0] * 5)
    assert found[-1] == pytest.approx(used)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(("final", "used"), [(None, 0.5), (0.2, 0.2)])
def test_linear_ia_is_constant_while_averaging(final, used):
    found = rates(Schedule("linear-ia", final), Average(6))
    expected = [schedule.linear_for_averaging(e, 6, final=used) for e in range(10)]
    assert found == pytest.approx(expected)
    assert found[6:] == pytest.approx([used] * 4)
    assert found[0] == pytest.approx(1.0)


def test_linear_ia_with_an_average_from_the_first_epoch():
    assert rates(Schedule("linear-ia"), Average(0))[1:] == pytest.approx([0.5] * 9)


@pytest.mark.parametrize("final", [None, 0.2])
def test_frozen_linear_stops_decaying_where_averaging_starts(final):
    found = rates(Schedule("frozen-linear", final), Average(7))
    linear = rates(Schedule("linear", final))
    assert found[:8] == pytest.approx(linear[:8])
    assert found[7:] == [found[7]] * 3
    assert linear[-1] < found[-1] < 1


def test_a_step_learning_rate():
    found = rates(Schedule("step", milestones=(3, 7)))
    assert found == pytest.approx([1] * 3 + [0.1] * 4 + [0.01] * 3)
    assert rates(Schedule("step")) == [1.0] * 10


@pytest.mark.parametrize("final", [None, 0.2])
def test_a_cosine_learning_rate(final):
    found, last = rates(Schedule("cosine", final)), final or 0.0
    assert found[0] == pytest.approx(1.0)
    assert found[5] == pytest.approx((1 + last) / 2)
    at_nine_tenths = (1 + math.cos(0.9 * math.pi)) / 2
    assert found[9] == pytest.approx(last + (1 - last) * at_nine_tenths)
