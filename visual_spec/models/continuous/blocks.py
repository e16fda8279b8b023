"""The layer of MAR's encoder and decoder, which the causal model has as well: a vision transformer's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.cache import Places


class ViTAttention(nn.Module):
    """Multi-head self-attention with biases."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [R, H, W, D] of `x [R, W, dim]`."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """`query [R, H, W, D]` over `key, value [R, H, S, D]` under a bool mask [R or 1, 1, W or 1, S], or all."""
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers with a GELU between them, exact unless `approximate` names another ("tanh")."""

    def __init__(self, dim: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class Block(nn.Module):
    """Self-attention and an MLP of four times the width, normalised before each."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = ViTAttention(dim, heads)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        held: tuple[Tensor, Tensor] | None = None,
        places: Places | None = None,
    ) -> Tensor:
        """`x [R, W, dim]`, each place attending to those that a bool mask [R or 1, 1, W or 1, S] shows, or to all.

        Args:
            held: keys and values [R, H, S, D] of a cache, written at `places`; None: only x is seen.
        """
        query, key, value = self.attn.project(self.norm1(x))
        if held is not None:
            assert places is not None
            key, value = places.write(held, key.transpose(1, 2), value.transpose(1, 2))
        return self.finish(x, query, key, value, mask)

    def finish(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """The rest of `forward`, after the projections of normalised `x`; keys and values may be of other places."""
        x = x + self.attn.attend(query, key, value, mask)
        return x + self.mlp(self.norm2(x))


@dataclass
class ConditionedState:
    """What one batch is conditioned on.

    Attributes:
        conditions: [R, dim], of the classes. R = B, or 2B when guided: the conditional rows, then the unconditional
            ones.
        guided: whether the unconditional rows are there.
    """

    conditions: Tensor
    guided: bool

    @property
    def device(self) -> torch.device:
        """Return where tokens and conditions are."""
        return self.conditions.device

    def rows(self, samples: Tensor) -> Tensor:
        """Return the rows of some samples, long [N]; when guided, followed by their unconditional rows."""
        return torch.cat([samples, samples + len(self.conditions) // 2]) if self.guided else samples


def embed_labels(
    table: nn.Embedding,
    null: Tensor,
    condition: Tensor | None,
    batch_size: int,
    *,
    guided: bool = False,
    dropped: Tensor | None = None,
) -> Tensor:
    """Embeddings [R, dim] of labels [B], or of no class where there are none; when guided, the null class's after them.

    Args:
        null: [1, dim], of no class.
        dropped: bool [B], rows that get the null class (training for guidance).
    """
    nothing = null.expand(batch_size, -1)
    embedded = nothing if condition is None else table(condition)
    if dropped is not None:
        embedded = torch.where(dropped[:, None], nothing, embedded)
    return torch.cat([embedded, nothing]) if guided else embedded
