"""A masked model and a causal layer as tables, so that the law of groups can be written out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.tabular import TabularMaskedModel, TabularMaskedState


@dataclass
class FeatureState(TabularMaskedState):
    features: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        if self.features is not None:
            self.features = self.features[self.rows(samples, len(self.features))]
        super().select(samples)


class TabularFeatureModel(TabularMaskedModel):
    """Its features are its logits."""

    @property
    def feature_dim(self) -> int:
        return self.vocab_size

    def prepare(self, condition: Any, *, batch_size: int, guided: bool) -> FeatureState:
        state = super().prepare(condition, batch_size=batch_size, guided=guided)
        return FeatureState(state.guided, state.device, state.tables)

    def forward(self, state: Any, tokens: Tensor, stage: int, *, keep: int | None = None) -> Tensor:
        logits = super().forward(state, tokens, stage)
        if keep is not None:
            state.features = logits
        return logits

    def scores(self, state: Any, features: Tensor, stage: int) -> Tensor:
        return features


class TabularCausalLayer(nn.Module):
    """Each earlier token adds a row of a table to the logits of a later slot.

    Attributes:
        table: [L, V, L, V], by slot and token of the earlier one, then by the later slot.
    """

    table: Tensor

    def __init__(self, model: TabularMaskedModel, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        length, codes = model.grid.num_tokens, model.vocab_size
        draw = torch.Generator().manual_seed(seed)
        table = scale * torch.randn(length, codes, length, codes, generator=draw, dtype=torch.float64)
        self.register_buffer("table", table)

    def check_fits(self, model: Any) -> None:
        assert self.table.shape[:2] == (model.grid.num_tokens, model.vocab_size)

    def forward(self, features: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        found = [features[:, 0]]
        for later in range(1, tokens.shape[1]):
            rows = self.table[slots[:, :later], tokens[:, :later], slots[:, later, None]]  # [R, later, V]
            found.append(features[:, later] + rows.sum(1))
        return torch.stack(found, 1)
