"""BitDance's head: the bits of all tokens of a call together, by flow matching (Ai et al. 2026, arXiv 2602.14041).

A token is a vector of signs. The head predicts it from a noisy point, and a chain of `EulerMaruyamaSchedule` ends near
it; the signs of where it ends are the token. With several tokens a call, these attend to each other inside the head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.continuous.diffusion import TRAINING_LEVELS
from visual_spec.models.continuous.head import TimeEmbedding
from visual_spec.models.core.protocol import check_heads
from visual_spec.models.core.settings import Within, whole

# Official names of parts of the head, and ours.
HEAD_KEYS = {
    r"(head\.res_blocks\.\d+)\.norm\.": r"\1.norm2.",
    r"(head\.res_blocks\.\d+)\.(w\d)\.": r"\1.mlp.\2.",
}
_LAST = 0.05  # the length of the last step, and the least share of noise that is divided by


class EulerMaruyamaSchedule:
    """Steps of the stochastic equation whose marginals are flow matching's, and a last one without noise.

    At share t of the token a point is t token + (1 - t) noise. The head predicts the token, so the velocity v is
    (prediction - point) / (1 - t), and a step of length l is point + l ((1 + t) v - point) + sqrt(2 (1 - t) l) noise.
    The steps are equal, from 0 to .95, before `shift`; the last one leads to 1. Shares are added up in float32, as the
    public code does: the head reads them times 1000. Follows `visual_spec.models.core.continuous.LevelSchedule`.

    Args:
        num_steps: levels of the chain, one more than the steps with noise: 2 to 1000; 101 in the public code.
        shift: of the shares towards noise, s / (1 + ...) as for other flows; 1 leaves them equal.
        eta: None. There is no chain of another share of noise.

    Raises:
        ValueError: another number of levels, or a share of noise.
    """

    deterministic = False

    def __init__(self, num_steps: int = 101, *, shift: float = 1.0, eta: float | None = None) -> None:
        self.num_steps = whole("head_steps", num_steps, Within(2, 1000))
        if eta is not None:
            raise ValueError(f"eta={eta} given, but BitDance's chain has its own noise; leave it out.")
        here: Any = dict(device="cpu")  # a model checks its chain on whatever device it is built
        edges = torch.linspace(0.0, 1.0 - _LAST, num_steps, **here)
        lengths = (1.0 / shift / (1.0 / shift + (1.0 / edges - 1.0))).diff()
        shares = [torch.zeros((), **here)]
        for length in lengths[:-1]:
            shares.append(shares[-1] + length)
        share = torch.stack([*shares, torch.tensor(1.0 - _LAST, **here)])
        self.times = (TRAINING_LEVELS * share).flip(0)
        share, length = share.double(), torch.cat([lengths, torch.tensor([_LAST], **here)]).double()
        drift = length * (1.0 + share)
        sigma = (2.0 * (1.0 - share) * length).sqrt()
        drift[-1], sigma[-1] = _LAST, 0.0  # of the velocity alone
        of_token = drift / (1.0 - share).clamp_min(_LAST)
        of_point = 1.0 - length - of_token
        of_point[-1] += _LAST
        none = torch.zeros_like(sigma)
        self.laws = torch.stack([of_point, of_token, none, none, sigma], -1).flip(0)
        self._fixed = self.laws[:, [0, 1, 4]].float()

    def to(self, device: torch.device | str) -> EulerMaruyamaSchedule:
        """Move the tables, once. Returns itself."""
        self.times, self._fixed = self.times.to(device), self._fixed.to(device)
        return self

    def predict(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """See `LevelSchedule`. `output [..., d]` is the token; rest is [..., 0]."""
        return output, output[..., :0]

    def toward(self, x: Tensor, index: int | Tensor, token: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """See `LevelSchedule`."""
        of_point, of_token, sigma = self._fixed[index].unsqueeze(-1).unbind(-2)
        return of_point * x + of_token * token, sigma.expand_as(x)

    def kernel(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """See `LevelSchedule`."""
        return self.toward(x, index, output, output[..., :0])


class GatedLayer(nn.Module):
    """SwiGLU of one and a half times the outputs, with biases."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        hidden = int(1.5 * outputs)
        self.w1, self.w2 = nn.Linear(inputs, 2 * hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        open_, value = self.w1(x).chunk(2, -1)
        return self.w2(F.silu(open_) * value)


class BinaryHeadAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let the tokens of `x [..., P, width]` attend to each other."""
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


class BinaryHeadBlock(nn.Module):
    """Attention between the tokens of a call, where there are several, and a layer; both are modulated."""

    def __init__(self, width: int, heads: int, several: bool, gated: bool) -> None:
        super().__init__()
        hidden = int(1.5 * width)
        if several:
            self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), BinaryHeadAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp: nn.Module = GatedLayer(width, width)
        if not gated:
            self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """`x [..., P, width]`, and scale, shift and gate of each part, which broadcast to it."""
        *first, scale, shift, gate = parts
        if first:
            x = x + first[2] * self.attn(self.norm1(x) * (1.0 + first[0]) + first[1])
        return x + gate * self.mlp(self.norm2(x) * (1.0 + scale) + shift)


class BinaryHead(nn.Module):
    """The head; see `DenoisingHead`. Parameters are named nearly as in the official files, see `HEAD_KEYS`.

    Args:
        bits: numbers of a token.
        tokens: P, tokens of a call. A point is P x bits numbers, a condition P x `condition_dim`.
        condition_dim: of the condition of a token.
        width, depth, heads: of its blocks. Attention is there for P > 1.
        modulated: layers that modulate the blocks, each an equal run of these.
        gated: whether the layers of the blocks are gated.
        bounded: whether predictions lie between -1 and 1, by a sigmoid.

    Raises:
        ValueError: heads that do not divide the width, or layers that do not divide the blocks.
    """

    def __init__(
        self,
        bits: int,
        tokens: int,
        condition_dim: int,
        width: int,
        depth: int,
        heads: int,
        modulated: int,
        gated: bool = True,
        bounded: bool = False,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        if depth % modulated:
            raise ValueError(
                f"{modulated} layers cannot modulate {depth} blocks in equal runs; pass a divisor."
            )
        self.width, self.tokens, self.parts, self.bounded = width, tokens, 3 if tokens == 1 else 6, bounded
        self.time_embed = TimeEmbedding(width)
        self.cond_embed, self.input_proj = nn.Linear(condition_dim, width), nn.Linear(bits, width)
        self.res_blocks = nn.ModuleList(
            BinaryHeadBlock(width, heads, tokens > 1, gated) for _ in range(depth)
        )
        self.ada_ln_blocks = nn.ModuleList(nn.Linear(width, self.parts * width) for _ in range(modulated))
        last = {"ada_ln_modulation": nn.Linear(width, 2 * width), "linear": nn.Linear(width, bits)}
        self.final_layer = nn.ModuleDict(last)

    @property
    def modulation_size(self) -> int:
        """M: what modulates the blocks and the last layer, of each token."""
        return self.tokens * self.width * (self.parts * len(self.ada_ln_blocks) + 2)

    def modulations(self, z: Tensor, times: Tensor) -> Tensor:
        """All that `denoise` needs beside the point: [T, N, M], for conditions `z [N, P dim]` at times [T]."""
        conditions = self.cond_embed(z.unflatten(-1, (self.tokens, -1)))
        hidden = F.silu(self.time_embed(times)[:, None, None] + conditions)
        layers = [*self.ada_ln_blocks, self.final_layer["ada_ln_modulation"]]
        return torch.cat([layer(hidden) for layer in layers], -1).flatten(-2)

    def denoise(self, x: Tensor, modulations: Tensor) -> Tensor:
        """The tokens [..., N, P bits] foretold at points `x [..., N, P bits]`, with modulations [..., N, M]."""
        parts = modulations.unflatten(-1, (self.tokens, -1)).split(self.width, -1)
        hidden = self.input_proj(x.unflatten(-1, (self.tokens, -1)))
        run = len(self.res_blocks) // len(self.ada_ln_blocks)
        for index, block in enumerate(self.res_blocks):
            first = index // run * self.parts
            hidden = block(hidden, parts[first : first + self.parts])
        hidden = F.layer_norm(hidden, hidden.shape[-1:], eps=1e-6) * (1.0 + parts[-2]) + parts[-1]
        output = self.final_layer["linear"](hidden).flatten(-2)
        return 2.0 * output.sigmoid() - 1.0 if self.bounded else output
