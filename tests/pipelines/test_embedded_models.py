"""What holds for the embedded models beside `shapes`: what they share, how small they are, what their prompts get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.tiny import quiet, seeded
from visual_spec.data import motion, motion_parser, shapes, shapes_parser, tunes, tunes_parser
from visual_spec.pipelines.embedded import describe, embedded_folder, embedded_models, shared_parts
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.video_files import pixels_of

READERS = {"vq_model": "shapes", "text_encoder": "shapes"}
# Its class, the calls it answers, the bytes of its own weights at most, and the parts in folders of others.
MODELS: dict[str, tuple[str, str, float, dict[str, str]]] = {
    "shapes_nar": ("ImagePipeline", "own order", 4e6, READERS),
    "shapes_any": ("ImagePipeline", "any-order", 3.2e6, READERS),
    "shapes_shuffle": ("ImagePipeline", "own order, blocks", 0.9e6, READERS),  # its changes to `shapes`
    "shapes_flexvar": ("ScaleImagePipeline", "scales", 0.8e6, {"vq_model": "shapes"}),
    "shapes_masked": ("MaskedImagePipeline", "masked", 7.7e6, READERS),
    "shapes_distilled": (
        "DistilledTextImagePipeline", "distilled", 3.4e6, {**READERS, "teacher": "shapes/transformer"},
    ),
    "motion_nar": ("VideoPipeline", "own order", 3.6e6, {"vq_model": "shapes", "text_encoder": "motion"}),
    "motion_masked": ("VideoPipeline", "frames", 1.4e6, {"vq_model": "shapes"}),
    "motion_causal": ("ChunkVideoPipeline", "chunks", 1.5 * 2**20, {}),
    "tunes_masked": ("AudioPipeline", "masked", 4e6, {"codec": "tunes", "text_encoder": "tunes"}),
}  # fmt: skip
# Prompts, what the parser finds of a prompt in a sample, calls of a sample, and the share of attributes at least: as in
# docs/RESULTS.md, with room for few samples and another processor's rounding.
DRAWN: dict[str, tuple[list[str], Any, int, float]] = {
    "shapes_nar": (shapes.held_out_prompts(8, seed=17), shapes_parser.score, 31, 0.6),
    "shapes_any": (shapes.held_out_prompts(4, seed=17), shapes_parser.score, 64, 0.65),
    "shapes_masked": (shapes.held_out_prompts(4, seed=17), shapes_parser.score, 16, 0.7),
    "motion_nar": (motion.held_out_prompts(4, seed=2), motion_parser.score, 30, 0.5),
    "motion_masked": (motion.held_out_prompts(8, seed=2), motion_parser.score, 16 * 4 + 15, 0.55),
    "tunes_masked": (tunes.held_out_prompts(4, seed=17), tunes_parser.score, 20 + 10 + 10 + 10, 0.65),
}
LONG = ("motion_nar", "motion_masked", "shapes_any")  # 20 seconds and more


def load(name: str) -> Any:
    return quiet(load_pipeline(name))


@pytest.mark.parametrize("name", MODELS)
def test_it_is_small_computes_in_float32_and_shares_what_it_can(name):
    kind, calls, most, shared = MODELS[name]
    folder, pipe = embedded_folder(name), load(name)
    assert name in embedded_models() and type(pipe).__name__ == kind and pipe.dtype == torch.float32
    assert (
        pipe.facts.calls == describe(folder)["calls"] == tuple(calls.split(", "))
        and shared_parts(folder) == shared
    )
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < most
    for part, owner in shared.items():
        other, _, owned = owner.partition("/")
        one, two = (getattr(*pair).state_dict() for pair in ((pipe, part), (load(other), owned or part)))
        assert all(torch.equal(one[key], two[key]) for key in one | two)
    if name.startswith("motion"):
        stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        assert {value.dtype for value in stored.values() if value.ndim == 2} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in DRAWN])
def test_it_draws_its_prompts_in_few_calls(name):
    (prompts, score, calls, least), pipe = DRAWN[name], load(name)
    found = pipe(prompts, generator=seeded(*range(len(prompts))))
    assert (found.trace.target_calls == calls).all()
    shown = next(iter(found.values()))
    samples = [pixels_of(one) if pipe.medium == "video" else np.squeeze(np.asarray(one)) for one in shown]

    def right(texts: list[str]) -> float:
        hits = [score(text, sample) for text, sample in zip(texts, samples, strict=True)]
        return float(np.mean([np.mean(list(hit.values())) for hit in hits]))

    assert right(prompts) > least and right(prompts) > right(prompts[1:] + prompts[:1]) + 0.1
    alone = pipe(prompts[3], generator=seeded(3))
    tokens, single = (out.codes if hasattr(out, "codes") else out.tokens for out in (found, alone))
    # Over a clip's frames, products of other widths round differently, and a near-tie may flip.
    assert (single[0] == tokens[3]).float().mean() >= (0.9 if pipe.medium == "video" else 1)
