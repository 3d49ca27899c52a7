"""Check the transformer against explicit attention, what each word sees, and its training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gadam.runs.recipe import Data, Language, Optimizer, Recipe, RecipeError
from gadam.train import tasks, transformer
from gadam.train.transformer import Transformer, _Block

CPU = torch.device("cpu")
TEXT = torch.randint(11, (9, 3), generator=torch.Generator().manual_seed(0))


def build(
    context: int = 128,
    dropout: float = 0.0,
    dropout_hidden: float = 0.0,
    dropout_input: float = 0.0,
) -> Transformer:
    torch.manual_seed(1)
    return Transformer(
        11,
        8,
        2,
        2,
        context,
        dropout=dropout,
        dropout_hidden=dropout_hidden,
        dropout_input=dropout_input,
    )


def scores(model: Transformer, text: Tensor) -> Tensor:
    found: Tensor = model(text).scores
    return found.detach()


@pytest.mark.parametrize("context", [3, 128])
def test_a_word_sees_only_itself_and_the_words_before_it(context: int) -> None:
    model = build(context)
    with torch.no_grad():  # at its small initial weights, attention hardly depends on the words
        for p in model.parameters():
            p.mul_(10)
    for changed in range(len(TEXT)):
        other = TEXT.clone()
        other[changed] = (other[changed] + 1) % 11
        differs = (scores(model, other) != scores(model, TEXT)).flatten(1).any(1).tolist()
        # Each of the two layers reaches back by context - 1 words.
        reach = changed + 2 * (context - 1)
        assert differs == [changed <= place <= reach for place in range(len(TEXT))]


def test_columns_do_not_see_each_other() -> None:
    model = build()
    torch.testing.assert_close(scores(model, TEXT[:, 1:2]), scores(model, TEXT)[:, 1:2])


def test_attention_is_a_softmax_with_a_penalty_on_distance() -> None:
    torch.manual_seed(0)
    model, block = build(context=4), _Block(8, 2, 0.0)
    x = torch.randn(1, 6, 8)
    with torch.no_grad():
        for p in block.mlp.parameters():
            p.zero_()
        got = block(x, model._attention_bias(6))[0]
        q, k, v = block.qkv(block.before_attention(x))[0].split(8, dim=1)
        heads = []
        for head, slope in enumerate((2**-4, 2**-8)):
            part = slice(4 * head, 4 * head + 4)
            rows = []
            for reader in range(6):
                read = range(max(0, reader - 3), reader + 1)
                logits = torch.stack(
                    [
                        q[reader, part] @ k[place, part] / math.sqrt(4) - slope * (reader - place)
                        for place in read
                    ]
                )
                rows.append(logits.softmax(0) @ v[list(read), part])
            heads.append(torch.stack(rows))
        expected = x[0] + block.out(torch.cat(heads, dim=1))
    torch.testing.assert_close(got, expected)


def test_dropout_acts_only_in_training() -> None:
    for model in (build(dropout=0.5), build(dropout_hidden=0.5), build(dropout_input=0.5)):
        assert not torch.equal(scores(model, TEXT), scores(model, TEXT))
        model.eval()
        assert torch.equal(scores(model, TEXT), scores(model, TEXT))


def test_build_by_name() -> None:
    model = transformer.build("Transformer mini", 100)
    assert len(model.blocks) == 3
    assert model(TEXT).scores.shape == (9, 3, 100)
    assert model(TEXT).state == ()
    with pytest.raises(ValueError, match="Unknown transformer 'gpt'"):
        transformer.build("gpt", 100)
    with pytest.raises(ValueError, match=r"language\.dropout_words=0"):
        transformer.build("transformer-mini", 100, dropout_words=0.1)
    with pytest.raises(ValueError, match=r"language\.weight_drop=0"):
        transformer.build("transformer-mini", 100, weight_drop=0.1)
    with pytest.raises(ValueError, match="multiple of heads"):
        Transformer(11, 8, 1, 3)


LANGUAGE = Language(20, False, 0.0, 0.0, 0.0, 0.0, 0.0, ar_alpha=0.0, tar_beta=0.0)
RECIPE = Recipe(
    "r",
    model="transformer-mini",
    data=Data("toy-language", examples=4000, augment=False),
    optimizer=Optimizer("adamw", 3e-3),
    language=LANGUAGE,
    batch_size=10,
)


def test_it_learns_a_language() -> None:
    task = tasks.build(RECIPE, 0, CPU, None)
    optimizer = torch.optim.AdamW(task.model.parameters(), 3e-3)
    before = task.evaluate(task.model, "validation")["perplexity"]
    task.model.train()
    for _ in range(2):
        for batch in task.batches(0):
            optimizer.zero_grad()
            task.loss(task.model, batch)[0].backward()
            optimizer.step()
    assert task.evaluate(task.model, "validation")["perplexity"] < before / 2


def test_it_is_not_for_images() -> None:
    recipe = Recipe("r", model="transformer-mini")
    with pytest.raises(RecipeError, match="transformer-mini is a language model"):
        tasks.build(recipe, 0, CPU, None)
