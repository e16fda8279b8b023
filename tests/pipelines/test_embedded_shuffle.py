"""The embedded `shapes_shuffle`: 64 calls a picture, fewer by Jacobi with the same tokens; what its folder holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.helpers.tiny import quiet, seeded
from visual_spec.data import shapes, shapes_parser
from visual_spec.pipelines.embedded import embedded_folder
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.orders.ordered import OrderedSampler

NAME, PROMPTS = "shapes_shuffle", shapes.held_out_prompts(4, seed=17)


def load() -> Any:
    return quiet(load_pipeline(NAME))


def test_it_draws_its_prompts_and_jacobi_keeps_the_tokens():
    pipe, lengths = load(), []
    fast = pipe(
        PROMPTS,
        generator=seeded(*range(4)),
        callback_on_step_end=lambda _, __, length, ___: lengths.append(length),
    )
    pipe.sampler = OrderedSampler()
    plain = pipe(PROMPTS, generator=seeded(*range(4)))
    assert (plain.trace.target_calls == 64).all() and torch.equal(fast.tokens, plain.tokens)
    assert fast.trace.identical and fast.trace.tokens_per_call.mean() > 8
    assert lengths[0] == 4 and lengths[-1] == 256
    samples = [np.asarray(image) for image in plain.images]

    def right(texts: list[str]) -> float:
        hits = [shapes_parser.score(text, sample) for text, sample in zip(texts, samples, strict=True)]
        return float(np.mean([np.mean(list(hit.values())) for hit in hits]))

    assert right(PROMPTS) > 0.8 and right(PROMPTS) > right(PROMPTS[1:] + PROMPTS[:1]) + 0.1


def test_what_is_saved_of_it_is_whole(tmp_path):
    pipe = load()
    pipe.save_pretrained(tmp_path / "saved")
    own, saved = (
        sum(path.stat().st_size for path in (folder / "transformer").glob("*.safetensors"))
        for folder in (embedded_folder(NAME), tmp_path / "saved")
    )
    assert own < 0.9e6 < saved and not (tmp_path / "saved" / "transformer" / "adapter.json").exists()
    again = quiet(load_pipeline(tmp_path / "saved"))
    one, other = (one.transformer.state_dict() for one in (pipe, again))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
