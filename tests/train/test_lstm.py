"""Check the language model against torch's LSTM and the explicit recurrence, and its dropouts."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gadam
from gadam.train import lstm
from gadam.train.lstm import AWDLSTM, WeightDropLSTM


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def small(**dropouts: float) -> AWDLSTM:
    none = dict.fromkeys(
        ("dropout", "dropout_hidden", "dropout_input", "dropout_words", "weight_drop"), 0.0
    )
    return AWDLSTM(11, 4, (6, 5), **{**none, **dropouts}).double()


TEXT = torch.randint(11, (7, 3), generator=torch.Generator().manual_seed(1))


def plain_lstm(layer: WeightDropLSTM, recurrent: torch.Tensor | None = None) -> nn.LSTM:
    plain = nn.LSTM(layer.input_size, layer.hidden_size, dtype=layer.weight_hh_l0.dtype)
    state = layer.state_dict()
    if recurrent is not None:
        state["weight_hh_l0"] = recurrent
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize("mode", ["eval", "no weight drop"])
def test_matches_torch_lstm_without_dropout(mode):
    layer = WeightDropLSTM(3, 5, weight_drop=0.0 if mode == "no weight drop" else 0.5)
    layer.train(mode != "eval")
    x, state = torch.randn(7, 2, 3), (torch.randn(1, 2, 5), torch.randn(1, 2, 5))
    for hx in (None, state):
        out, (h, c) = layer(x, hx)
        expected, (h_, c_) = plain_lstm(layer)(x, hx)
        assert torch.equal(out, expected)
        assert torch.equal(h, h_)
        assert torch.equal(c, c_)


def test_matches_torch_lstm_with_one_dropped_matrix_in_training():
    layer = WeightDropLSTM(3, 5, weight_drop=0.4).double()
    x = torch.randn(7, 2, 3, dtype=torch.float64)
    torch.manual_seed(5)
    dropped = F.dropout(layer.weight_hh_l0.detach(), 0.4)
    assert 0 < int((dropped == 0).sum()) < dropped.numel()
    plain = plain_lstm(layer, dropped)
    torch.manual_seed(5)
    out, _ = layer(x)
    expected, _ = plain(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.square().sum().backward()
    expected.square().sum().backward()
    scale = (dropped / layer.weight_hh_l0).detach()
    grad = plain.get_parameter("weight_hh_l0").grad
    assert grad is not None
    torch.testing.assert_close(layer.weight_hh_l0.grad, grad * scale)
    torch.testing.assert_close(layer.weight_ih_l0.grad, plain.weight_ih_l0.grad)
    assert not torch.equal(layer(x)[0], out)  # The next call draws another mask.


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 1, 64), (1, 8, 64), (1, 64, 64), (1, 32, 1), (2, 32, 64)], ids=str
)
def test_state_of_wrong_size_raises_the_same_error_as_torch(shape, training):
    layer = WeightDropLSTM(3, 64, weight_drop=0.5).train(training)
    x, state = torch.randn(50, 32, 3), (torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(RuntimeError, match="hidden") as expected:
        plain_lstm(layer)(x, state)
    with pytest.raises(RuntimeError, match="hidden") as found:
        layer(x, state)
    assert str(found.value) == str(expected.value)


def test_invalid_inputs_and_probabilities_raise():
    layer = WeightDropLSTM(3, 5, weight_drop=0.5)
    packed = nn.utils.rnn.pack_sequence([torch.zeros(4, 3)])
    for bad in (torch.zeros(4, 3), packed):
        with pytest.raises(ValueError, match=r"a tensor of shape \(time, batch, input\)"):
            layer(bad)
    with pytest.raises(ValueError, match="dtype"):
        layer(torch.zeros(4, 2, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="size"):
        layer(torch.zeros(4, 2, 7))
    with pytest.raises(ValueError, match=r"weight_drop must be in \[0, 1\), got 1.5"):
        WeightDropLSTM(3, 5, weight_drop=1.5)
    with pytest.raises(ValueError, match=r"dropout_input must be in \[0, 1\), got -1"):
        AWDLSTM(5, 3, (), dropout_input=-1)
    assert WeightDropLSTM(3, 5, dtype=torch.float64).weight_hh_l0.dtype == torch.float64


@pytest.mark.parametrize("p", [0.5, 0.2, 0.0, 0.9])
def test_large_matrices_are_dropped_like_small_ones(p, monkeypatch):
    monkeypatch.setattr(lstm, "LARGE_MATRIX", 0)
    weight = torch.full((400, 501), 2.0, requires_grad=True)
    torch.manual_seed(3)
    out = lstm.drop_connect(weight, p)
    torch.manual_seed(3)
    assert torch.equal(out, lstm.drop_connect(weight, p))
    kept = out != 0
    n = weight.numel()
    assert abs(float(kept.double().mean()) - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5 + 2**-16
    torch.testing.assert_close(out[kept].unique().item(), 2 / (1 - p), rtol=1e-4, atol=0)
    # Neighbors share a random number but are dropped independently.
    for a, b in ((kept[:, :-1], kept[:, 1:]), (kept[:-1], kept[1:])):
        both = float((a & b).double().mean())
        assert both == pytest.approx((1 - p) ** 2, abs=5 / n**0.5)
    out.sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, out.detach() / 2)


def test_parameters_are_never_replaced():
    layer = WeightDropLSTM(3, 5, weight_drop=0.5)
    before = dict(layer.named_parameters())
    optimizer = gadam.Gadam(layer.parameters(), lr=0.1, average=gadam.Averaging(start=1))
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(4, 2, 3))[0].sum().backward()
        optimizer.step()
        layer.eval()(torch.randn(4, 2, 3))
        layer.train()
    assert list(before) == ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    assert all(p is before[name] for name, p in layer.named_parameters())
    assert all(p.is_leaf for p in layer.parameters())
    assert list(layer.state_dict()) == list(nn.LSTM(3, 5).state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict", "functional_call"])
def test_copies_match_after_training(how):
    model = small(weight_drop=0.5, dropout_words=0.1)
    model(TEXT).scores.sum().backward()
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        other = small(weight_drop=0.5, dropout_words=0.1)
        if how == "state_dict":
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            other.load_state_dict(torch.load(file, weights_only=True))
    for training in (True, False):
        model.train(training), other.train(training)
        torch.manual_seed(2)
        expected = model(TEXT).scores
        torch.manual_seed(2)
        if how == "functional_call":
            scores = torch.func.functional_call(other, dict(model.named_parameters()), TEXT).scores
        else:
            scores = other(TEXT).scores
        assert torch.equal(scores, expected)
    assert other.layers[0].weight_hh_l0 is not model.layers[0].weight_hh_l0


def test_forward_uses_the_averaged_weights():
    model = small(weight_drop=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
    iterates = []
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(TEXT).scores[:-1].flatten(0, 1), TEXT[1:].flatten()).backward()
        optimizer.step()
        iterates.append({k: v.clone() for k, v in model.state_dict().items()})
    mean = {k: torch.stack([i[k] for i in iterates]).mean(0) for k in iterates[0]}
    other = small(weight_drop=0.5)
    other.load_state_dict(mean)
    with average.applied(model):
        inside = model.eval()(TEXT).scores
    torch.testing.assert_close(inside, other.eval()(TEXT).scores)
    other.load_state_dict(iterates[-1])
    assert torch.equal(model(TEXT).scores, other(TEXT).scores)


def test_matches_the_explicit_recurrence():
    model = small()
    scores, state, raw, dropped = model(TEXT)
    x = model.embedding.weight[TEXT]
    for layer, (h_end, c_end) in zip(model.layers, state):
        assert isinstance(layer, WeightDropLSTM)
        h = c = torch.zeros_like(h_end[0])
        outputs = []
        for inputs in x:
            gates = inputs @ layer.weight_ih_l0.T + layer.bias_ih_l0
            gates = gates + h @ layer.weight_hh_l0.T + layer.bias_hh_l0
            i, f, g, o = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        x = torch.stack(outputs)
        torch.testing.assert_close((h_end[0], c_end[0]), (h, c))
    torch.testing.assert_close(raw, x)
    assert dropped is raw
    torch.testing.assert_close(scores, x @ model.embedding.weight.T + model.bias)


def test_state_continues_the_sequence():
    model = small()
    whole = model(TEXT)
    first = model(TEXT[:3])
    second = model(TEXT[3:], lstm.detached(first.state))
    torch.testing.assert_close(torch.cat([first.scores, second.scores]), whole.scores)
    second.scores.sum().backward()
    assert first.scores.grad_fn is not None
    assert all(not t.requires_grad for pair in lstm.detached(first.state) for t in pair)


def test_locked_dropout_uses_one_mask_for_all_time_steps():
    x = torch.ones(9, 4, 50)
    dropped = lstm.locked_dropout(x, 0.3, training=True)
    assert torch.equal(dropped, dropped[:1].expand_as(dropped))
    assert not torch.equal(dropped[:, 0], dropped[:, 1])
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert lstm.locked_dropout(x, 0.3, training=False) is x


def test_word_dropout_drops_all_occurrences():
    model = small(dropout_words=0.5)
    text = torch.arange(11).repeat(4, 2)  # Every word occurs eight times.
    ratio = (model._embed(text) / model.embedding(text)).detach()
    by_word = ratio.view(4, 2, 11, 4).permute(2, 0, 1, 3).flatten(1)
    assert torch.allclose(by_word, by_word[:, :1].expand_as(by_word))
    assert sorted({round(v, 6) for v in by_word[:, 0].tolist()}) == [0.0, 2.0]
    assert torch.equal(model.eval()._embed(text), model.embedding(text))


def test_tied_embedding_sums_both_gradients():
    model = small()
    model(TEXT).scores.square().sum().backward()
    tied = model.embedding.weight.grad
    embedding = model.embedding.weight.detach().clone().requires_grad_()
    decoder = model.embedding.weight.detach().clone().requires_grad_()
    x = F.embedding(TEXT, embedding)
    for layer in model.layers:
        x, _ = layer(x)
    F.linear(x, decoder, model.bias).square().sum().backward()
    assert embedding.grad is not None
    assert decoder.grad is not None
    torch.testing.assert_close(tied, embedding.grad + decoder.grad)


def test_dropout_applies_only_in_training():
    model = small(
        dropout=0.4, dropout_hidden=0.3, dropout_input=0.5, dropout_words=0.2, weight_drop=0.5
    )
    assert not torch.equal(model(TEXT).scores, model(TEXT).scores)
    model.eval()
    plain = small()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(TEXT).scores, plain(TEXT).scores)


def test_packed_weights_share_one_buffer():
    """CuDNN receives the same values in one buffer, and gradients flow through."""
    layer = WeightDropLSTM(3, 5)
    weights = [p.clone() for p in layer.parameters()]
    pieces = lstm.pack_weights(weights)
    assert all(torch.equal(a, b) for a, b in zip(pieces, weights))
    assert len({p.untyped_storage().data_ptr() for p in pieces}) == 1
    ends = [p.storage_offset() + p.numel() for p in pieces]
    assert [p.storage_offset() for p in pieces] == [0, *ends[:-1]]
    torch.stack([(p * i).sum() for i, p in enumerate(pieces)]).sum().backward()
    assert layer.bias_hh_l0.grad is not None
    assert layer.bias_hh_l0.grad.unique().tolist() == [3.0]


def test_network_sizes_match_the_paper():
    with torch.device("meta"):
        model = lstm.build("AWD-LSTM", 10_000)
    assert sum(p.numel() for p in model.parameters()) == 24_221_600
    assert [(layer.input_size, layer.hidden_size) for layer in model.layers] == [
        (400, 1150),
        (1150, 1150),
        (1150, 400),
    ]
    with pytest.raises(ValueError, match=r"Unknown language model 'vgg16'.*awd-lstm"):
        lstm.build("vgg16", 10)


def test_bfloat16_autocast_trains():
    model = AWDLSTM(11, 4, (6, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.cross_entropy(model(TEXT).scores.flatten(0, 1), TEXT.flatten()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
