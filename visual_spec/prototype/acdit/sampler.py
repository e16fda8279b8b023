"""Pictures drawn block by block, each by a chain of a whole transformer given the clean blocks before it.

Hu et al. 2024 (2412.07720), section 3.4. A block starts as noise and takes `levels` calls of the transformer, so a
picture takes blocks x levels calls. How many blocks there are is the model's; how many levels, the sampler's. Clean
blocks are read once: the first call of a block also writes the keys and values of the block before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.continuous import guided
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import Within, register_to_config
from visual_spec.samplers.continuous.base import VectorSampler
from visual_spec.samplers.core.checks import check_returned
from visual_spec.samplers.core.noise import CHAIN
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import LOSSY


class BlockModel(Protocol):
    """All that the sampler knows of a model. Slots count tokens in the order of decoding.

    Attributes:
        token_dim, block_size: d, and n, the tokens of a block.
        places: long [L], where each slot stands on the grid.
    """

    grid: TokenGrid
    token_dim: int
    block_size: int
    places: Tensor

    def prefill(self, condition: Any, *, batch_size: int, guided: bool, window: int) -> Any:
        """A state without blocks, whose `conditions` are [R, ...]. R = B, or 2B when guided: the unconditional last."""
        ...

    def solver(self, levels: int) -> Any:
        """The chain of a block: `times` of its levels, and `step` from one to the next (`LinearSolver`)."""
        ...

    def __call__(
        self, state: Any, noisy: Tensor, time: float, block: int, clean: Tensor | None = None
    ) -> Tensor:
        """The prediction [R, n, d] at block number `block`, which is `noisy [B, n, d]`.

        `clean`: [B, n, d], the block before it, in the first call of each block but block 0.
        """
        ...


@dataclass
class BlockState(State):
    """A `State` of continuous tokens, by slot. `round` counts the calls so far.

    Attributes:
        solver: of the chains.
        noisy: [B, n, d], the block between two levels.
        predictions: what the solver extrapolates, newest first.
    """

    solver: Any
    noisy: Tensor
    predictions: list[Tensor]


class BlockDiffusionSampler(VectorSampler[BlockModel, BlockState]):
    """Draws block after block by the model's solver.

    Args:
        levels: calls of the transformer for a block; 25 in the release.

    A call takes the `law`'s guidance scale (1.5 in the release) and temperature, which multiplies the noise that a
    block starts from; the chain adds none. It returns tokens float [B, L, d] in raster order. The noise belongs to a
    sample and a place, so a sample depends neither on its batch nor, at its start, on the levels.
    """

    law_names = ("levels",)
    keeps = LOSSY  # a law of its own
    counts_prefill = False
    records_steps = False

    @register_to_config
    def __init__(self, levels: Annotated[int, Within(2, 999)] = 25) -> None: ...

    def planned_calls(self, model: BlockModel, parts: dict[str, Any]) -> int:
        return model.grid.num_tokens // model.block_size * self.config["levels"]

    def prepare(self, run: Run) -> BlockState:
        model, size, length = run.model, run.batch_size, run.num_tokens
        dtype = torch.promote_types(run.cache.conditions.dtype, torch.float32)
        tokens = torch.zeros(size, length, model.token_dim, dtype=dtype, device=run.device)
        run.tables["places"] = model.places.to(run.device).expand(size, -1)
        solver, noisy = model.solver(self.config["levels"]), tokens[:, : model.block_size]
        return BlockState.blank(run, tokens, solver=solver, noisy=noisy, predictions=[])

    def step(self, run: Run, state: BlockState) -> None:
        """One level of one block."""
        model, size, levels = run.model, run.model.block_size, self.config["levels"]
        block, level = divmod(int(state.round), levels)
        slots, clean = slice(block * size, (block + 1) * size), None
        if level == 0:
            places, dtype = run.tables["places"][:, slots], state.tokens.dtype
            noise = run.noise.normal(places, model.token_dim, CHAIN, dtype=dtype)
            state.noisy, state.predictions = noise * run.law_given.temperature, []
            clean = state.tokens[:, slots.start - size : slots.start] if block else None
        output = model(state.cache, state.noisy, state.solver.times[level], block, clean)
        output = check_returned(output, run.batch_size, run.guided, size, model.token_dim).to(
            state.noisy.dtype
        )
        run.lap("model")
        if run.guided:
            rows = output.flatten(0, 1)
            output = guided(rows, run.law_given.guidance_scale, model.token_dim).view_as(state.noisy)
        state.noisy, state.predictions = state.solver.step(level, state.noisy, output, state.predictions)
        state.target_calls += 1
        if level == levels - 1:
            state.tokens[:, slots] = state.noisy
            state.commit_call[:, slots] = state.round
            state.lengths += size
        state.round += 1
