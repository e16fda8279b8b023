"""NAR and FlashAR: LlamaGen with a head for each dimension: to the right, below and, in clips, one frame later.

All draw near to far, all slots at one distance in a call. NAR (arXiv 2503.10696) averages the logits where several
heads predict a slot. FlashAR (2605.09430) learns a gate between its two heads, and the blocks of its lower head may
leave the trunk before its end.

As in NAR's public code, the right head reads the trunk, the lower one the block that follows it, and the later one the
block after that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.protocol import wide
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_blocks import RMSNorm, Shared, TextCondition, TransformerBlock

_GATED = "flashar"
_ADDED = (
    "medusa",
    "later",
)  # names of the heads after the right one; "medusa" is the release's, of the lower head


class HeadGate(nn.Sequential):
    """How much the right head counts against the lower one: FlashAR's gate (arXiv 2605.09430; its LlamaGen release).

    It reads what both heads predict for the slot, joined, brought to mean 0 and mean square 1, and cut off at 6. It
    starts at one half.
    """

    def __init__(self, vocab_size: int):
        inner = max(32, vocab_size // 512)
        first, last = nn.Linear(2 * vocab_size, inner, bias=False), nn.Linear(inner, 1)
        nn.init.normal_(first.weight, std=(2 * vocab_size) ** -0.5)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(first, nn.SiLU(), last)

    def forward(self, right: Tensor, below: Tensor) -> Tensor:
        """Return the share [R, P, 1] of `right [R, P, V]`. No gradient reaches the heads through it."""
        read = torch.cat([right, below], -1).detach()  # [R, P, 2V]
        read = read - read.mean(-1, keepdim=True)
        read = read / read.pow(2).mean(-1, keepdim=True).clamp(min=1e-6).sqrt()
        dtype = next(self.parameters()).dtype
        return super().forward(read.clamp(-6, 6).to(dtype)).sigmoid().to(right.dtype)


class LlamaGenNearToFar(LlamaGenTransformer):
    """A `TrainedOrderModel` of order "nar" or "flashar".

    Args:
        branch_layers: blocks of each head but the right one, after the trunk's.
        branch_start: block of the trunk before which these blocks leave it; None: after the last.

    For the others see `LlamaGenTransformer`.
    """

    @property
    def num_answers(self) -> int:
        return 2 if self.config["num_frames"] == 1 else 3

    def add_parts(self) -> None:
        dim, vocab_size = self.config["dim"], self.config["vocab_size"]
        for name in _ADDED[: self.num_answers - 1]:
            self.add_module(f"{name}_norm", RMSNorm(dim, self.config["norm_eps"]))
            self.add_module(f"{name}_output", nn.Linear(dim, vocab_size, bias=False))

    def initialise(self) -> None:
        super().initialise()
        if self.trained_order == _GATED:
            self.hv_gate_mlp = HeadGate(self.vocab_size)

    def run(
        self,
        hidden: Tensor,
        cache: StaticCache,
        shared: Shared,
        side: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what the right head reads `[R, W, dim]`, and what the others read `[R, W, H - 1, dim]`, not yet
        normalised."""
        assert side is None, "side embeddings are for models of raster order"
        features, change, branch, taps = hidden, None, None, []
        for index, block in enumerate(self.layers):
            if index == self.config["branch_start"]:
                branch = hidden if change is None else hidden + change
            hidden, change = block(hidden, change, cache.layer(index), shared)
            done = index + 1 - self.config["num_layers"]  # blocks after the trunk
            if done == 0:
                (hidden, features), change = self.norm.after(hidden, change), None
                hidden = hidden if branch is None else branch
            elif done > 0 and done % self.config["branch_layers"] == 0:
                hidden, change = hidden if change is None else hidden + change, None
                taps.append(hidden)
        taps = taps or [hidden] * (self.num_answers - 1)  # without blocks of their own
        return features, torch.stack(taps, 2)

    def logits(self, features: Tensor, hidden: Tensor, answers: Tensor | None) -> Tensor:
        if answers is None or answers.shape[1] == 1:
            return super().logits(features, hidden, answers)
        return self.merge(self._each_head(features, hidden, answers), answers)

    def _each_head(self, features: Tensor, hidden: Tensor, answers: Tensor) -> tuple[Tensor, ...]:
        """Return logits [R, P, V] of each head, arbitrary where it has no answer; arguments as of `logits`."""
        right, *others = answers.clamp(min=0).unbind(1)
        logits = [self._head(features[:, right])]
        for name, tap, place in zip(_ADDED[: len(others)], hidden.unbind(2), others, strict=True):
            norm, output = self.get_submodule(f"{name}_norm"), self.get_submodule(f"{name}_output")
            predicted = output(norm(tap)[:, place])
            logits.append(wide(predicted))
        return tuple(logits)

    def merge(self, heads: tuple[Tensor, ...], answers: Tensor) -> Tensor:
        """Return the logits [R, P, V] of slots from what each head predicts there, [R, P, V].

        Where several answer: their mean (NAR), or what the gate makes of them (FlashAR).

        Args:
            answers: long [P, H], negative where a head has no answer.
        """
        answered = (answers >= 0).to(heads[0].dtype)  # [P, H]
        shares = (answered / answered.sum(1, keepdim=True)).unsqueeze(-1).unbind(1)  # H times [P, 1]
        if self.trained_order == _GATED:
            both = answered.all(1, keepdim=True)
            right = self.hv_gate_mlp(*heads).where(both, shares[0])
            shares = (right, 1 - right)
        merged = shares[0] * heads[0]
        for share, head in zip(shares[1:], heads[1:], strict=True):
            merged = merged + share * head
        return merged

    def teacher_forced_heads(
        self,
        tokens: Tensor,
        condition: TextCondition | Tensor,
        *,
        slots: Tensor,
        seen: Tensor,
        answers: Tensor,
        dropped: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return logits `[B, P, V]` of each head, for slots of whole pictures or clips, in one pass.

        Gradients flow. What is arbitrary where a head has no answer, `merge` leaves out.

        Args:
            tokens: long `[B, N]`, those that are fed.
            condition, dropped: as in `teacher_forced`.
            slots: long `[N]`, where they are fed.
            seen: bool `[N, N]`, which of them each attends to.
            answers: long `[P, H]`, the position that answers with each head: 0 is the last of the prefix, 1 + n the
                n-th token, negative: none.
        """
        hidden, turns, mask = self.sequence(tokens, slots, seen, condition, dropped)
        trunk, branch, taps, last = hidden, None, [], self.config["num_layers"] - 1
        for index, block in enumerate(self.layers):
            assert isinstance(block, TransformerBlock)
            branch = hidden if index == self.config["branch_start"] else branch
            hidden = block.whole(hidden, turns, mask)
            trunk = hidden if index <= last else trunk
            hidden = branch if index == last and branch is not None else hidden
            if index > last and (index - last) % self.config["branch_layers"] == 0:
                taps.append(hidden)
        taps = torch.stack(taps or [hidden] * (self.num_answers - 1), 2)
        first = -1 - tokens.shape[1]
        return self._each_head(self.norm(trunk[:, first:]), taps[:, first:], answers)
