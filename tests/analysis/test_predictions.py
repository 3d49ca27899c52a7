"""Check diversity and ensembles against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gadam.analysis import diversity, ensemble, log_probabilities


def draw(n: int, examples: int, classes: int, seed: int = 0, sharp: float = 2.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (sharp * torch.randn(examples, classes, generator=generator)).log_softmax(-1)
        for _ in range(n)
    ]


@given(
    n=st.integers(2, 5),
    examples=st.integers(1, 30),
    classes=st.integers(2, 7),
    sharp=st.sampled_from([1e-3, 1.0, 30.0]),
    max_elements=st.integers(1, 500),
)
def test_every_pair_matches_the_definitions(n, examples, classes, sharp, max_elements):
    points = draw(n, examples, classes, seed=n * examples, sharp=sharp)
    found = diversity(points, max_elements=max_elements)
    assert found.examples == examples
    for i, a in enumerate(points):
        for j, b in enumerate(points):
            p, q = a.double().exp(), b.double().exp()
            both = torch.nn.functional.kl_div(
                b.double(), a.double(), log_target=True, reduction="sum"
            )
            both += torch.nn.functional.kl_div(
                a.double(), b.double(), log_target=True, reduction="sum"
            )
            expected = {
                "kl": float(both) / 2,
                "total_variation": float((p - q).abs().sum()) / 2,
                "disagreement": float((a.argmax(-1) != b.argmax(-1)).sum()),
                "squared_distance": float((p - q).square().sum()),
            }
            for name, value in expected.items():
                seen = float(getattr(found, name)[i, j])
                assert seen == pytest.approx(value / examples, rel=1e-5, abs=1e-12), name


def test_means_and_the_unit_of_the_paper():
    points = draw(4, 50, 3)
    found = diversity(points)
    pairs = [float(found.kl[i, j]) for i in range(4) for j in range(i)]
    assert found.mean("kl") == pytest.approx(sum(pairs) / 6)
    assert found.thousands("kl") == pytest.approx(found.mean("kl") * 50 / 1000)
    assert found.by_distance("kl")[2] == pytest.approx(float(found.kl[0, 3]))
    assert len(found.by_distance("kl")) == 3


def test_nearly_identical_predictions_keep_precision():
    a = draw(1, 2000, 10)[0].double()
    b = (
        a + 1e-6 * torch.randn(a.shape, generator=torch.Generator().manual_seed(1)).double()
    ).log_softmax(-1)
    p, q = a.exp(), b.exp()
    exact = float(((p - q) * (a - b)).sum() / 2 / 2000)
    found = diversity([a, b])
    assert 0 < exact < 1e-11
    assert float(found.kl[0, 1]) == pytest.approx(exact, rel=1e-6)


@given(n=st.integers(1, 6), examples=st.integers(1, 25), max_elements=st.integers(1, 300))
def test_ensemble_is_the_mean_of_probabilities(n, examples, max_elements):
    points = draw(n, examples, 4, seed=examples)
    true = torch.arange(examples) % 4
    single, combined = ensemble(points, true, max_elements=max_elements)
    assert len(single) == len(combined) == n
    for k in range(1, n + 1):
        mean = torch.stack([p.double().exp() for p in points[:k]]).mean(0)
        accuracy = 100 * float((mean.argmax(-1) == true).double().mean())
        loss = -float(mean[torch.arange(examples), true].log().mean())
        assert combined[k - 1].accuracy == pytest.approx(accuracy)
        assert combined[k - 1].loss == pytest.approx(loss)
    assert single[0] == pytest.approx(combined[0])
    # Jensen: the loss of the mean probabilities is at most the mean of the losses.
    assert combined[-1].loss <= sum(s.loss for s in single) / n + 1e-9


def test_predictions_may_stay_on_disk(tmp_path):
    points = draw(3, 40, 5)
    mapped = []
    for i, point in enumerate(points):
        torch.save(point, tmp_path / f"{i}.pt")
        mapped.append(torch.load(tmp_path / f"{i}.pt", mmap=True, weights_only=True))
    torch.testing.assert_close(diversity(mapped).kl, diversity(points).kl)


def test_log_probabilities_restore_training_modes():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    model[2].eval()
    batches = [(torch.randn(5, 3), torch.zeros(5)), (torch.randn(2, 3), torch.zeros(2))]
    found = log_probabilities(model, batches)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    model.eval()
    expected = model(torch.cat([x for x, _ in batches])).log_softmax(-1)
    torch.testing.assert_close(found, expected.detach())
    doubled = log_probabilities(model, batches, forward=lambda m, batch: 2 * m(batch[0]))
    assert not torch.allclose(doubled, found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: diversity(draw(1, 3, 2)), "at least two points, got 1"),
        (lambda: diversity([*draw(1, 3, 2), *draw(1, 4, 2)]), "the same shape"),
        (lambda: diversity([torch.full((2, 2), -torch.inf)] * 2), "must be finite"),
        (lambda: diversity(draw(2, 3, 2)).mean("kll"), "got 'kll'"),
        (
            lambda: ensemble(draw(2, 3, 2), torch.zeros(4)),
            r"targets must have shape \(3,\), got \(4,\)",
        ),
        (lambda: log_probabilities(nn.Linear(1, 1), []), "batches is empty"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("wrong", [torch.randn(6, 4), torch.full((6, 4), 0.25)])
def test_logits_and_probabilities_are_rejected(wrong):
    logs = torch.randn(6, 4).log_softmax(-1)
    message = r"Apply log_softmax\(-1\) to logits, or log\(\) to probabilities"
    with pytest.raises(ValueError, match=message):
        diversity([logs, wrong])
    with pytest.raises(ValueError, match=message):
        ensemble([logs, wrong], torch.zeros(6, dtype=torch.long))


def test_half_precision_is_accepted():
    points = [torch.randn(50, 10).mul(3).log_softmax(-1) for _ in range(2)]
    exact = diversity(points)
    found = diversity([point.bfloat16() for point in points])
    assert found.mean("kl") == pytest.approx(exact.mean("kl"), rel=0.05)
