"""The calls of a decode never wait for the host, and send it nothing: run on tensors without numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.drafting import captions, draft_model, eagle_pair
from tests.helpers.sampler_settings import lossy
from tests.helpers.tiny import tiny_frame_transformer, tiny_transformer
from tests.helpers.tiny_audio import tiny_decoder
from tests.helpers.tiny_scales import tiny_var, tiny_var_vq
from tests.helpers.tiny_students import tiny_student, tiny_var_student
from tests.helpers.without_numbers import NoHost, stand_in, without_numbers
from tests.models.continuous.tiny import tiny_acdit, tiny_causal, tiny_flowar, tiny_mar
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition
from visual_spec.models.continuous import blocks as continuous_blocks
from visual_spec.models.continuous import causal as continuous_causal
from visual_spec.models.continuous import mar as continuous_mar
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.prototype.acdit import model as continuous_acdit
from visual_spec.prototype.block_drafts.drafter import BlockDrafter
from visual_spec.prototype.drafted_columns.eagle import ColumnEagleDrafter
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.prototype.flowar import model as continuous_flowar
from visual_spec.prototype.local_speculation import sampler as local_speculation
from visual_spec.prototype.local_speculation.drafter import MultiscaleDrafter
from visual_spec.prototype.parallel_jacobi import ParallelJacobiSampler
from visual_spec.prototype.proactive import ProactiveJacobiSampler
from visual_spec.prototype.students.sampler import DistilledSampler
from visual_spec.samplers.core import base
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule
from visual_spec.samplers.orders.tables import order_of
from visual_spec.samplers.orders.zipar import ZipARSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler
from visual_spec.samplers.registry import (
    ANY_ORDER,
    BLOCKS,
    COLUMNS,
    CONTINUOUS,
    DENOISED,
    DISTILLED,
    FLOW_SCALES,
    FRAMES,
    MASKED,
    SCALES,
    all_samplers,
    sampler_class,
)

# Operations that launch nothing: they allocate, or read a number of the host.
FREE = ("empty", "new_empty", "empty_like", "scalar_tensor", "lift_fresh", "detach", "device")
TARGET, EAGLE = (model.float() for model in eagle_pair())
DRAFT = draft_model().float()
LAW = TokenLaw(guidance_scale=2.0, top_k=5)
GROUPED: Any = lossy("grouped", code_distance=None)
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
        steps=(6, 2, 2),
        span=3,
        schedule=Schedule(clock="magnet"),
        by_step=LawByStep(temperature="falling", guidance="falling"),
    ),
    "masked, entropy": MaskedSampler(steps=(6, 2, 2), choice=Choice(score="entropy")),
}


# What is registered, with its default settings, and another drafter where these will not do.
REGISTERED = {entry.name: entry for entry in all_samplers()}
SMALLER: dict[str, Any] = dict(
    transformer_config=dict(
        vocab_size=8,
        dim=16,
        num_layers=1,
        num_heads=2,
        grid_size=5,
        prefix_length=5,
        num_classes=None,
        caption_dim=12,
    ),
    upsampler_config=dict(vocab_size=8, low_side=5, factor=1, width=8, num_blocks=1),
)


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
    """Decode for three calls, of which all but the first are watched, with log-probabilities where there are any."""
    monkeypatch.setattr(base, "HostCopy", Undecided)
    monkeypatch.setattr(base, "wants_graph", lambda *_: False)  # what graphs record is run as it is
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
            sampler(
                model,
                condition=condition,
                law=law,
                generator=generator,
                batch_size=3,
                callback=look,
                **({"output_logprobs": True} if sampler.gives_logprobs else {}),
                **parts,
            )
    finally:
        for mode in watched:
            mode.__exit__(None, None, None)
    assert watched


def watch_pictures(monkeypatch: Any, sampler: Any, drafter: Any, law: TokenLaw, **parts: Any) -> None:
    monkeypatch.setattr(type(TARGET), "check_condition", lambda *_: None)  # it looks at the captions, once
    stand_in(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if drafter is not None:
            parts["drafter"] = without_numbers(drafter)
        watch(monkeypatch, sampler, without_numbers(TARGET), without_numbers(captions(3)), law, **parts)


def watch_music(monkeypatch: Any, sampler: Any, law: TokenLaw = LAW) -> None:
    condition: Any = TextCondition(torch.zeros(3, 4, 32), torch.ones(3, 4, dtype=torch.bool))
    model: Any = MagnetModel(tiny_decoder(), 20, reach=4)
    if not isinstance(sampler, MaskedSampler):
        model = MusicgenColumnModel(tiny_decoder(), 20)
        codes = torch.zeros(3, 3, 0, dtype=torch.long)
        condition = MusicCondition(condition.features, condition.mask, codes)
    stand_in(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = {"drafter": without_numbers(COLUMN_EAGLE)} if sampler.needs_drafter else {}
        watch(monkeypatch, sampler, without_numbers(model), without_numbers(condition), law, **parts)


def watch_labels(monkeypatch: Any, sampler: Any, *models: Any, law: TokenLaw = LAW, **parts: Any) -> None:
    """Models of three classes; parts have no numbers either."""
    for kind in {type(model) for model in models} | {LlamaGenTransformer}:  # they look at labels, once
        monkeypatch.setattr(kind, "check_condition", lambda *_: None, raising=False)
    stand_in(monkeypatch)
    for model in models:
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = {name: without_numbers(part) for name, part in parts.items()}
            labels = without_numbers(torch.tensor([1, 0, 2]))
            watch(monkeypatch, sampler, without_numbers(model), labels, law, **given)


def test_a_call_of_the_default_takes_few_launches_beside_the_model(monkeypatch):
    """Of kernels and of operations that compute; a draw from few slots is one operation and up to two launches.

    A recording counts calls on the device, so that one `add_` stands for `full` there, and nobody copies the progress.
    """
    launches: list[list[str]] = []

    class Counting(NoHost):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.__name__.partition(".")[0]
            if counts and not func.is_view and name not in FREE:
                launches[-1].append(name)
            return super().__torch_dispatch__(func, types, args, kwargs)

    counts = True
    score, step = Run.score, SpeculativeJacobiSampler.step

    def uncounted(*given: Any) -> Any:
        nonlocal counts
        counts = False
        try:
            return score(*given)
        finally:
            counts = True

    def counted(*given: Any) -> Any:
        launches.append([])
        return step(*given)

    monkeypatch.setattr(Run, "score", uncounted)
    monkeypatch.setattr(SpeculativeJacobiSampler, "step", counted)
    monkeypatch.setattr(f"{__name__}.NoHost", Counting)
    monkeypatch.setattr(SpeculativeJacobiSampler, "gives_logprobs", False)
    watch_pictures(monkeypatch, SpeculativeJacobiSampler(4), None, LAW)
    logits = ["bitwise_not", "where", "amin", "minimum"]  # what defines no law is remembered
    expected = ["jacobi_open", "draw", *logits, "lt", "full", "jacobi_close", "clone"]
    assert launches[-1] == launches[-2] == expected


# Every sampler computes its laws by the same function, so one of a kind tries another law.
SOME = ("autoregressive", "jacobi", "eagle tree", "zipar")


@pytest.mark.fast_sets(9)
@pytest.mark.parametrize(
    "name, law",
    [
        *((name, LAW) for name in PICTURES),
        *(
            pytest.param(name, TokenLaw(top_p=0.9), marks=[] if name in SOME else [pytest.mark.slow])
            for name in PICTURES
        ),
    ],
)
def test_pictures(monkeypatch, name, law):
    sampler, drafter = PICTURES[name]
    watch_pictures(monkeypatch, sampler, drafter, law)


@pytest.mark.parametrize("name", MUSIC)
def test_music(monkeypatch, name):
    watch_music(monkeypatch, MUSIC[name])


# Samplers of continuous tokens that test drafts: what replaces one is drawn by rejection, until it is found. And the
# one that calls its model only when a group is complete. Chunks of frames are not watched: they take sizes for a law.
WAITING = {
    "chunk-wise",
    "speculative-continuous",
    "continuous-jacobi",
    "head-speculation",
    "self-speculative-masked",
    "freedave",  # and the one that asks whether a state is the one that was drafted
}


def watch_latents(monkeypatch: Any, sampler: Any, *models: Any) -> None:
    for module in (continuous_acdit, continuous_blocks, continuous_causal, continuous_flowar, continuous_mar):
        if hasattr(module, "check_labels"):  # it looks at the labels, once
            monkeypatch.setattr(module, "check_labels", lambda *_: None)
    watch_labels(monkeypatch, sampler, *models, law=TokenLaw(guidance_scale=2.0))


def test_a_student_whose_teacher_draws_scales(monkeypatch):
    monkeypatch.setattr(VARTransformer, "check_condition", lambda *_: None)
    model = tiny_var_student(torch.float32, restart=14)  # four calls: three scales, and the student
    tokenizer = tiny_var_vq()
    parts: dict[str, Any] = dict(
        codebook=tokenizer.codebook, teacher=tiny_var(0, torch.float32), tokenizer=tokenizer
    )
    watch_labels(monkeypatch, DistilledSampler(steps=2, teacher_from=0), model, **parts)


@pytest.mark.parametrize("name", [name for name in REGISTERED if name not in WAITING])
def test_what_is_registered_as_it_comes(monkeypatch, name):
    entry = REGISTERED[name]
    sampler = sampler_class(entry)()
    if entry.calls == SCALES:
        watch_labels(monkeypatch, sampler, tiny_var(dtype=torch.float32), tokenizer=tiny_var_vq())
    elif name == "speculative-masked":
        watch_labels(monkeypatch, sampler, MaskedImageTransformer(8, 8, 1, 2, 4, num_classes=3))
    elif entry.calls in (ANY_ORDER, BLOCKS):
        shape: dict[str, Any] = dict(
            vocab_size=8, dim=16, num_layers=1, num_heads=2, grid_size=4, num_classes=3, order="any"
        )
        if entry.calls == BLOCKS:
            shape |= dict(order="blocks2", grid_size=8)
            order_of("blocks2", TokenGrid(8, 8))  # a table, made on the host once
        watch_labels(monkeypatch, sampler, LlamaGenTransformer(**shape))
    elif entry.calls in (COLUMNS, MASKED):
        watch_music(monkeypatch, sampler)
    elif entry.calls == FRAMES:
        model = tiny_frame_transformer(num_classes=3, caption_dim=None, prefix_length=1)
        watch_labels(monkeypatch, sampler, model, law=TokenLaw(guidance_scale=2.0))
    elif entry.calls == CONTINUOUS:
        watch_latents(monkeypatch, sampler, tiny_mar(head_steps=3), tiny_causal(head_steps=3))
    elif entry.calls == FLOW_SCALES:
        watch_latents(monkeypatch, sampler, tiny_flowar(grid_size=8))
    elif entry.calls == DENOISED:
        model = tiny_acdit(grid_size=8)
        model.solver(sampler.config.levels)  # numbers of the scheduler, read on the host once
        watch_latents(monkeypatch, sampler, model)
    elif entry.calls == DISTILLED:
        teacher = tiny_transformer(num_classes=7, caption_dim=None, prefix_length=1)
        sampler = type(sampler)(steps=2, teacher_from=4)
        parts: dict[str, Any] = dict(codebook=torch.zeros(12, 4), teacher=teacher)
        watch_labels(monkeypatch, sampler, tiny_student(torch.float32), **parts)
    elif name == "multiscale":
        # Before its first call it looks at the laws of the small picture, and makes a table of the codebook.
        monkeypatch.setattr(local_speculation, "CheckedLaw", partial(CheckedLaw, deferred=True))
        monkeypatch.setattr(
            local_speculation,
            "neighbour_table",
            lambda codes, count, device: torch.zeros(8, count, device=device),
        )
        parts = {"codebook": torch.zeros(8, 4)}
        watch_pictures(monkeypatch, sampler, MultiscaleDrafter(**SMALLER), LAW, **parts)
    elif name == "block-drafts":
        state = TARGET.prefill(captions(3), batch_size=3, guided=True, window=1)
        watch_pictures(monkeypatch, sampler, BlockDrafter.for_target(TARGET, state), LAW)
    else:
        watch_pictures(monkeypatch, sampler, EAGLE if entry.needs else None, LAW)
