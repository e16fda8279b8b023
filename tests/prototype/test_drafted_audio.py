"""Music with a drafter: in the pipeline, over windows and streams, saved, and on a MusicGen of transformers."""

from typing import Any

import pytest
import torch

import visual_spec
from tests.helpers.musicgen import IDS, MASK
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_audio import PROMPT, tiny_audio_pipeline, tiny_decoder, tiny_musicgen
from visual_spec.eval.defaults import settings_of_model
from visual_spec.eval.pair import MaskedPair
from visual_spec.eval.settings import parse_setting
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.pipelines.loading import load_drafter
from visual_spec.prototype.drafted_columns.eagle import ColumnEagleDrafter
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler


def eagle(model: Any) -> ColumnEagleDrafter:
    torch.manual_seed(7)
    return ColumnEagleDrafter.for_target(model).to(model.dtype).eval()


def pipe_with_drafter(acceptance: str = "identical", **settings: Any) -> AudioPipeline:
    pipe = tiny_audio_pipeline(DraftedColumnSampler(acceptance=acceptance), **settings)
    pipe.drafter = eagle(pipe.transformer)
    return pipe


@pytest.mark.fast_sets(2)
@pytest.mark.parametrize("pattern", ["delay", "coarse_first"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_drafted_music_is_the_plain_music_window_by_window_and_streamed(scale, pattern):
    pipe = pipe_with_drafter(pattern=pattern)
    settings: Any = dict(
        audio_length_in_s=0.37,
        extend_stride_in_s=0.1,
        guidance_scale=scale,
        output_type="pt",
        stretch_in_s=0.02,
    )
    found = pipe([PROMPT] * 3, generator=seeded(1, 2, 3), **settings)
    heard: list[torch.Tensor] = []
    live = pipe(
        [PROMPT] * 3,
        generator=seeded(1, 2, 3),
        callback_on_audio=lambda _, start, waves: heard.append(waves),
        **settings,
    )
    plain = tiny_audio_pipeline(pattern=pattern)([PROMPT] * 3, generator=seeded(1, 2, 3), **settings)
    assert found.codes.equal(plain.codes) and found.audios.equal(plain.audios)
    assert live.codes.equal(plain.codes) and torch.cat(heard, -1).equal(plain.audios)
    assert found.trace.sampler == "DraftedColumnSampler"


def test_another_musicgen_drafts():
    pipe = tiny_audio_pipeline(DraftedColumnSampler(2))
    pipe.drafter = tiny_decoder()  # itself: every draft is kept
    settings: Any = dict(audio_length_in_s=0.3, extend_stride_in_s=0.1)
    found = pipe([PROMPT] * 2, generator=seeded(1, 2), **settings)
    assert (found.trace.tokens_per_call > 2.2).all()
    pipe.sampler, pipe.drafter = DraftedColumnSampler(2, "identical"), tiny_decoder(num_hidden_layers=1)
    drafted = pipe([PROMPT] * 2, generator=seeded(1, 2), **settings)
    plain = tiny_audio_pipeline()([PROMPT] * 2, generator=seeded(1, 2), **settings)
    assert drafted.codes.equal(plain.codes)


def test_a_drafter_is_saved_with_its_pipeline(tmp_path):
    pipe = pipe_with_drafter("exact")
    before = pipe(PROMPT, generator=seeded(4)).codes
    pipe.save_pretrained(tmp_path / "whole")
    loaded = quiet(AudioPipeline.from_pretrained(tmp_path / "whole"))
    assert isinstance(loaded.drafter, ColumnEagleDrafter) and isinstance(loaded.sampler, DraftedColumnSampler)
    assert loaded(PROMPT, generator=seeded(4)).codes.equal(before)
    assert isinstance(load_drafter(tmp_path / "whole" / "drafter"), ColumnEagleDrafter)
    assert settings_of_model(str(tmp_path / "whole")).others[-2:] == (
        "drafted-columns",
        "drafted-columns:acceptance=identical",
    )
    tiny_audio_pipeline().save_pretrained(tmp_path / "plain")
    assert not any("drafted" in row for row in settings_of_model(str(tmp_path / "plain")).others)


def test_a_row_may_name_a_drafter_also_beside_a_masked_model(tmp_path):
    columns = tiny_audio_pipeline()
    masked = tiny_audio_pipeline(MaskedSampler((4, 2, 2)), masked=True, reach=4)
    eagle(columns.transformer).save_pretrained(tmp_path)
    pair = MaskedPair(columns, masked)
    row = parse_setting(f"drafted-columns:num_drafts=2,drafter={tmp_path}", columns.make_law(), 0)
    with row.on(pair):
        assert isinstance(columns.drafter, ColumnEagleDrafter)
        pair(PROMPT, generator=seeded(1))
    assert columns.drafter is None and columns.last_trace.sampler == "DraftedColumnSampler"


def test_a_missing_or_strange_drafter_is_refused():
    pipe = tiny_audio_pipeline(DraftedColumnSampler())
    refuses(ValueError, r"pipe\.drafter.*ColumnEagleDrafter", pipe, PROMPT)
    pipe.drafter = eagle(tiny_decoder(num_hidden_layers=3))
    refuses(ValueError, "num_layers=3.*num_layers=2", pipe, PROMPT)


@pytest.mark.parametrize("channels", [1, 2])
def test_an_accelerated_musicgen_takes_a_drafter(channels):
    model = tiny_musicgen(channels)
    inputs: Any = dict(
        input_ids=IDS, attention_mask=MASK, max_new_tokens=20, do_sample=True, guidance_scale=3.0
    )
    visual_spec.accelerate(model, ColumnJacobiSampler())
    want = model.generate_audio(**inputs, generator=seeded(1, 2, 3))
    sampler = DraftedColumnSampler(acceptance="identical")
    for drafter in (eagle(model), tiny_musicgen(channels)):
        visual_spec.accelerate(model, sampler, drafter=drafter)
        assert model.generate_audio(**inputs, generator=seeded(1, 2, 3)).equal(want)
    assert model.last_trace.tokens_per_call.mean() > 2  # it drafted for itself
    assert model.generate_audio(**inputs, drafter=eagle(model), generator=seeded(1, 2, 3)).equal(want)
    refuses(ValueError, "DraftedColumnSampler.*ColumnEagleDrafter", visual_spec.accelerate, model, sampler)
