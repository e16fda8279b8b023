"""What holds for the embedded models beside `shapes`: what they share, how small they are, what their prompts get."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from benchmarks.control_pictures import edges, share
from benchmarks.motion_long import consistency
from scripts import assemble
from tests.helpers.command import last_line
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_scales import tiny_scale_pipeline, tiny_var
from visual_spec import cli
from visual_spec.data import (
    motion,
    motion_parser,
    shapes,
    shapes_parser,
    things,
    things_parser,
    tunes,
    tunes_parser,
)
from visual_spec.data.shapes_classes import CLASS_NAMES, score_class
from visual_spec.pipelines.embedded import describe, embedded_folder, embedded_models, shared_parts
from visual_spec.pipelines.loading import load_drafter, load_pipeline, load_refiner
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.pipelines.video_files import pixels_of
from visual_spec.samplers.masked.frames import FrameMaskedSampler
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

READERS = {"vq_model": "shapes", "text_encoder": "shapes"}
# Its class, the calls it answers, the bytes of its own weights at most, and the parts in folders of others.
MODELS: dict[str, tuple[str, str, float, dict[str, str]]] = {
    "things": ("ImagePipeline", "raster, tree, order, own order", 5.2e6, {}),
    "shapes_nar": ("ImagePipeline", "own order", 4e6, READERS),
    "shapes_any": ("ImagePipeline", "any-order", 3.2e6, READERS),
    "shapes_shuffle": ("ImagePipeline", "own order, blocks", 0.9e6, READERS),  # its changes to `shapes`
    "shapes_control": ("ImagePipeline", "raster, tree, order, own order", 1e6, READERS),  # its changes to `shapes`
    "shapes_flexvar": ("ScaleImagePipeline", "scales", 0.8e6, {"vq_model": "shapes"}),
    "shapes_masked": ("MaskedImagePipeline", "masked", 7.7e6, READERS),
    "motion_masked": ("VideoPipeline", "frames", 1.4e6, {"vq_model": "shapes"}),
    "motion_causal": ("ChunkVideoPipeline", "chunks", 1.5 * 2**20, {}),
    "tunes_masked": ("AudioPipeline", "masked", 4e6, {"codec": "tunes", "text_encoder": "tunes"}),
}  # fmt: skip
# Prompts, what the parser finds of a prompt in a sample, calls of a sample, and the share of attributes at least: as in
# docs/results/models.md, with room for few samples and another processor's rounding.
DRAWN: dict[str, tuple[list[str], Any, int, float]] = {
    "shapes_nar": (shapes.held_out_prompts(8, seed=17), shapes_parser.score, 31, 0.6),
    "shapes_any": (shapes.held_out_prompts(4, seed=17), shapes_parser.score, 20, 0.7),
    "shapes_masked": (shapes.held_out_prompts(4, seed=17), shapes_parser.score, 16, 0.7),
    "motion_masked": (motion.held_out_prompts(8, seed=2), motion_parser.score, 16 * 4 + 15, 0.55),
    "tunes_masked": (tunes.held_out_prompts(4, seed=17), tunes_parser.score, 20 + 10 + 10 + 10, 0.65),
}
LONG = ("motion_masked", "shapes_any")  # 20 seconds and more


SHAPES = shapes.held_out_prompts(4, seed=17)


def load(name: str) -> Any:
    return quiet(load_pipeline(name))


def right(prompts: list[str], samples: Any, score: Any = shapes_parser.score) -> float:
    """The share of what prompts ask for that a parser finds in samples."""
    hits = [score(prompt, np.asarray(sample)) for prompt, sample in zip(prompts, samples, strict=True)]
    return float(np.mean([np.mean(list(hit.values())) for hit in hits]))


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
    own, others = (right(texts, samples, score) for texts in (prompts, prompts[1:] + prompts[:1]))
    assert own > least and own > others + 0.1
    alone = pipe(prompts[3], generator=seeded(3))
    tokens, single = (out.codes if hasattr(out, "codes") else out.tokens for out in (found, alone))
    # Over a clip's frames, products of other widths round differently, and a near-tie may flip.
    assert (single[0] == tokens[3]).float().mean() >= (0.9 if pipe.medium == "video" else 1)


def test_jacobi_keeps_the_tokens_of_blocks():
    pipe, lengths = load("shapes_shuffle"), []
    fast = pipe(
        SHAPES,
        generator=seeded(*range(4)),
        callback_on_step_end=lambda _, __, length, ___: lengths.append(length),
    )
    pipe.sampler = OrderedSampler()
    plain = pipe(SHAPES, generator=seeded(*range(4)))
    assert (plain.trace.target_calls == 64).all() and torch.equal(fast.tokens, plain.tokens)
    assert fast.trace.identical and fast.trace.tokens_per_call.mean() > 8
    assert lengths[0] == 4 and lengths[-1] == 256
    own, others = (right(texts, plain.images) for texts in (SHAPES, SHAPES[1:] + SHAPES[:1]))
    assert own > 0.8 and own > others + 0.1


def test_it_draws_along_outlines(tmp_path):
    """Of the outline of a scene most has an edge of the picture beside it, of another scene's little."""
    pipe = load("shapes_control")
    scenes, pictures = shapes.sample_dataset(4, 5, held_out=True)
    prompts = [shapes.caption(scene) for scene in scenes]
    lines = [shapes.outline(scene) for scene in scenes]
    control = [Image.fromarray(line).convert("RGB") for line in lines]

    def met(images: Any, lines: Any) -> float:
        """The share of outlines that edges of the pictures meet."""
        pairs = zip(images, lines, strict=True)
        return float(np.mean([share(line, edges(np.asarray(image))) for image, line in pairs]))

    out = pipe(prompts, control=control, generator=seeded(*range(4)))
    assert met(pictures, lines) > 0.95 and met(out.images, lines) > 0.7
    assert met(out.images, lines[1:] + lines[:1]) < 0.5 and right(prompts, out.images) > 0.8
    assert out.trace.identical and out.trace.tokens_per_call.mean() > 1.5
    control[0].save(tmp_path / "outline.png")
    told = f"--model shapes_control --seed 0 --control {tmp_path / 'outline.png'} --out {tmp_path / 'out'}"
    assert cli.main(["generate", prompts[0], *told.split()]) == 0
    (drawn,) = (tmp_path / "out").glob("0*.png")
    assert np.array_equal(np.asarray(Image.open(drawn)), np.asarray(out.images[0]))


@pytest.mark.parametrize(("name", "most"), [("shapes_shuffle", 0.9e6), ("shapes_control", 1e6)])
def test_what_is_saved_of_changes_is_whole(tmp_path, name, most):
    pipe = load(name)
    pipe.save_pretrained(tmp_path / "saved")
    own, saved = (
        sum(path.stat().st_size for path in (folder / "transformer").glob("*.safetensors"))
        for folder in (embedded_folder(name), tmp_path / "saved")
    )
    assert own < most < saved and not (tmp_path / "saved" / "transformer" / "adapter.json").exists()
    again = quiet(load_pipeline(tmp_path / "saved"))
    one, other = (one.transformer.state_dict() for one in (pipe, again))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_reuse_stays_near_the_model():
    pipe, prompts = load("shapes_masked"), shapes.held_out_prompts(2, seed=18)
    settings = dict(pipe.sampler.config, steps=16, measure=True)
    moved = []
    for reuse in (0, 1):
        pipe.sampler = MaskedSampler.from_config(settings, reuse=reuse)
        trace = pipe(prompts, generator=seeded(0, 1), output_type="latent").trace
        moved.append(trace.divergence)
        assert not reuse or trace.whole_calls < 16
    assert moved[0] > 0 and moved[1] < 3 * moved[0]


def test_things_are_drawn_as_asked_and_as_by_plain_decoding():
    pipe, prompts = load("things"), things.held_out_prompts(16, seed=17)
    fast = pipe(prompts, generator=seeded(*range(16)))
    assert right(prompts, fast.images, things_parser.score) > 0.8
    assert right(prompts[1:] + prompts[:1], fast.images, things_parser.score) < 0.6
    pipe.sampler = AutoregressiveSampler()
    plain = pipe(prompts, generator=seeded(*range(16)))
    assert torch.equal(fast.tokens, plain.tokens)
    assert (plain.trace.target_calls == 256).all() and fast.trace.target_calls.float().mean() < 128


def drawn_by(pipe: Any, prompts: list[str], sampler: Any) -> Any:
    pipe.sampler = sampler
    return pipe(prompts, generator=seeded(0), output_type="latent")


@pytest.mark.slow
def test_its_pictures_draft_for_shapes_which_keeps_its_tokens():
    pipe, prompts = load("shapes"), shapes.held_out_prompts(1, seed=19)
    plain = drawn_by(pipe, prompts, AutoregressiveSampler())
    repaired = drawn_by(pipe, prompts, SpeculativeJacobiSampler(64))
    pipe.drafter = load_drafter("shapes_nar")
    fast = drawn_by(pipe, prompts, SpeculativeJacobiSampler(64, drafts="pictured"))
    assert torch.equal(fast.tokens, plain.tokens)
    assert fast.trace.target_calls.sum() < repaired.trace.target_calls.sum()


def test_the_first_frames_are_drawn_alone():
    pipe, prompts = load("motion_masked"), motion.held_out_prompts(2, seed=5)
    pipe.sampler = FrameMaskedSampler(2, 0.3)
    found = pipe(prompts, num_frames=3, generator=seeded(0, 1), output_type="latent")
    alone = pipe(prompts[1], num_frames=3, generator=seeded(1), output_type="latent")
    assert (found.trace.target_calls == 8).all()
    same = (found.tokens[1] == alone.tokens[0]).float().mean()
    assert same > 0.95  # products of other widths round differently, and a near-tie may flip


def test_objects_are_kept_for_the_training_length():
    """As recorded in docs/results/models.md, with room for another processor's rounding."""
    moving = [
        text
        for text in motion.held_out_prompts(200, 3)
        if "bounces" in text and "plain" in text and "past" not in text
    ]
    pipe, prompts = load("motion_causal"), moving[:12]
    drawn = pipe(prompts, generator=seeded(*range(12)))
    read = [consistency(text, pixels_of(clip)) for text, clip in zip(prompts, drawn.frames, strict=True)]
    for name, least in (
        ("background", 0.9),
        ("kept", 0.8),
        ("colour", 0.8),
        ("continuous", 0.8),
        ("shape", 0.5),
    ):
        assert np.mean([one[name].mean() for one in read]) > least, name


def test_two_models_of_clips_go_on_as_they_were_trained():
    records = {}
    for name in ("motion_causal", "motion_masked"):
        folder = embedded_folder(name)
        assert describe(folder)["image_size"] == 64
        records[name] = json.loads((folder / "transformer" / "training.json").read_text())["settings"]
    causal, masked = records.values()
    assert load("motion_causal").training_frames == causal["chunk"] * causal["chunks"]
    assert load("motion_masked").sampler.config.history_hidden == masked["least_hidden"]


SCENE, CLIP = "a large red circle on a plain sky background", motion.held_out_prompts(1, seed=3)[0]
# What a command is told, the sampler that it draws with, and the calls of a sample.
COMMANDS: list[Any] = [
    pytest.param(SCENE, "--model shapes_nar", "ordered", 31, id="nar", marks=pytest.mark.slow),
    pytest.param(
        CLIP, "--model motion_masked --format gif --frames 2 --device cpu", "frame-masked", 9, id="masked"
    ),
]


@pytest.mark.parametrize(("prompt", "told", "sampler", "calls"), COMMANDS)
def test_the_command_line_draws(prompt, told, sampler, calls, tmp_path, capsys):
    assert cli.main(["generate", prompt, *told.split(), "--out", str(tmp_path), "--json"]) == 0
    document = last_line(capsys)
    (drawn,) = document["images" if prompt == SCENE else "videos"]
    assert document["sampler"]["name"] == sampler and drawn["calls"] == calls


def assembled(tmp_path, monkeypatch, *arguments: str) -> Path:
    """Run the script on tiny models of as many classes as the data has, with training records."""
    source = tiny_scale_pipeline(num_classes=48)
    parts = {
        "tokenizer": source.vq_model,
        "large": source.transformer,
        "small": source.refiner,
        "tuned": tiny_var(9, torch.float32, num_layers=1, num_classes=48),
    }
    for name, part in parts.items():
        part.save_pretrained(tmp_path / name)
        (tmp_path / name / "training.json").write_text(json.dumps({"part": name}))
    out = tmp_path / "out" / "shapes_var"
    monkeypatch.chdir(tmp_path)
    given = ["shapes_var", "vq_model=tokenizer", "transformer=large", *arguments]
    monkeypatch.setattr(sys, "argv", ["assemble.py", *given, "--out", str(out)])
    assemble.main()
    return out


def test_parts_become_a_folder(tmp_path, monkeypatch):
    more = [
        "refiner=small",
        "--set",
        "num_draft_scales=3",
        "default_guidance_scale=1.5",
        "refiner_guidance_scale=1.0",
    ]
    out = assembled(tmp_path, monkeypatch, *more)
    monkeypatch.setattr(
        sys, "argv", ["assemble.py", "shapes_var_refiner", "transformer=tuned", "--out", f"{out}_refiner"]
    )
    assemble.main()
    facts = describe(out)
    assert facts["image_size"] == 8 and set(facts["parameters"]) == {"transformer", "vq_model", "refiner"}
    assert facts["bytes"] < 2.5 * sum(facts["parameters"].values()) + 20_000  # half precision
    for part, source in {"transformer": "large", "vq_model": "tokenizer", "refiner": "small"}.items():
        assert json.loads((out / part / "training.json").read_text()) == {"part": source}
        assert "_name_or_path" not in json.loads((out / part / "config.json").read_text())
    for part, source in {"transformer": "large", "refiner": "small"}.items():
        stored = load_file(next((out / part).glob("*.safetensors")))
        for key, value in load_file(next((tmp_path / source).glob("*.safetensors"))).items():
            kind = (
                torch.float8_e4m3fn
                if key.startswith(("blocks.", "head_nm.")) and value.ndim == 2
                else torch.float16
            )
            assert stored[key].dtype == kind and torch.equal(
                stored[key].float(), value.half().to(kind).float()
            )
    pipe: Any = ScaleImagePipeline.from_pretrained(out)
    assert pipe.dtype == torch.float32 and pipe.label_ids("red circle") == [0] == pipe.label_ids("0")
    law = pipe.make_law()
    assert (law.guidance_scale, law.top_k, law.top_p) == (1.5, 0, 1.0) and pipe.sampler.config[
        "num_draft_scales"
    ] == 3
    assert pipe.refiner_law(law).guidance_scale == 1.0
    assert pipe([CLASS_NAMES[47], 3], generator=seeded(1, 2)).trace.model_calls == (3, 1)
    tuned = load_refiner(out.with_name("shapes_var_refiner"))
    want = tiny_var(9, torch.float32, num_layers=1, num_classes=48)
    assert torch.equal(tuned.head.weight, want.head.weight.half().float())
    assert str(tmp_path) not in "".join(path.read_text() for path in out.parent.rglob("*.json"))


def test_a_model_without_a_refiner(tmp_path, monkeypatch):
    out = assembled(tmp_path, monkeypatch)
    pipe: Any = ScaleImagePipeline.from_pretrained(out)
    assert pipe.refiner is None and pipe(5, generator=seeded(1)).trace.model_calls == (4,)
    assert not out.with_name("shapes_var_refiner").exists()


@pytest.mark.slow
def test_the_embedded_model_draws_the_classes_it_is_asked_for():
    pipe: Any = quiet(ScaleImagePipeline.from_pretrained("shapes_var"))
    assert pipe.config["id2label"] == list(CLASS_NAMES) and pipe.image_size == (128, 128)
    assert describe(embedded_folder("shapes_var"))["image_size"] == 128
    names = list(CLASS_NAMES[::4])

    def share_right(**settings: Any) -> float:
        images = pipe(names, generator=seeded(*range(len(names))), **settings).images
        scores = [score_class(name, image).values() for name, image in zip(names, images, strict=True)]
        return float(np.mean(list(map(all, scores))))

    # 78 % of 960 pictures by the large model alone, 76 % with the last scale by the small one.
    assert share_right(num_draft_scales=len(pipe.vq_model.scales)) >= 0.75
    assert share_right(num_draft_scales=7) >= 0.6
    assert pipe.refiner_law(pipe.make_law()).guidance_scale == 1 < pipe.make_law().guidance_scale
    red, number = pipe("red circle", generator=seeded(1)), pipe(0, generator=seeded(1))
    assert red.tokens.equal(number.tokens)


def test_the_embedded_flexvar_draws_classes_in_ten_scales_and_in_five():
    pipe: Any = quiet(load_pipeline("shapes_flexvar"))
    labels = list(range(0, 48, 4))
    for scales, calls in ((None, 10), ([1, 2, 4, 8, 16], 5)):
        pipe.sampler = type(pipe.sampler)(scales=scales)
        drawn = pipe(labels, generator=seeded(*range(len(labels))))
        assert drawn.trace.model_calls == (calls,) and drawn.images[0].size == (128, 128)
        scores = [
            score_class(CLASS_NAMES[label], image) for label, image in zip(labels, drawn.images, strict=True)
        ]
        assert np.mean([all(score.values()) for score in scores]) >= 0.5
