"""NAR and FlashAR: LlamaGen with two heads, which predict the slot to the right and the slot below.

Both draw near to far, all slots at one distance in a call. NAR (arXiv 2503.10696) averages the logits where both heads
predict a slot. FlashAR (2605.09430) learns a gate between them, and the blocks of its lower head may leave the trunk
before its end.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visual_spec.models.core.cache import StaticCache
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_blocks import RMSNorm, Shared, TextCondition, TransformerBlock

_GATED = "flashar"


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


class LlamaGenTwoHeads(LlamaGenTransformer):
    """A `TrainedOrderModel` of order "nar" or "flashar".

    Args:
        branch_layers: blocks that only the lower head reads, after those of the trunk.
        branch_start: block of the trunk before which the lower head's blocks leave it; None: after the last.

    For the others see `LlamaGenTransformer`.
    """

    branched = True

    def add_parts(self) -> None:
        dim, vocab_size = self.config["dim"], self.config["vocab_size"]
        self.medusa_norm = RMSNorm(dim, self.config["norm_eps"])
        self.medusa_output = nn.Linear(dim, vocab_size, bias=False)

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
        """Return what the right head reads, and what the last block leaves for the lower one, `[R, W, dim]` each."""
        assert side is None, "side embeddings are for models of raster order"
        features, change, branch = hidden, None, None
        for index, block in enumerate(self.layers):
            if index == self.config["branch_start"]:
                branch = hidden if change is None else hidden + change
            hidden, change = block(hidden, change, cache.layer(index), shared)
            if index + 1 == self.config["num_layers"]:
                (hidden, features), change = self.norm.after(hidden, change), None
                hidden = hidden if branch is None else branch
        return features, hidden if change is None else hidden + change

    def logits(self, features: Tensor, hidden: Tensor, answers: Tensor | None) -> Tensor:
        if answers is None or answers.shape[1] == 1:
            return super().logits(features, hidden, answers)
        return self.merge(*self._two_heads(features, hidden, answers), answers)

    def _two_heads(self, features: Tensor, hidden: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [R, P, V] of the right head and of the lower one; arbitrary where a head has no answer."""
        right, below = answers.clamp(min=0).unbind(1)
        lower = self.medusa_output(self.medusa_norm(hidden)[:, below])
        return self._head(features[:, right]), lower.to(torch.promote_types(lower.dtype, torch.float32))

    def merge(self, right: Tensor, below: Tensor, answers: Tensor) -> Tensor:
        """Return the logits [R, P, V] of slots from what the two heads predict there, [R, P, V] each.

        Where both answer: their mean (NAR), or what the gate makes of them (FlashAR).

        Args:
            answers: long [P, 2], negative where a head has no answer.
        """
        share = self.hv_gate_mlp(right, below) if self.trained_order == _GATED else 0.5  # of the right head
        answered = (answers >= 0)[..., None]  # [P, 2, 1]
        share = answered[:, 0].to(right.dtype).where(~answered.all(1), share)
        return share * right + (1 - share) * below

    def teacher_forced_heads(
        self,
        tokens: Tensor,
        condition: TextCondition | Tensor,
        *,
        slots: Tensor,
        seen: Tensor,
        answers: Tensor,
        dropped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits `[B, P, V]` of the right head and of the lower one, for slots of whole pictures, in one pass.

        Gradients flow. What is arbitrary where a head has no answer, `merge` leaves out.

        Args:
            tokens: long `[B, N]`, those that are fed.
            condition, dropped: as in `teacher_forced`.
            slots: long `[N]`, where they are fed.
            seen: bool `[N, N]`, which of them each attends to.
            answers: long `[P, 2]`, the position that answers with each head: 0 is the last of the prefix, 1 + n the
                n-th token, negative: none.
        """
        hidden, turns, mask = self.sequence(tokens, slots, seen, condition, dropped)
        trunk, branch, last = hidden, None, self.config["num_layers"] - 1
        for index, block in enumerate(self.layers):
            assert isinstance(block, TransformerBlock)
            branch = hidden if index == self.config["branch_start"] else branch
            hidden = block.whole(hidden, turns, mask)
            trunk = hidden if index <= last else trunk
            hidden = branch if index == last and branch is not None else hidden
        first = -1 - tokens.shape[1]
        return self._two_heads(self.norm(trunk[:, first:]), hidden[:, first:], answers)
