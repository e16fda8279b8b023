"""Jacobi decoding of models that predict a block of tokens at a time, such as Token-Shuffle.

Given the earlier blocks, the tokens of a block are independent. So a block is a column, and the sampler of columns
(`raster.columns_jacobi`) decodes a window of blocks in one call. The noise belongs to the slots: acceptance "identical"
returns the tokens of `OrderedSampler`.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.orders import TrainedOrderModel
from visual_spec.models.core.protocol import TokenGrid, trained_order
from visual_spec.models.core.settings import OneOf, register_to_config
from visual_spec.samplers.core.base import Callback
from visual_spec.samplers.core.checks import Acceptance, Coupling, Window, check_request, check_returned
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import DecodeTrace, SampleResult
from visual_spec.samplers.orders.tables import order_of
from visual_spec.samplers.raster.column_base import COLUMN, UNITS, ColumnView
from visual_spec.samplers.raster.columns_jacobi import COLUMN_DRAFTS, ColumnJacobiSampler


class Blocks:
    """A model trained for an order of blocks as a `ColumnModel`: a step is a block, its codebooks are the K places.

    Attributes:
        slots: long [N, K], the slots of each block.
        rank: long [L], the block of each slot.
    """

    special_id = 0  # every place of a block holds a token

    def __init__(self, model: TrainedOrderModel) -> None:
        self.model, self.vocab_size, whole = model, model.vocab_size, model.grid
        slots = torch.stack([step.emitted for step in order_of(trained_order(model), whole).steps])
        side = int(slots.shape[1] ** 0.5)
        self.grid = TokenGrid(whole.height // side, whole.width // side, whole.frames, codebooks=side**2)
        self.slots, self.rank = slots, slots.flatten().argsort() // side**2
        self.valid = torch.ones_like(slots, dtype=torch.bool)

    def to(self, device: torch.device) -> None:
        """Move the tables, not the model."""
        self.slots, self.rank, self.valid = (part.to(device) for part in (self.slots, self.rank, self.valid))

    def slots_of(self, steps: Tensor) -> Tensor:
        """Return the slots long [B, W * K] of blocks [B, W]; those past the grid follow its last slot."""
        count, size = self.slots.shape
        beyond = steps[..., None] * size + torch.arange(size, device=steps.device)
        inside = self.slots[steps.clamp(max=count - 1)]
        return torch.where(steps[..., None] < count, inside, beyond).flatten(1)

    def prefill(self, condition: object, *, batch_size: int, guided: bool, window: int) -> Any:
        """Run the condition; the state's logits [R, K, V] predict the first block."""
        width = window * self.grid.codebooks
        return self.model.prefill(condition, batch_size=batch_size, guided=guided, window=width)

    def __call__(self, state: Any, tokens: Tensor, steps: Tensor) -> Tensor:
        """Feed blocks `tokens [B, W, K]` at `steps [B, W]`; logits [R, W, K, V] of the blocks after them."""
        size = self.grid.codebooks
        seen = (self.rank <= steps[..., None]).repeat_interleave(size, 1)  # [B, W * K, L]
        answers = torch.arange(tokens.shape[1] * size, device=tokens.device)[:, None]
        logits = self.model(
            state,
            tokens.flatten(1),
            self.slots_of(steps),
            seen=seen,
            predicted=self.slots_of(steps + 1),
            answers=answers,
        )
        count, vocab_size = len(answers), self.vocab_size
        return check_returned(logits, len(steps), state.guided, count, vocab_size).unflatten(1, (-1, size))


class BlockView(ColumnView):
    """Blocks whose entries have the noise of their slots."""

    def __init__(self, model: Blocks, window: int) -> None:
        super().__init__(model, window)
        self.model = model

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.model.to(device)

    def entries(self, slots: Tensor) -> Tensor:
        return self.model.slots_of(slots)


class BlockJacobiSampler(ColumnJacobiSampler):
    """Jacobi decoding of blocks: several blocks a call, from the law of one block a call.

    As `ColumnJacobiSampler`, for models that were trained for an order of blocks (`trained_order` "blocks2", ...), such
    as Token-Shuffle (2504.17789). Acceptance "identical" returns the tokens of `OrderedSampler` for the same
    generator; all settings are lossless. The result and the trace are by slot.

    Args:
        window: blocks scored by one call, at least 1; or "auto", as in `SpeculativeJacobiSampler`.
        coupling, unit, initial_draft: as in `ColumnJacobiSampler`.
        acceptance: "identical" (needs coupling "gumbel") or "exact".
    """

    @register_to_config
    def __init__(
        self,
        window: Window = 8,
        coupling: Coupling = "gumbel",
        acceptance: Acceptance = "identical",
        unit: Annotated[str, OneOf(UNITS)] = COLUMN,
        initial_draft: Annotated[str, OneOf(COLUMN_DRAFTS)] = "left",
    ) -> None:
        pass

    def check(self, model: TrainedOrderModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        check_request(model, law, any_order=True)
        if not trained_order(model).startswith("blocks"):
            raise ValueError(
                f"{type(model).__name__} was trained for order {trained_order(model)!r}; this sampler decodes models "
                "of blocks, such as 'blocks2'. Use OrderedSampler, or SpeculativeJacobiSampler for raster order."
            )
        if law.guidance_until is not None:
            raise ValueError(
                f"guidance_until={law.guidance_until} counts slots, and this sampler draws blocks; pass None, or use "
                "OrderedSampler."
            )

    def plan(self, run: Run) -> None:
        run.model = Blocks(run.model)
        run.num_tokens = run.model.grid.num_tokens
        super().plan(run)
        run.view = BlockView(run.model, run.window)

    def result(self, run: Run, state: State, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        at, size = run.model.slots.flatten(), run.model.grid.codebooks
        calls = trace["commit_call"].repeat_interleave(size, 1)
        by_place = {name: trace[name].flatten(1) for name in ("logprobs", "model_logprobs") if name in trace}
        for name, values in ({"commit_call": calls} | by_place).items():
            trace[name] = torch.empty_like(values).index_copy_(1, at.cpu(), values)
        by_slot = tokens.flatten(1)
        return SampleResult(torch.empty_like(by_slot).index_copy_(1, at, by_slot), DecodeTrace(**trace))

    def __call__(
        self, model: TrainedOrderModel, condition: object, *, callback: Callback | None = None, **more: Any
    ) -> SampleResult:
        """As `Sampler.__call__`; the callback gets numbers of slots."""

        def heard(call: int, blocks: Tensor) -> object:
            assert callback is not None
            return callback(call, blocks * order_of(trained_order(model), model.grid).width)

        return super().__call__(model, condition, callback=callback and heard, **more)
