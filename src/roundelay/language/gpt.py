"""A GPT (Radford et al. 2019): a transformer that predicts the next token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    """Attention to earlier tokens, then a perceptron; each after a LayerNorm, and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C), where B is the batch, T the time and C the width."""
        B, T, C = x_BTC.shape
        shape = B, T, 3, self.heads, C // self.heads
        query, key, value = self.attend(self.norm_1(x_BTC)).view(shape).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x_BTC = x_BTC + self._dropped(self.attended(seen.transpose(1, 2).reshape(B, T, C)))
        return x_BTC + self._dropped(self.narrow(gelu(self.widen(self.norm_2(x_BTC)))))

    def _dropped(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Logits of the next token at every position. The embedding is also the last layer's weight.

    Args:
        tokens: how many different tokens there are.
        context: the most tokens that are looked at.
        layers: number of blocks.
        width: numbers per token; must be a multiple of `heads`.
        heads: attention heads per block.
        dropout: share of activations that is dropped in training.

    >>> sum(weight.numel() for weight in GPT(tokens=65, context=128, layers=4, width=128, heads=4).parameters())
    818048
    """

    def __init__(self, *, tokens: int, context: int, layers: int, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self._initialize(layers)

    def _initialize(self, layers: int) -> None:
        """Initialize as GPT-2 does: normal with standard deviation 0.02, zero biases.

        Layers that add to the residual stream get smaller weights, because their outputs sum up over all blocks.
        """
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                adds = name.endswith(("attended.weight", "narrow.weight"))
                nn.init.normal_(weight, std=0.02 / ((2 * layers) ** 0.5 if adds else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, tokens) from tokens (B, T)."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.blocks(self.token(tokens_BT) + self.position(positions))
        logits: Tensor = self.norm(x_BTC) @ self.token.weight.T
        return logits

    @torch.no_grad()
    def generate(self, tokens_T: Tensor, count: int, generator: torch.Generator, temperature: float = 0.8) -> Tensor:
        """The tokens (T,), and `count` more that the model draws one by one."""
        for _ in range(count):
            logits = self(tokens_T[-self.context :][None])[0, -1] / temperature
            drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)
            tokens_T = torch.cat([tokens_T, drawn.to(tokens_T.device)])
        return tokens_T
