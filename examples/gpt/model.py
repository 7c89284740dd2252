"""A decoder-only transformer that reads bytes: small enough for a CPU, built like the large ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
WIDTH_PER_LAYER = 64
HEAD_WIDTH = 64


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input: (n, length, width) -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, values: Tensor) -> Tensor:
        """Apply attention to the earlier positions, then the feed-forward layer to each position."""
        samples, length, width = values.shape
        parts = self.attend(self.before_attention(values)).view(samples, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.merge(seen.transpose(1, 2).reshape(samples, length, width))
        result: Tensor = values + self.feed_forward(self.before_feed_forward(values))
        return result


class GPT(nn.Module):
    """Predictor of the next byte: (n, length) bytes -> (n, length, 256) scores. The width is 64 times the depth."""

    def __init__(self, *, depth: int, context: int) -> None:
        super().__init__()
        width = WIDTH_PER_LAYER * depth
        self.context = context
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last_norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_small_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the byte after each position."""
        values = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            values = block(values)
        scores: Tensor = self.head(self.last_norm(values))
        return scores


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


@torch.no_grad()
def write(model: GPT, beginning: str, length: int) -> str:
    """Continue a text with the model, byte by byte; return it with its beginning."""
    model.eval()
    device = next(model.parameters()).device
    tokens = torch.tensor([list(beginning.encode())], device=device)
    for _ in range(length):
        chances = model(tokens[:, -model.context :])[:, -1].float().softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
