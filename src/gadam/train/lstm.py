"""The paper's language model, the AWD-LSTM of Merity, Keskar, and Socher (2017), in two sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam._names import find

__all__ = ["AWDLSTM", "Output", "State", "WeightDropLSTM", "build", "canonical", "names"]

State = tuple[tuple[Tensor, Tensor], ...]
"""Hidden and cell state of each layer."""


def locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Apply dropout with one mask for all time steps (variational dropout).

    Args:
        x: Tensor of shape (time, batch, feature).
        p: Dropout probability.
        training: If False, return ``x`` unchanged.

    Returns:
        A tensor of the same shape.
    """
    if not training or p == 0.0:
        return x
    return x * F.dropout(x.new_ones(1, *x.shape[1:]), p)


class WeightDropLSTM(nn.LSTM):
    """An LSTM layer with dropout of the recurrent weights during training (DropConnect).

    Each call draws one mask for ``weight_hh_l0`` and uses it for the whole sequence. The parameters
    have the same names as in :class:`torch.nn.LSTM` and are never replaced. Dropout only affects an
    intermediate value, so optimizers, averages, copies, and checkpoints all see the same tensors.

    Args:
        input_size: Number of input features.
        hidden_size: Number of output features.
        weight_drop: Dropout probability of each recurrent weight.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

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
        """Describe the layer's settings."""
        return f"{super().extra_repr()}, weight_drop={self.weight_drop}"

    def forward(  # type: ignore[override]
        self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the layer over a sequence.

        Args:
            x: Inputs of shape (time, batch, input).
            hx: Initial hidden and cell state. Defaults to zeros.

        Returns:
            The outputs of shape (time, batch, hidden), and the final state.
        """
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError("The input must be a tensor of shape (time, batch, input).")
        if x.is_cpu and torch.is_autocast_enabled("cpu"):
            # oneDNN supports half-precision LSTMs only on few CPUs. Use the parameters' dtype.
            with torch.autocast("cpu", enabled=False):
                result: tuple[Tensor, tuple[Tensor, Tensor]]
                result = self(x.to(self.weight_hh_l0.dtype), hx)
                return result
        if not self.training or self.weight_drop == 0.0:
            return super().forward(x, hx)
        if hx is None:
            zeros = x.new_zeros(1, x.shape[1], self.hidden_size)
            hx = (zeros, zeros)
        self.check_forward_args(x, hx, None)
        recurrent = drop_connect(self.weight_hh_l0, self.weight_drop)
        weights = [self.weight_ih_l0, recurrent, self.bias_ih_l0, self.bias_hh_l0]
        if x.is_cuda:
            weights = pack_weights(weights)
        out, h, c = torch.lstm(x, hx, weights, True, 1, 0.0, True, False, False)
        return out, (h, c)


def _probability(**named: float) -> float:
    ((name, p),) = named.items()
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {p}.")
    return p


LARGE_MATRIX = 1 << 20  # Elements.


def drop_connect(weight: Tensor, p: float) -> Tensor:
    """Apply dropout to a weight matrix.

    On the CPU, drawing the random numbers dominates the cost. Large matrices use 16 random bits per
    weight there, which rounds p to a multiple of 2⁻¹⁶.

    Args:
        weight: The weight matrix.
        p: Dropout probability.

    Returns:
        The matrix with some entries set to zero and the others scaled by 1/(1 − p).
    """
    if not weight.is_cpu or weight.numel() < LARGE_MATRIX:
        return F.dropout(weight, p)
    count, levels = weight.numel(), 1 << 16
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(1 << 63), None)
    cut = round(p * levels)
    kept = bits.view(torch.int16)[:count] >= cut - levels // 2
    return weight * kept.view_as(weight).to(weight.dtype).mul_(levels / (levels - cut))


def pack_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copy weights into one contiguous buffer.

    cuDNN requires this layout. Otherwise it copies the weights itself and warns.

    Args:
        weights: The weights of an LSTM layer.

    Returns:
        Views of the buffer with the same values and shapes.
    """
    flat = torch.cat([weight.flatten() for weight in weights])
    pieces = torch.split(flat, [weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights)]


class Output(NamedTuple):
    """The output of :class:`AWDLSTM`.

    Attributes:
        scores: Scores of the next word, of shape (time, batch, words).
        state: Final state, to continue from.
        raw: Outputs of the last layer.
        dropped: The same outputs after dropout. The scores are computed from these.
    """

    scores: Tensor
    state: State
    raw: Tensor
    dropped: Tensor


class AWDLSTM(nn.Module):
    """An LSTM language model with tied embeddings and dropout throughout.

    During training, the model drops whole words (all their occurrences in the batch), features of
    the embedded words, of the activations between layers, and of the outputs (with one mask for all
    time steps), and recurrent weights.

    Args:
        words: Size of the vocabulary.
        width: Width of the embedding and of the last layer.
        hidden: Widths of the layers before the last.
        dropout: Dropout of the last layer's outputs.
        dropout_hidden: Dropout between layers.
        dropout_input: Dropout of the embedded words.
        dropout_words: Dropout of whole words.
        weight_drop: Dropout of recurrent weights.

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
        """Score the next word at each position.

        Args:
            text: Word indices of shape (time, batch).
            state: State to continue from. Defaults to zeros.

        Returns:
            The scores, the final state, and the last layer's outputs.
        """
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
        x: Tensor = self.embedding(text)
        if not self.training or self.dropout_words == 0.0:
            return x
        kept = F.dropout(x.new_ones(self.embedding.num_embeddings), self.dropout_words)
        return x * kept[text].unsqueeze(-1)


def detached(state: State) -> State:
    """Detach a state from its graph.

    Args:
        state: The state.

    Returns:
        The same values without a graph.
    """
    return tuple((h.detach(), c.detach()) for h, c in state)


_NETWORKS: dict[str, tuple[int, tuple[int, ...]]] = {  # (width, hidden)
    "awd-lstm": (400, (1150, 1150)),
    "awd-lstm-mini": (64, (128,)),
}


def names() -> list[str]:
    """Return the names of the language models that :func:`build` accepts."""
    return list(_NETWORKS)


def canonical(name: str) -> str | None:
    """Look up the canonical spelling of a language model's name.

    Args:
        name: The name as the user typed it.

    Returns:
        The name as in :func:`names`, or None if it is unknown.
    """
    return find(name, {known: known for known in _NETWORKS})[0]


def build(name: str, words: int, **dropouts: float) -> AWDLSTM:
    """Build a freshly initialized language model.

    Args:
        name: One of :func:`names`. Only letters and digits count, and case does not.
        words: Size of the vocabulary.
        **dropouts: Dropout probabilities of :class:`AWDLSTM`.

    Returns:
        The model.

    Raises:
        ValueError: If the name is unknown.
    """
    known = canonical(name)
    if known is None:
        raise ValueError(
            f"Unknown language model {name!r}. Choose from {', '.join(_NETWORKS)}. "
            "Image networks do not support text."
        )
    width, hidden = _NETWORKS[known]
    return AWDLSTM(words, width, hidden, **dropouts)
