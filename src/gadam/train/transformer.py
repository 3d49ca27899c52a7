"""A small causal transformer as a language model, with the interface of the AWD-LSTM."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam._names import find
from gadam.train.lstm import Output, State

__all__ = ["Transformer", "build", "canonical", "names"]


class _Block(nn.Module):
    """Attention and a two-layer network, each on a normalized input and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        out: Tensor = x + self.drop(self.mlp(self.before_mlp(x)))
        return out


class Transformer(nn.Module):
    """A causal transformer language model with tied embeddings.

    A position enters only as a penalty on the distance of two words (ALiBi, Press et al., 2022), so
    the model reads texts of any length. Each word sees itself and the ``context - 1`` words before
    it. Nothing carries over from one call to the next: the state is empty.

    Args:
        words: Size of the vocabulary.
        width: Width of the embedding and of all layers.
        depth: Number of layers.
        heads: Attention heads per layer.
        context: The number of words that a word sees, itself included.
        dropout: Dropout of the outputs, before the scores.
        dropout_hidden: Dropout of each layer's two additions.
        dropout_input: Dropout of the embedded words.

    Example:
        >>> model = Transformer(2_000, 64, depth=3, heads=4)
        >>> text = torch.zeros(5, 2, dtype=torch.int64)  # (time, batch)
        >>> model(text).scores.shape
        torch.Size([5, 2, 2000])
    """

    slopes: Tensor

    def __init__(
        self,
        words: int,
        width: int,
        depth: int,
        heads: int,
        context: int = 128,
        *,
        dropout: float = 0.1,
        dropout_hidden: float = 0.1,
        dropout_input: float = 0.1,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}.")
        self.context = context
        self.embedding = nn.Embedding(words, width)
        self.drop_input, self.drop_output = nn.Dropout(dropout_input), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout_hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(words))
        # From heads that look near to heads that look far: 2^(-8/h), 2^(-16/h), …, 2^-8.
        slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
        self.register_buffer("slopes", slopes, persistent=False)
        self._initialize(depth)

    def _initialize(self, depth: int) -> None:
        # As GPT-2: the last layer of each branch is smaller, so that the sum does not grow with
        # depth.
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, text: Tensor, state: State | None = None) -> Output:
        """Score the next word at each position.

        Args:
            text: Word indices of shape (time, batch).
            state: Not used.

        Returns:
            The scores, an empty state, and the last layer's outputs.
        """
        x = self.drop_input(self.embedding(text.t()))
        bias = self._attention_bias(len(text))
        for block in self.blocks:
            x = block(x, bias)
        raw = self.norm(x).transpose(0, 1)
        dropped = self.drop_output(raw)
        scores = F.linear(dropped, self.embedding.weight, self.bias)
        return Output(scores, (), raw, dropped)

    def _attention_bias(self, time: int) -> Tensor:
        """Return what to add to the attention logits, (head, reader, read)."""
        place = torch.arange(time, device=self.slopes.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < self.context)
        bias = -self.slopes.view(-1, 1, 1) * distance
        return bias.masked_fill(~seen, -math.inf)


_NETWORKS: dict[str, tuple[int, int, int, int]] = {  # (width, depth, heads, context)
    "transformer-mini": (64, 3, 4, 128),
}


def names() -> list[str]:
    """Return the names of the transformers that :func:`build` accepts."""
    return list(_NETWORKS)


def canonical(name: str) -> str | None:
    """Look up the canonical spelling of a transformer's name.

    Args:
        name: The name as the user typed it.

    Returns:
        The name as in :func:`names`, or None if it is unknown.
    """
    return find(name, {known: known for known in _NETWORKS})[0]


def build(
    name: str,
    words: int,
    *,
    dropout: float = 0.1,
    dropout_hidden: float = 0.1,
    dropout_input: float = 0.1,
    dropout_words: float = 0.0,
    weight_drop: float = 0.0,
) -> Transformer:
    """Build a freshly initialized transformer.

    Args:
        name: One of :func:`names`. Only letters and digits count, and case does not.
        words: Size of the vocabulary.
        dropout: As for :class:`Transformer`.
        dropout_hidden: As for :class:`Transformer`.
        dropout_input: As for :class:`Transformer`.
        dropout_words: Must be 0: only the AWD-LSTM drops whole words.
        weight_drop: Must be 0: a transformer has no recurrent weights.

    Returns:
        The model.

    Raises:
        ValueError: If the name is unknown, or a dropout of the AWD-LSTM is not 0.
    """
    known = canonical(name)
    if known is None:
        raise ValueError(f"Unknown transformer {name!r}. Choose from {', '.join(_NETWORKS)}.")
    if dropout_words or weight_drop:
        raise ValueError(
            f"{known} has neither word dropout nor recurrent weights. Set "
            "language.dropout_words=0 and language.weight_drop=0."
        )
    return Transformer(
        words,
        *_NETWORKS[known],
        dropout=dropout,
        dropout_hidden=dropout_hidden,
        dropout_input=dropout_input,
    )
