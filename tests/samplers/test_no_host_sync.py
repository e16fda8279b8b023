"""The calls of a decode never wait for the host, and send it nothing: run on tensors without numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.samplers.drafting import captions, draft_model, eagle_pair
from tests.samplers.without_numbers import NoHost, stand_in, without_numbers
from tests.tiny_audio import tiny_decoder
from visual_spec.models.columns.musicgen import MagnetModel, MusicCondition, MusicgenColumnModel
from visual_spec.models.drafters.column_eagle import ColumnEagleDrafter
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers import zipar as rows
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.columns_drafted import DraftedColumnSampler
from visual_spec.samplers.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.core import base as loop
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.drafted import DraftedSampler
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.masked import MaskedSampler
from visual_spec.samplers.parallel_jacobi import ParallelJacobiSampler
from visual_spec.samplers.proactive import ProactiveJacobiSampler
from visual_spec.samplers.tree import TreeSampler
from visual_spec.samplers.zipar import ZipARSampler

TARGET, EAGLE = (model.float() for model in eagle_pair())
DRAFT = draft_model().float()
LAW = TokenLaw(guidance_scale=2.0, top_k=5)
GROUPED: Any = dict(acceptance="grouped", code_distance=None)
PICTURES = {
    "autoregressive": (AutoregressiveSampler(), None),
    "jacobi": (SpeculativeJacobiSampler(4, "maximal", "exact"), None),
    "jacobi, grouped": (SpeculativeJacobiSampler(4, **GROUPED), None),
    "eagle chain": (DraftedSampler(), EAGLE),
    "draft model": (DraftedSampler(stop_below=0.1), DRAFT),
    "eagle chain, grouped": (DraftedSampler(**GROUPED), EAGLE),
    "eagle tree": (TreeSampler(depth=3, width=4), EAGLE),
    "eagle tree, identical": (TreeSampler(depth=3, width=4, acceptance="identical"), EAGLE),
    "eagle tree, top-k": (TreeSampler(depth=3, width=4, siblings="top-k", **GROUPED), EAGLE),
    "draft tree": (TreeSampler(depth=3, width=4), DRAFT),
    "proactive": (ProactiveJacobiSampler(4), None),
    "zipar": (ZipARSampler(2), None),
    "zipar, adaptive": (ZipARSampler(2, adaptive=True), None),
    "rows of jacobi": (ParallelJacobiSampler(), None),
}
COLUMN_EAGLE = ColumnEagleDrafter.for_target(tiny_decoder())
MUSIC = {
    "columns": ColumnAutoregressiveSampler(),
    "column jacobi": ColumnJacobiSampler(4),
    "column jacobi, whole": ColumnJacobiSampler(4, unit="column", coupling="maximal", acceptance="exact"),
    "drafted columns": DraftedColumnSampler(),
    "drafted columns, identical": DraftedColumnSampler(acceptance="identical"),
    "masked": MaskedSampler(
        steps=(6, 2, 2), clock="magnet", span=3, temperature="falling", guidance="falling"
    ),
    "masked, entropy": MaskedSampler(steps=(6, 2, 2), score="entropy"),
}


class Ended(Exception):
    """The decode was watched for long enough."""


class Undecided:
    """What is known on the host of a batch that never ends."""

    def __call__(self, value: Any) -> Undecided:
        return self

    def __eq__(self, other: object) -> Undecided:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self

    def all(self) -> bool:
        return False

    def sum(self) -> int:
        return 0

    def __len__(self) -> int:
        return 3

    def __bool__(self) -> bool:
        return False


def watch(monkeypatch: Any, sampler: Any, model: Any, condition: Any, law: TokenLaw, **parts: Any) -> None:
    """Decode for three calls, of which all but the first are watched."""
    for module in (loop, rows):
        monkeypatch.setattr(module, "HostCopy", Undecided)
    for module in ("autoregressive", "jacobi"):  # what graphs record is run as it is
        monkeypatch.setattr(f"visual_spec.samplers.{module}.wants_graph", lambda *_: False)
    watched: list[NoHost] = []

    def look(call: int, lengths: torch.Tensor) -> None:
        if call == 1:
            watched.append(NoHost())
            watched[0].__enter__()
        if call == 3:
            raise Ended

    try:
        generator = torch.Generator().manual_seed(0)
        with pytest.raises(Ended):
            sampler(model, condition, law=law, generator=generator, batch_size=3, callback=look, **parts)
    finally:
        for mode in watched:
            mode.__exit__(None, None, None)
    assert watched


@pytest.mark.parametrize("law", [LAW, TokenLaw(top_p=0.9)], ids=["guided", "top-p"])
@pytest.mark.parametrize("name", PICTURES)
def test_pictures(monkeypatch, name, law):
    sampler, drafter = PICTURES[name]
    monkeypatch.setattr(type(TARGET), "check_condition", lambda *_: None)  # it looks at the captions, once
    stand_in(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = {} if drafter is None else {"drafter": without_numbers(drafter)}
        watch(monkeypatch, sampler, without_numbers(TARGET), without_numbers(captions(3)), law, **parts)


@pytest.mark.parametrize("name", MUSIC)
def test_music(monkeypatch, name):
    condition: Any = TextCondition(torch.zeros(3, 4, 32), torch.ones(3, 4, dtype=torch.bool))
    model: Any = MagnetModel(tiny_decoder(), 20, reach=4)
    if not isinstance(MUSIC[name], MaskedSampler):
        model = MusicgenColumnModel(tiny_decoder(), 20)
        codes = torch.zeros(3, 3, 0, dtype=torch.long)
        condition = MusicCondition(condition.features, condition.mask, codes)
    stand_in(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = {}
        if isinstance(MUSIC[name], DraftedColumnSampler):
            parts["drafter"] = without_numbers(COLUMN_EAGLE)
        watch(monkeypatch, MUSIC[name], without_numbers(model), without_numbers(condition), LAW, **parts)
