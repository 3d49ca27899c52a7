"""The paper's language model: the AWD-LSTM of Merity, Keskar and Socher (2017), and a small one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam._names import find

__all__ = ["AWDLSTM", "Output", "State", "WeightDropLSTM", "build", "canonical", "names"]

State = tuple[tuple[Tensor, Tensor], ...]  # of each layer: hidden state and cell


def locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout with one mask for all times (variational dropout): x is (time, batch, feature)."""
    if not training or p == 0.0:
        return x
    return x * F.dropout(x.new_ones(1, *x.shape[1:]), p)


class WeightDropLSTM(nn.LSTM):
    """A layer of LSTM whose recurrent weights are dropped while it trains: DropConnect.

    Each call draws one mask for ``weight_hh_l0`` and keeps it through the sequence. The parameters are
    those of :class:`torch.nn.LSTM`, by the same names, and are never replaced: what is dropped is a value
    on the way, so that optimisers, averages, copies and checkpoints see the same tensors throughout.

    Args:
        input_size: features that come in
        hidden_size: features that go out
        weight_drop: the probability of each recurrent weight to be left out

    Example:
        >>> layer = WeightDropLSTM(3, 5, weight_drop=0.5)
        >>> x = torch.ones(7, 2, 3)
        >>> plain = nn.LSTM(3, 5)
        >>> _ = plain.load_state_dict(layer.state_dict())
        >>> torch.equal(layer.eval()(x)[0], plain(x)[0])
        True
    """

    weight_ih_l0: nn.Parameter
    weight_hh_l0: nn.Parameter
    bias_ih_l0: nn.Parameter
    bias_hh_l0: nn.Parameter

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        weight_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, device=device, dtype=dtype)
        self.weight_drop = _probability(weight_drop=weight_drop)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight_drop={self.weight_drop}"

    def forward(  # type: ignore[override]
        self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The outputs (time, batch, hidden) and the last state, from x (time, batch, input)."""
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError("the input must be a tensor (time, batch, input)")
        if x.is_cpu and torch.is_autocast_enabled("cpu"):
            # In half precision oneDNN has an LSTM on few processors only: in its own on the CPU.
            with torch.autocast("cpu", enabled=False):
                return self(x.to(self.weight_hh_l0.dtype), hx)
        if not self.training or self.weight_drop == 0.0:
            return super().forward(x, hx)
        if hx is None:
            zeros = x.new_zeros(1, x.shape[1], self.hidden_size)
            hx = (zeros, zeros)
        self.check_forward_args(x, hx, None)
        recurrent = dropped(self.weight_hh_l0, self.weight_drop)
        weights = [self.weight_ih_l0, recurrent, self.bias_ih_l0, self.bias_hh_l0]
        if x.is_cuda:
            weights = in_one_piece(weights)
        out, h, c = torch.lstm(x, hx, weights, True, 1, 0.0, True, False, False)
        return out, (h, c)


def _probability(**named: float) -> float:
    ((name, p),) = named.items()
    if not 0.0 <= p < 1.0:
        raise ValueError(f"Invalid {name}: {p} (it must lie in [0, 1))")
    return p


LARGE = 1 << 20


def dropped(weight: Tensor, p: float) -> Tensor:
    """Dropout of a weight matrix: of a large one on the CPU, where drawing a number for each takes longest, by 16 random
    bits each, so that p is rounded to a multiple of 2⁻¹⁶.
    """
    if not weight.is_cpu or weight.numel() < LARGE:
        return F.dropout(weight, p)
    count, levels = weight.numel(), 1 << 16
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(1 << 63), None)
    cut = round(p * levels)
    kept = bits.view(torch.int16)[:count] >= cut - levels // 2
    return weight * kept.view_as(weight).to(weight.dtype).mul_(levels / (levels - cut))


def in_one_piece(weights: Sequence[Tensor]) -> list[Tensor]:
    """The same values side by side in memory, as cuDNN wants them: else it copies them, and warns."""
    flat = torch.cat([weight.flatten() for weight in weights])
    pieces = flat.split([weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights)]


class Output(NamedTuple):
    """What :class:`AWDLSTM` gives.

    Attributes:
        scores: Of the next word (time, batch, words).
        state: To go on with.
        raw: The last layer's outputs.
        dropped: The same with dropout: what the scores are made of.
    """

    scores: Tensor
    state: State
    raw: Tensor
    dropped: Tensor


class AWDLSTM(nn.Module):
    """Layers of LSTM between an embedding and its transpose, with dropout everywhere.

    While it trains, words are dropped from the vocabulary (every occurrence in the batch), features of
    the embedded words, of what goes from layer to layer and of what comes out (one mask for all times),
    and recurrent weights.

    Args:
        words: how many there are
        width: of the embedding, and of the last layer, whose outputs are compared with it
        hidden: widths of the layers before the last
        dropout: of the last layer's outputs
        dropout_hidden: between layers
        dropout_input: of the embedded words
        dropout_words: of whole words
        weight_drop: of recurrent weights

    Example:
        >>> model = AWDLSTM(10_000, 400, (1150, 1150))
        >>> sum(p.numel() for p in model.parameters())
        24221600
        >>> text = torch.zeros(5, 2, dtype=torch.int64)  # (time, batch)
        >>> model(text).scores.shape
        torch.Size([5, 2, 10000])
    """

    def __init__(
        self,
        words: int,
        width: int,
        hidden: Sequence[int],
        *,
        dropout: float = 0.4,
        dropout_hidden: float = 0.25,
        dropout_input: float = 0.65,
        dropout_words: float = 0.1,
        weight_drop: float = 0.5,
    ) -> None:
        super().__init__()
        self.dropout = _probability(dropout=dropout)
        self.dropout_hidden = _probability(dropout_hidden=dropout_hidden)
        self.dropout_input = _probability(dropout_input=dropout_input)
        self.dropout_words = _probability(dropout_words=dropout_words)
        self.embedding = nn.Embedding(words, width)
        sizes = [width, *hidden, width]
        self.layers = nn.ModuleList(WeightDropLSTM(a, b, weight_drop) for a, b in pairwise(sizes))
        self.bias = nn.Parameter(torch.zeros(words))
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, text: Tensor, state: State | None = None) -> Output:
        """Scores for what follows each word of the text, (time, batch)."""
        x = self._embed(text)
        states = []
        for i, layer in enumerate(self.layers):
            p = self.dropout_hidden if i else self.dropout_input
            raw, last = layer(locked_dropout(x, p, self.training), state[i] if state else None)
            states.append(last)
            x = raw
        dropped = locked_dropout(raw, self.dropout, self.training)
        scores = F.linear(dropped, self.embedding.weight, self.bias)
        return Output(scores, tuple(states), raw, dropped)

    def _embed(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        if not self.training or self.dropout_words == 0.0:
            return x
        kept = F.dropout(x.new_ones(self.embedding.num_embeddings), self.dropout_words)
        return x * kept[text].unsqueeze(-1)


def detached(state: State) -> State:
    """The state, with nothing behind it."""
    return tuple((h.detach(), c.detach()) for h, c in state)


_NETWORKS: dict[str, tuple[int, tuple[int, ...]]] = {  # width, hidden
    "awd-lstm": (400, (1150, 1150)),
    "awd-lstm-mini": (64, (128,)),
}


def names() -> list[str]:
    """The networks that :func:`build` knows."""
    return list(_NETWORKS)


def canonical(name: str) -> str | None:
    """The name as :func:`names` spells it; None if it is none of them."""
    return find(name, {known: known for known in _NETWORKS})[0]


def build(name: str, words: int, **dropouts: float) -> AWDLSTM:
    """A freshly initialised language model.

    Args:
        name: one of :func:`names`; only its letters and digits matter, in either case
        words: how many there are
        dropouts: see :class:`AWDLSTM`
    """
    known = canonical(name)
    if known is None:
        raise ValueError(
            f"unknown language model {name!r}; there are {', '.join(_NETWORKS)} (networks for pictures "
            "learn no text)"
        )
    width, hidden = _NETWORKS[known]
    return AWDLSTM(words, width, hidden, **dropouts)
