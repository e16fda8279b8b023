"""For every kind of calls a tiny model that answers them: what tests of all registered samplers decode with.

A newly registered sampler is tested without an edit here, unless it takes something that no other one takes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.block_tables import TableDrafter
from tests.helpers.causal_tables import TabularCausalLayer, TabularFeatureModel
from tests.helpers.columns import MODEL as COLUMN_MODEL
from tests.helpers.columns import POOR as COLUMN_DRAFTER
from tests.helpers.frame_tables import TableFrameModel
from tests.helpers.tabular import TabularModel, TabularOrderModel
from tests.helpers.tabular_any_order import TabularAnyOrderModel
from tests.helpers.tiny import seeded, tiny_transformer
from tests.helpers.tiny_scales import FormulaTokenizer, TableScaleModel
from tests.helpers.tiny_students import tiny_student
from tests.helpers.tiny_wan import prompts, tiny_wan
from tests.models.continuous.tiny import calm, tiny_acdit, tiny_causal, tiny_flowar
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import Full
from visual_spec.prototype.block_drafts.sampler import BlockDraftSampler
from visual_spec.samplers import registry
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.registry import SamplerEntry

LAW = TokenLaw(guidance_scale=1.8, top_k=5)


@dataclass(frozen=True)
class Kind:
    """A model, and what is decoded with it.

    Attributes:
        condition: of some samples, given by their numbers.
        drafter: a second model over the same tokens.
        given: by the names that samplers list in `takes`, what they take beside.
    """

    model: Any
    condition: Callable[[Sequence[int]], Any]
    drafter: Any = None
    given: Any = None

    def parts(self, sampler: Any) -> dict[str, Any]:
        """What this sampler takes."""
        drafter = BLOCKS if isinstance(sampler, BlockDraftSampler) else self.drafter
        known = {"drafter": drafter, **(self.given or {})}
        return {name: known[name] for name in sampler.takes if known.get(name) is not None}


def _table(samples: Sequence[int]) -> Tensor:
    return torch.tensor([sample % 3 for sample in samples])


def _raster(seed: int = 0) -> TabularModel:
    return TabularModel(TokenGrid(4, 4), 12, order=2, conditions=3, dependence=0.3, seed=seed)


class Upsampler(nn.Module):
    """The law of every large token by the first small one."""

    num_tokens = 16

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("table", torch.randn(12, 16, 12, generator=generator, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.get_buffer("table")[tokens[:, 0]]


class AnyScaleTokenizer(FormulaTokenizer):
    def at(self, scales: Sequence[int]) -> AnyScaleTokenizer:
        return AnyScaleTokenizer(tuple(scales), self.codebook_size)


class AnyScaleModel(TableScaleModel):
    def at(self, scales: Sequence[int]) -> AnyScaleModel:
        view = copy.copy(self)  # with what a test has put in place of its methods
        view.__init__(tuple(scales), self.vocab_size, conditions=self.conditions)  # type: ignore[misc]
        return view


RASTER_MODEL = _raster()
# Both kinds of drafters at once: a model of the same tokens, and one of a smaller picture with what enlarges it.
RASTER_DRAFTER = TabularModel(TokenGrid(4, 4), 12, order=2, conditions=3, dependence=0.3)
RASTER_DRAFTER.logits = 0.7 * RASTER_MODEL.logits + 0.3 * _raster(seed=1).logits
RASTER_DRAFTER.upsampler = Upsampler()
RASTER_DRAFTER.transformer = TabularModel(TokenGrid(2, 2), 12, order=1, conditions=3, seed=9)
BLOCKS = TableDrafter(RASTER_DRAFTER, 3)
CODES = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
SIDES = (1, 2, 3, 4)
MASKED_MODEL = TabularFeatureModel(TokenGrid(1, 5), 3, conditions=3)


def _latents(spread: float = 0.0) -> Any:
    """A causal model whose head knows little, so that drafts of a model near it are kept now and then."""
    model = calm(tiny_causal(head_kind="velocity", head_steps=4, eta=1.0, final_noise=0.4))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return model


_pictures = Kind(RASTER_MODEL, _table, RASTER_DRAFTER, {"codebook": CODES})
KINDS = {
    registry.RASTER: _pictures,
    registry.TREE: _pictures,
    registry.ORDER: _pictures,
    registry.OWN_ORDER: _pictures,
    registry.BLOCKS: Kind(
        TabularOrderModel(TokenGrid(2, 4), 3, "blocks2", first=(0, 1, 4, 5), conditions=3), _table
    ),
    registry.COLUMNS: Kind(COLUMN_MODEL, _table, COLUMN_DRAFTER),
    registry.MASKED: Kind(MASKED_MODEL, _table, given={"causal_layer": TabularCausalLayer(MASKED_MODEL)}),
    registry.FRAMES: Kind(TableFrameModel(TokenGrid(1, 4, 3), 3, conditions=3), _table),
    registry.ANY_ORDER: Kind(TabularAnyOrderModel(TokenGrid(1, 5), 5, conditions=3), _table),
    registry.CONTINUOUS: Kind(_latents(), _table, _latents(0.03)),
    registry.DENOISED: Kind(tiny_acdit().double(), _table),
    registry.DISTILLED: Kind(
        tiny_student(),
        _table,
        given={
            "codebook": CODES,
            "teacher": tiny_transformer(num_classes=7, caption_dim=None, prefix_length=1).double(),
        },
    ),
    registry.CHUNKS: Kind(
        CausalWan(tiny_wan(num_layers=1), Full()),
        lambda samples: torch.cat([prompts(seed=sample) for sample in samples]),
        given={"num_frames": 6, "height": 2, "width": 2},
    ),
    registry.FLOW_SCALES: Kind(tiny_flowar().double(), _table),
    registry.SCALES: Kind(
        AnyScaleModel(SIDES, 7, conditions=3), _table, given={"tokenizer": AnyScaleTokenizer(SIDES, 7)}
    ),
}


def decode(entry: SamplerEntry, sampler: Any, samples: Sequence[int] = range(5), **more: Any) -> Any:
    """Some samples of the kind's model, each with its own generator and condition, as one batch."""
    kind = KINDS[entry.calls]
    options: dict[str, Any] = dict(law=LAW, generator=seeded(*samples), batch_size=len(samples))
    unfiltered = (
        registry.MASKED,
        registry.FRAMES,
        registry.CONTINUOUS,
        registry.DENOISED,
        registry.FLOW_SCALES,
    )
    if entry.calls in unfiltered:
        options["law"] = TokenLaw(guidance_scale=1.8)
    alone = entry.calls == registry.DISTILLED and sampler.config.teacher_from is None
    if entry.calls == registry.CHUNKS or alone:
        options["law"] = TokenLaw()  # guidance is in the weights
    return sampler(
        kind.model, condition=kind.condition(samples), **kind.parts(sampler), **{**options, **more}
    )


# Of every class a value for each setting that is not its default; together they make a legal sampler.
_RELAXED = dict(acceptance="grouped", relaxation={"group_size": 3, "delta": 0.2, "bounded": True})
CHANGED: dict[str, dict[str, Any]] = {
    "AutoregressiveSampler": dict(graph=False, exact_width=True),
    "SpeculativeJacobiSampler": dict(
        window=7, coupling="maximal", initial_draft="up", graph=False, exact_width=False,
        drafts="repaired", redrafts=3, **_RELAXED
    ),
    "ProactiveJacobiSampler": dict(
        window=6, siblings=3, depth=1, coupling="gumbel", acceptance="identical", initial_draft="last_law",
        sibling_rule="recursive", graph=False,
    ),
    "DraftedSampler": dict(num_drafts=2, stop_below=0.25, graph=False, exact_width=False, **_RELAXED),
    "BlockDraftSampler": dict(
        window=6, acceptance="exact", drafted=2, steady=None, graph=False, exact_width=False
    ),
    "TreeSampler": dict(
        depth=2, width=3, num_nodes=4, siblings="top-k", expected_acceptance=0.5, graph=False, **_RELAXED
    ),
    "MultiscaleSampler": dict(pool=3, radius=None, max_rounds=None),
    "OrderedSampler": dict(order="diagonal", allow_approximate=True),
    "AnyOrderSampler": dict(
        order="locality", steps=3, guidance_start=0.5, schedule="arpg", repulsion=1
    ),
    "SpeculativeAnyOrderSampler": dict(
        num_drafts=2, order="raster", acceptance="exact", guidance_start=0.5
    ),
    "ZipARSampler": dict(window=2, adaptive=True, measure=True, as_released=True),
    "ParallelJacobiSampler": dict(
        rows=2, drafts=2, lead=1, coupling="maximal", acceptance="exact", initial_draft="up", measure=True,
        start=2,
    ),
    "ColumnAutoregressiveSampler": dict(graph=False, exact_width=True),
    "ColumnJacobiSampler": dict(
        window=5, coupling="independent", unit="codebook", initial_draft="last_law", graph=False,
        exact_width=False, **_RELAXED
    ),
    "BlockJacobiSampler": dict(
        window=5, coupling="maximal", acceptance="exact", unit="codebook", initial_draft="uniform"
    ),
    "DraftedColumnSampler": dict(num_drafts=2, acceptance="identical", graph=False, exact_width=True),
    "MaskedSampler": dict(
        steps=3, schedule="arccos", clock="magnet", score="probability", choice_temperature=0.5, span=2,
        span_score="sum", temperature="falling", guidance="falling", least_guidance=1.2, filtered_score=True,
        rescorer_share=0.25, last_temperature=0.5, entropy_bound=0.4, greedy=True, measure=True,
        falls="before", score_temperature=0.8, graph="auto",
        warmup=1, guided_steps=2, second_draw=True, credit=0.5, threshold=None, factor=None, commit_gaps=None,
    ),
    "FreeDaveSampler": dict(
        steps=3, num_drafts=1, acceptance="identical", schedule="arccos", clock="magnet", score="probability",
        choice_temperature=0.5, span=2, span_score="sum", temperature="falling", guidance="falling", least_guidance=1.2,
        filtered_score=True, last_temperature=0.5, entropy_bound=0.4, greedy=True, falls="before",
        score_temperature=0.8, warmup=1, guided_steps=2, second_draw=True, credit=0.5, threshold=None, factor=None,
        commit_gaps=None,
    ),
    "ReusingMaskedSampler": dict(
        steps=3, schedule="arccos", clock="magnet", score="probability", choice_temperature=0.5, span=2,
        span_score="sum", temperature="falling", guidance="falling", least_guidance=1.2, filtered_score=True,
        rescorer_share=0.25, last_temperature=0.5, entropy_bound=0.4, greedy=True, measure=True,
        reuse=0, reuse_from=0.25, reuse_by="shortcut", reuse_share=0.2, falls="before", score_temperature=0.8,
        graph="auto", warmup=1, guided_steps=2, second_draw=True, credit=0.5, threshold=None, factor=None,
        commit_gaps=None,
    ),
    "FrameMaskedSampler": dict(
        steps=3, history_hidden=0.5, history_pattern="random", unconditional_history="same", schedule="arccos",
        clock="magnet", score="probability", choice_temperature=0.5, falls="before", temperature="falling",
        last_temperature=0.5, guidance="falling", least_guidance=1.2, entropy_bound=None, filtered_score=True,
        score_temperature=0.8, greedy=True, measure=True, later_noise=False, warmup=1, guided_steps=2, second_draw=True,
        credit=0.5, threshold=0.6, factor=None, commit_gaps=None,
    ),
    "ContinuousSampler": dict(
        steps=None, order=None, guidance="constant", head_steps=3, eta=0.5, final_noise=0.2, last_head_steps=2,
        graph=False,
    ),
    "ReusingContinuousSampler": dict(
        steps=None, order=None, guidance="constant", head_steps=3, eta=0.5, final_noise=0.2, last_head_steps=2,
        graph=False, reuse=0, reuse_from=0.5, local_levels=0.5,
    ),
    "SpeculativeContinuousSampler": dict(
        rule="aligned", num_drafts=2, tolerance=0.3, prefill=0.2, measure=True, order=None, guidance="constant",
        head_steps=3, eta=0.5, final_noise=0.2,
    ),
    "ContinuousJacobiSampler": dict(
        window=3, rule="aligned", tolerance=0.3, order=None, guidance="constant", head_steps=3, eta=0.5,
        final_noise=0.2,
    ),
    "HeadSpeculativeSampler": dict(
        levels=2, steps=None, order=None, guidance="constant", head_steps=3, eta=0.5, final_noise=0.2
    ),
    "FlowScaleSampler": dict(levels=6, last_levels=3, guided_from=0.5),
    "BlockDiffusionSampler": dict(levels=3),
    "DistilledSampler": dict(steps=2, teacher_from=4),
    "ChunkWiseSampler": dict(chunk=2, steps=[1000, 400.5], shift=2.0, first_steps=2, solver="unipc"),
    "SpeculativeMaskedSampler": dict(num_drafts=2, order="raster", acceptance="exact"),
    "SelfSpeculativeMaskedSampler": dict(
        steps=3, schedule="linear", order="raster", num_drafts=2, acceptance="exact"
    ),
    "ScaleWiseSampler": dict(
        ramp=False, smooth=True, measure=True, schedule={"stop_after": -2, "guided_until": 2}, scales=[1, 2, 4],
        num_draft_scales="all", refiner_guidance_scale=1.5, cache_share="off", num_drafters=2,
    ),
}  # fmt: skip


# Values that no sampler with a setting of this name takes.
_COUNT: list[Any] = [0, -2, 1.5, True, "8"]
_SHARE: list[Any] = [-0.1, 1.5, math.nan, True, "1"]
_NUMBER: list[Any] = [-0.1, math.inf, math.nan, True, "1"]
_WORD: list[Any] = ["best", 3]
_FLAG: list[Any] = ["yes", 1]
REFUSED: dict[str, list[Any]] = {
    **dict.fromkeys(
        (
            "window siblings depth width num_nodes pool radius max_rounds rows lead start drafts drafted redrafts span "
            "steady"
        ).split(),
        _COUNT,
    ),
    **dict.fromkeys(
        "stop_below last_temperature reuse_from rescorer_share history_hidden prefill eta guided_from".split(), _SHARE
    ),
    **dict.fromkeys(("threshold", "reuse_share"), _SHARE),
    **dict.fromkeys("choice_temperature entropy_bound tolerance final_noise credit".split(), _NUMBER),
    **dict.fromkeys(
        "coupling acceptance initial_draft sibling_rule unit schedule clock score span_score temperature guidance "
        "falls reuse_by history_pattern unconditional_history rule solver".split(), _WORD
    ),
    **dict.fromkeys(
        "exact_width adaptive measure as_released allow_approximate filtered_score second_draw greedy later_noise ramp "
        "smooth".split(), _FLAG,
    ),
    "graph": ["no", 0, 65, 1.5],
    "steps": [*_COUNT, (), (4, 0)],
    "order": ["spiral", 3, [], [0, True], ["0"]],
    **dict.fromkeys("num_drafts num_drafters".split(), [-1, 1.5, True, "8"]),
    "repulsion": [-1, 1.5, True, "8"],
    "chunk": _COUNT,
    "shift": [0.0, -1.0, math.inf, True, "1"],
    "first_steps": [0, -2, 1.5, True, "8", (), (4, 0), (4, 5)],
    "scales": [0, "4", [1, 0], [1, 1.5], [True], ["1"]],
    "num_draft_scales": [-1, 1.5, True, "half"],
    "refiner_guidance_scale": [math.nan, True, "1"],
    "cache_share": [0.0, 1.5, True, "little"],
    "reuse": [-1, 1.5, True],
    "warmup": [-1, 1.5, True],
    "factor": [0.0, *_NUMBER],
    "commit_gaps": [(-1.0, 1.0, 1.0), (1.0, 2.0), 3.0, "1"],
    "guided_steps": [-1, 1.5, True],
    **dict.fromkeys(("levels", "last_levels"), [1, *_COUNT]),
    "head_steps": [1001, *_COUNT],
    "last_head_steps": [1001, *_COUNT],
    "teacher_from": [-1, 1.5, True],
    "relaxation": [3, "grouped"],
    "expected_acceptance": [0.0, -1.0, 1.5, math.nan],
    "local_levels": [0.0, 1.5, math.nan],
    "least_guidance": [0.5, math.inf],
    "score_temperature": [0.0, -1.0, 2e6, math.inf],
    "guidance_start": [-1.0, 2e6, math.nan, "1", True],
}  # fmt: skip
# Others that some samplers take.
REFUSED_BY: dict[str, dict[str, list[Any]]] = {
    "BlockDraftSampler": dict(acceptance=["grouped"], drafted=[None], steady=[10]),
    "DraftedSampler": dict(num_drafts=[0, None]),
    "DraftedColumnSampler": dict(num_drafts=[0], acceptance=["lantern"]),
    "SpeculativeAnyOrderSampler": dict(num_drafts=[0], acceptance=["grouped"]),
    "SpeculativeContinuousSampler": dict(num_drafts=[0]),
    "ContinuousJacobiSampler": dict(window=[1], rule=["path"]),
    "ParallelJacobiSampler": dict(initial_draft=["last_law"]),
    "ProactiveJacobiSampler": dict(siblings=[None], depth=[None]),
    "ColumnJacobiSampler": dict(window=[None], initial_draft=["up"]),
    "BlockJacobiSampler": dict(window=[None], initial_draft=["up"], acceptance=["grouped"]),
    "BlockDiffusionSampler": dict(levels=[1000]),
    "DistilledSampler": dict(steps=[3]),
}
