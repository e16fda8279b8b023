"""Masked models that count how often each of their layers runs."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.dimoo import tiny_dimoo
from tests.helpers.mage import tiny_mage
from tests.helpers.musicgen import IDS, MASK, musicgen
from tests.helpers.tabular import TabularMaskedModel
from tests.helpers.tiny import tiny_masked_transformer
from visual_spec.models.columns.musicgen import MagnetModel
from visual_spec.models.columns.musicgen_modules import text_condition
from visual_spec.models.next_token.llamagen import TextCondition


def told() -> TextCondition:
    draw = torch.Generator().manual_seed(2)
    mask = torch.tensor([[True, True, False, False, False, True], [True, False, True, True, True, True]])
    return TextCondition(torch.randn(2, 6, 8, generator=draw), mask)


def maskgit(proj: int, registers: int, classes: bool) -> tuple[Any, Any, float]:
    changes: dict[str, Any] = dict(proj=proj, registers=registers)
    if classes:
        changes |= dict(num_classes=5, caption_dim=None, prefix_length=0)
    model = tiny_masked_transformer(**changes).double()
    told_ = told()
    condition = torch.tensor([1, 4]) if classes else TextCondition(told_.features.double(), told_.mask)
    return model, condition, 1e-9


def magnet(_: int, __: int, ___: bool) -> tuple[Any, Any, float]:
    condition = text_condition(musicgen(), IDS, MASK)
    return (
        MagnetModel(musicgen(), 16, reach=2),
        TextCondition(condition.features[:2], condition.mask[:2]),
        1e-4,
    )


def mage(_: int, __: int, ___: bool) -> tuple[Any, Any, float]:
    return tiny_mage(), None, 1e-9


def dimoo(_: int, __: int, ___: bool) -> tuple[Any, Any, float]:
    model, told_ = tiny_dimoo().double(), told()
    return model, TextCondition(told_.features.double(), told_.mask), 1e-9


MODELS = {
    "dimoo": (dimoo, 0, 0, False),
    "mage": (mage, 0, 0, False),
    "captions": (maskgit, 1, 1, False),
    "classes, no register": (maskgit, 1, 0, True),
    "merged": (maskgit, 2, 2, True),
    "magnet": (magnet, 1, 0, False),
}


def made(kind: str) -> tuple[Any, Any, float]:
    make, *settings = MODELS[kind]
    return make(*settings)


class Watched(torch.nn.Module):
    """A masked model whose local calls are exact: those of the current tokens. Notes what it is asked."""

    def __init__(self, model: TabularMaskedModel) -> None:
        super().__init__()
        self.model, self.grid = model, model.grid
        self.vocab_size, self.mask_id = model.vocab_size, model.mask_id
        self.prepare = model.prepare
        self.asked: list[tuple[int | None, Tensor | None]] = []

    def scores(self, state: Any, features: Tensor, stage: int) -> Tensor:
        raise NotImplementedError

    def forward(self, state: Any, tokens: Tensor, stage: int, *, keep=None, places=None) -> Tensor:
        self.asked.append((keep, places))
        logits = self.model(state, tokens, stage)
        if places is None:
            return logits
        at = places.repeat(len(logits) // len(places), 1).clamp(max=self.grid.num_tokens - 1)
        return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))
