"""InfinityPipeline on a tiny model: what reaches the sampler, what comes back, what is kept, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.infinity import PROMPTS, TIGHT, tiny_pipeline
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_infinity import SIDES, tiny_bits, tiny_infinity
from tests.helpers.tiny_scales import tiny_scale_pipeline
from tests.helpers.tiny_t5 import tiny_t5, tiny_tokenizer
from visual_spec.models.next_scale.infinity import InfinityTransformer
from visual_spec.models.next_scale.infinity_scales import scales_for, size_by_name
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.convert import convert
from visual_spec.pipelines.infinity import InfinityPipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import Stage


def by_hand(pipe: InfinityPipeline, condition: Any, laws: list[TokenLaw], seeds: tuple[int, ...]):
    stages = [Stage(pipe.transformer, range(k, k + 1), law) for k, law in enumerate(laws)]
    return ScaleWiseSampler(ramp=False)(
        stages,
        condition,
        tokenizer=pipe.vq_model,
        law=laws[0],
        generator=seeded(*seeds),
        batch_size=len(seeds),
    )


def test_draws_what_the_sampler_draws_from_the_features_of_the_prompts():
    pipe = tiny_pipeline()
    seen = []
    result = pipe(
        PROMPTS,
        num_images_per_prompt=2,
        generator=seeded(1, 2, 3, 4),
        output_type="pt",
        callback_on_step_end=lambda pipe, scale, bits, tensors: seen.append(
            (scale, bits, tensors["canvas"].shape)
        ),
    )
    features = pipe.text_encoder(PROMPTS)
    condition = TextCondition(
        features.features.repeat_interleave(2, 0), features.mask.repeat_interleave(2, 0)
    )
    want = by_hand(pipe, condition, [TokenLaw(4.0, 0.5, top_p=0.97)] * 4, (1, 2, 3, 4))
    assert torch.equal(result.tokens, want.tokens)
    assert torch.equal(result.images, (pipe.vq_model.decode_canvas(want.canvas) + 1) / 2)
    assert [item[:2] for item in seen] == [(0, 3), (1, 15), (2, 42), (3, 90)]
    assert pipe.last_trace is result.trace and result.trace.lossless
    # Features in place of prompts, and words wherever they stand.
    again = pipe(
        prompt_embeds=features.features, prompt_attention_mask=features.mask, num_images_per_prompt=2,
        generator=seeded(1, 2, 3, 4), output_type="latent",
    )  # fmt: skip
    assert torch.equal(again.tokens, result.tokens) and torch.equal(again.images, want.canvas)
    assert pipe("a red circle", generator=seeded(1)[0]).images[0].size == (8, 8)


def test_lists_of_guidance_and_temperature_and_a_negative_prompt():
    pipe = tiny_pipeline()
    cfg, tau = [1.0, 4.0, 2.0, 3.0], [1.0, 0.5, 0.7, 1.2]
    result = pipe(
        PROMPTS, negative_prompt="blue", guidance_scale=cfg, temperature=tau, top_p=0.9, generator=seeded(1, 2),
        output_type="latent",
    )  # fmt: skip
    other = pipe.text_encoder(["blue"])
    condition = pipe.text_encoder(PROMPTS)
    condition.negative = TextCondition(other.features.expand(2, -1, -1), other.mask.expand(2, -1))
    laws = [TokenLaw(s, t, top_p=0.9) for s, t in zip(cfg, tau, strict=True)]
    assert torch.equal(result.tokens, by_hand(pipe, condition, laws, (1, 2)).tokens)
    plain = pipe(
        PROMPTS, guidance_scale=cfg, temperature=tau, top_p=0.9, generator=seeded(1, 2), output_type="latent"
    )
    assert not torch.equal(plain.tokens, result.tokens)


def test_compression_is_kept_and_measured(tmp_path: Path):
    pipe = tiny_pipeline()
    plain = pipe(PROMPTS, generator=seeded(1, 2), output_type="latent")
    full = pipe.compress(ScaleBudget.full(SIDES, 2))(PROMPTS, generator=seeded(1, 2), output_type="latent")
    assert torch.equal(full.tokens, plain.tokens)
    pipe.compress(TIGHT).sampler = ScaleWiseSampler(ramp=False, measure=True)
    tight = pipe(PROMPTS, generator=seeded(1, 2), output_type="latent")
    assert not tight.trace.lossless and (tight.trace.divergence or 0) > 1e-6
    pipe.save_pretrained(tmp_path)
    again = quiet(InfinityPipeline.from_pretrained(tmp_path))
    assert again.budget == TIGHT and again.text_encoder.config["clean"] is False
    assert torch.equal(again(PROMPTS, generator=seeded(1, 2), output_type="latent").tokens, tight.tokens)
    assert torch.equal(
        again.compress()(PROMPTS, generator=seeded(1, 2), output_type="latent").tokens, plain.tokens
    )


def write_files(folder: Path, bits: int = 3, **changes: Any) -> tuple[Path, Path]:
    """A transformer and a tokenizer as the official files have them; `changes` of the tokenizer."""
    tokenizer = tiny_bits(dtype=torch.float32, base_channels=32, norm_groups=32, bits=bits, **changes)
    model = tiny_infinity(dtype=torch.float32, caption_dim=8, num_levels=15, bits=tokenizer.code_dim)
    weights = {}
    for key, value in model.state_dict().items():
        weights[key.replace("blocks.", "block_chunks.0.module.") if key.startswith("blocks.") else key] = (
            value.clone()
        )
    torch.save(weights, folder / "model.pth")
    torch.save({"vae": tokenizer.state_dict()}, folder / "vae.pth")
    return folder / "model.pth", folder / "vae.pth"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_files(tmp_path)


def test_official_files(tmp_path: Path, files: tuple[Path, Path]):
    """Sizes are read off the files; only the schedule is ours: the smallest, of 256 pixels."""
    text = tmp_path / "t5"
    tiny_t5().save_pretrained(text)
    tiny_tokenizer().save_pretrained(text)
    pipe = quiet(InfinityPipeline.from_official(*files, text, size=256, ratio=1.5, dtype=torch.bfloat16))
    assert pipe.transformer.dtype == pipe.vq_model.dtype == pipe.text_encoder.dtype == torch.bfloat16
    assert pipe.transformer.scales == scales_for(256, 1.5) and pipe.image_size == (42, 28)
    assert pipe.text_encoder.max_words == 7
    assert pipe("a red circle", generator=seeded(1)[0]).images[0].size == (28, 42)


@pytest.mark.parametrize(
    "name, size",
    [
        ("infinity_2b_reg.pth", 1024),
        ("infinity_8b_weights", 1024),
        ("infinity_8b_512x512_weights", 512),
        ("infinity_125M_256x256.pth", 256),
        ("model.pth", None),
        ("infinity_2b_512x768.pth", None),  # official sizes are those of squares
        ("infinity_2b_300x300.pth", None),  # no size of Infinity
        ("infinity_2b_256x256_512x512.pth", None),
        ("my_infinity_2b_reg.pth", None),
    ],
)
def test_the_name_of_a_file_tells_the_size_of_its_pictures(name: str, size: int | None):
    assert size_by_name(Path("weights") / name) == size


def test_the_size_is_that_of_the_name_or_asked_for(tmp_path: Path, files: tuple[Path, Path]):
    model, tokenizer = files
    message = r"model\.pth.*image_size.*--image-size.*\[256, 512, 768, 1024\]"
    for given in ([model, tokenizer], [model]):
        refuses(ValueError, message, convert, given, tmp_path / "out")
    refuses(ValueError, message, InfinityPipeline.from_official, model, tokenizer)
    named = model.rename(tmp_path / "infinity_125M_256x256.pth")
    pipe = InfinityPipeline.from_official(named, tokenizer)
    assert pipe.transformer.scales == pipe.vq_model.scales == scales_for(256)
    assert pipe.config["default_guidance_scale"] == 4 and pipe.config["default_temperature"] == 0.5
    convert([named], tmp_path / "one")
    assert InfinityTransformer.from_pretrained(tmp_path / "one").scales == scales_for(256)
    wide = InfinityPipeline.from_official(named, tokenizer, size=512)
    assert wide.transformer.scales == scales_for(512)


def test_the_8b_is_drawn_with_the_guidance_and_temperature_of_its_authors(tmp_path: Path):
    model, tokenizer = write_files(tmp_path, 2, channel_multipliers=(1, 1, 1, 1), patchify=True)
    pipe = InfinityPipeline.from_official(model, tokenizer, size=256)
    assert pipe.vq_model.config["patchify"]
    assert pipe.make_laws() == [TokenLaw(3.0, 1.0, top_p=0.97)] * 7


def test_official_files_become_a_folder(tmp_path: Path, files: tuple[Path, Path]):
    model, tokenizer = files
    facts = convert([tokenizer, model], tmp_path / "out", image_size=256)
    assert facts["class"] == "InfinityPipeline"
    assert facts["files"] == {str(model): "Infinity", str(tokenizer): "Infinity's tokenizer"}
    generator = torch.Generator().manual_seed(3)
    embeds = torch.randn(1, 4, 8, generator=generator)
    found = load_pipeline(tmp_path / "out")
    want = InfinityPipeline.from_official(model, tokenizer, size=256)
    for pipe in (found, want):
        pipe.set_progress_bar_config(disable=True)
    settings: Any = dict(prompt_embeds=embeds, output_type="latent")
    tokens = [pipe(generator=seeded(1), **settings).tokens for pipe in (found, want)]
    assert torch.equal(*tokens)
    assert convert([model], tmp_path / "one", image_size=256)["class"] == "InfinityTransformer"
    assert convert([tokenizer], tmp_path / "two", image_size=512)["class"] == "BitwiseVQModel"
    copy = tmp_path / "copy.pth"
    copy.write_bytes(model.read_bytes())
    torch.save(tiny_scale_pipeline().vq_model.state_dict(), tmp_path / "var.pth")
    for given, message in [
        ([model, copy], r"model\.pth.*copy\.pth"),
        ([model, tmp_path / "var.pth"], r"model\.pth.*VAR"),
    ]:
        refuses(ValueError, message, convert, given, tmp_path / "three")
    with pytest.raises(ValueError, match=r"text_encoder=t5.*model\.pth, Infinity"):
        convert([model], tmp_path / "three", text_encoder="t5")
    refuses(ValueError, "size=300.*Infinity", convert, [model], tmp_path / "three", image_size=300)
    assert not (tmp_path / "three").exists()


def test_what_cannot_be_drawn_is_refused():
    pipe = tiny_pipeline()
    refuses(ValueError, "3.*guidance_scale.*4", pipe, "a", guidance_scale=[1.0, 2.0, 3.0])
    refuses(ValueError, r"\(1, 2, 6\).*\[1, words, 8\]", pipe, prompt_embeds=torch.zeros(1, 2, 6))
    refuses(ValueError, r"budget.*\(1, 2\)", tiny_pipeline, budget=ScaleBudget.full((1, 2), 2))
    with pytest.raises(ValueError, match="3 bits.*4"):
        InfinityPipeline(tiny_infinity(), tiny_bits(bits=4), None, ScaleWiseSampler())
