"""BitDance of classes: files of the official layout draw what its public code draws, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import bitdance as shapes
from tests.helpers.bitdance import number
from tests.helpers.command import last_line
from tests.helpers.mar import random_weights
from tests.helpers.recordings import repeated
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from visual_spec import cli
from visual_spec.models.continuous.binary_autoencoder import BinaryAutoencoder, load_binary_autoencoder
from visual_spec.models.continuous.bitdance import BitDanceTransformer, load_bitdance
from visual_spec.models.continuous.bitdance_head import EulerMaruyamaSchedule
from visual_spec.pipelines.continuous_image import ContinuousImagePipeline
from visual_spec.pipelines.decoders import KLDecoder
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.samplers.continuous import continuous
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.core.law import TokenLaw

# What `sample` of shallowdream204/BitDance (imagenet_gen) draws for classes 3 and 5 from `random_weights`, with the
# noise of samples of the seeds 1 and 2 in place of its own: the signs of [4, side, side], highest bit first.
# (tokens of a call, side, steps with noise, guidance): pictures
DRAWN = {
    (1, 4, 6, 1.0): (0x0E00000000FFFF, 0x600100007FFFCFFF),
    (1, 4, 6, 3.0): (0x201070003FFFFFF, 0x554C00157DFDD77D),
    (1, 4, 12, 3.0): (0x45000020002FFFF, 0x89002AFFBBFFEB),
    (4, 4, 6, 1.0): (0xC0000000FDF7FFFF, 0x40000000FBFFFFFF),
    (4, 4, 6, 3.0): (0xC0020000FDE7FFFF, 0x40000000FAFFFFFF),
    (16, 8, 6, 1.0): (
        0x8A340B6841614B78B00890050442B487E74FFFCFFFFFFFFF186681EEE060F0A0,
        0x803000E0100587692000D884010000127F0FDFCEFFFFFFFF906080D200000000,
    ),
    (16, 8, 6, 3.0): (
        0x89340A684FD74961B4089000060D060FE74FFFC9FFFB9F3F186783EE847DF080,
        0x80300CE00DA52D692008DA87F05AD2877F0FDFCEFFFFFFFF906281D600024006,
    ),
}


def network(tokens: int, side: int = 4) -> BitDanceTransformer:
    return load_bitdance(random_weights(shapes.transformer_shapes(tokens, side)))


def drawn(model: BitDanceTransformer, sampler: Any, guidance: float = 3.0) -> Any:
    labels = torch.tensor([3, 5])
    return sampler(model, labels, batch_size=2, law=TokenLaw(guidance_scale=guidance), generator=seeded(1, 2))


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_bits_are_those_of_the_public_code(case):
    tokens, side, steps, guidance = case
    model = network(tokens, side)
    result = drawn(model, ContinuousSampler(head_steps=steps + 1), guidance)
    canvas = KLDecoder(None, model).canvas(result.tokens, model.grid.height)
    assert tuple(number(picture) for picture in canvas) == DRAWN[case]
    assert (result.trace.target_calls == side * side // tokens).all()
    first = (steps + 1) * (guidance > 1)  # of the unconditional rows
    assert (result.trace.head_calls == (steps + 1) * (side * side // tokens) + first).all()


def test_unconditional_rows_draw_a_first_slot_of_their_own_where_guidance_starts_at_one():
    """The same one under samplers that draft, whose law is then plain decoding's."""
    model, held = network(4), []
    begin = model.prefill
    model.prefill = lambda *given, **named: held.append(begin(*given, **named)) or held[-1]
    plain = drawn(model, ContinuousSampler(head_steps=7, final_noise=0.1))
    drafted = drawn(model, make_sampler("continuous-jacobi", head_steps=7, final_noise=0.1))
    drawn(model, ContinuousSampler(head_steps=7, guidance="constant"))
    assert held[0].first.equal(held[1].first) and held[0].first.shape == (2, 16) and held[2].first is None
    assert drafted.tokens[:, 0].equal(plain.tokens[:, 0]) and drafted.trace.keeps == "lossless"
    again = BitDanceTransformer.forward(model, held[0], plain.tokens[:, :1], torch.zeros(2, 1).long())
    held[0].first = None
    shared = BitDanceTransformer.forward(model, held[0], plain.tokens[:, :1], torch.zeros(2, 1).long())
    assert again[:2].equal(shared[:2]) and not again[2:].allclose(shared[2:])


@pytest.fixture
def recordings(monkeypatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(continuous, "wants_graph", lambda choice, model: choice is not False)
    yield from repeated(monkeypatch)


def test_recorded_calls_draw_the_same(recordings):
    """A second decode has a first slot of its own in its unconditional rows."""
    model = network(4)
    for seeds in ((1, 2), (4, 9)):
        both = (
            ContinuousSampler(head_steps=7, graph=recorded)(
                model,
                torch.tensor([3, 5]),
                batch_size=2,
                law=TokenLaw(guidance_scale=3.0),
                generator=seeded(*seeds),
            )
            for recorded in (True, False)
        )
        torch.testing.assert_close(*(result.tokens for result in both))
    assert len(recordings) == 1


def test_a_shift_moves_the_shares_towards_noise():
    plain, shifted = EulerMaruyamaSchedule(11), EulerMaruyamaSchedule(11, shift=3.0)
    inner = plain.times[1:] / 1000
    torch.testing.assert_close(shifted.times[1:] / 1000, inner / (inner + 3.0 * (1 - inner)))
    assert plain.times[0] == shifted.times[0] == 950


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_steps": 1}, "head_steps=1"),
        ({"eta": 0.5}, "eta=0.5.*leave it out"),
        ({"steps": 4}, "steps=4.*causal"),
        ({"order": "random"}, "one order only"),
    ],
)
def test_settings_of_other_models_are_refused(settings, message):
    refuses(ValueError, message, drawn, network(1), ContinuousSampler(**settings))


def test_files_that_make_no_model_are_refused():
    weights = random_weights(shapes.transformer_shapes(4))
    with pytest.raises(ValueError, match="16 tokens and 2 queries"):
        load_bitdance(weights | {"query_token": weights["query_token"][:, :2]})
    with pytest.raises(ValueError, match="1 missing: layers.1.feed_forward.w2.weight"):
        load_bitdance({k: v for k, v in weights.items() if k != "layers.1.feed_forward.w2.weight"})
    with pytest.raises(ValueError, match=r"no BitDance transformer.*cls_embedding\.weight"):
        load_bitdance({"pos_for_diff.weight": torch.zeros(16, 64)})
    with pytest.raises(ValueError, match=r"no tokenizer of BitDance.*decoder\.adaptive"):
        load_binary_autoencoder({"encoder.conv_in.weight": torch.zeros(8, 3, 3, 3)})
    with pytest.raises(ValueError, match="3 layers cannot modulate 4 blocks"):
        BitDanceTransformer(dim=64, num_layers=1, head_width=64, head_depth=4, head_modulated=3)
    with pytest.raises(ValueError, match="grid_size=4, patch=3"):
        BitDanceTransformer(grid_size=4, patch=3, dim=64, num_layers=1, head_width=64)


# -- the tokenizer -----------------------------------------------------------------------------------------------------

# The signs, and some pixels, that the tokenizer of the public code gives likewise.
ENCODED = 0x2F6000088EB7F2F
PIXELS = [[-0.0476, 1.1049, 0.4340], [0.0100, -0.0175, 0.0212], [-1.9923, -2.4316, -1.9335]]


@torch.no_grad()
def test_the_tokenizer_computes_what_the_public_code_does():
    model = load_binary_autoencoder(random_weights(shapes.tokenizer_shapes()))
    generator = torch.Generator().manual_seed(1)
    picture = torch.rand(1, 3, 8, 8, generator=generator) * 2 - 1
    latents = torch.randn(1, 4, 4, 4, generator=generator)
    encoded: Any = model.encode(picture)
    assert number(encoded.latent_dist.mode()) == ENCODED
    pixels = model.decode(latents).sample
    torch.testing.assert_close(pixels[0, :, 0, :3], torch.tensor(PIXELS), atol=1e-4, rtol=0)
    assert pixels.std() == pytest.approx(1.6031, abs=1e-3)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    """What the training script writes: weights and their average, with the tokenizer's in both, and the optimiser."""
    weights, tokenizer = (
        random_weights(shapes.transformer_shapes(4)),
        random_weights(shapes.tokenizer_shapes()),
    )
    held = weights | {f"vae.{key}": value for key, value in tokenizer.items()}
    other = {key: value + 1 for key, value in held.items()}
    torch.save({"model": other, "ema": held, "optimizer": {}, "epochs": 3}, tmp_path / "BitDance_B_4x.pt")
    torch.save({"state_dict": tokenizer | {"loss.w": torch.zeros(1)}}, tmp_path / "ae_d16c32.pt")
    return tmp_path / "BitDance_B_4x.pt", tmp_path / "ae_d16c32.pt"


def test_files_become_a_pipeline_that_draws_and_is_saved(files, tmp_path, capsys):
    direct: Any = quiet(ContinuousImagePipeline.from_official(*files))
    assert type(direct.vae) is BinaryAutoencoder and direct.transformer.config.patch == 2
    direct.sampler = ContinuousSampler(head_steps=7)
    wanted: Any = direct([3, 5], guidance_scale=3.0, generator=seeded(1, 2), output_type="latent")
    assert tuple(map(number, wanted.images)) == DRAWN[4, 4, 6, 3.0]
    picture = direct([3, 5], guidance_scale=3.0, generator=seeded(1, 2), output_type="pt").images
    assert picture.shape == (2, 3, 8, 8)  # two pixels a token of this tokenizer
    signs = wanted.images.sign()
    torch.testing.assert_close(picture, (direct.vae.decode(signs).sample / 2 + 0.5).clamp(0, 1))
    direct.save_pretrained(tmp_path / "saved")
    assert cli.main(["convert", *map(str, files), "--out", str(tmp_path / "out")]) == 0
    for folder in ("saved", "out"):
        again: Any = quiet(load_pipeline(tmp_path / folder))
        again.sampler = direct.sampler
        same = again([3, 5], guidance_scale=3.0, generator=seeded(1, 2), output_type="latent")
        assert same.tokens.equal(wanted.tokens)
    capsys.readouterr()
    command = ["generate", "3", "--model", str(tmp_path / "out"), "--sampler", "continuous:head_steps=3"]
    assert cli.main([*command, "--out", str(tmp_path / "drawn"), "--json"]) == 0
    assert last_line(capsys)["images"][0]["calls"] == 4
    assert len(list((tmp_path / "drawn").glob("*.png"))) == 1


def test_tokenizers_of_others_are_refused(files):
    weights = random_weights(shapes.tokenizer_shapes(bits=8))
    with pytest.raises(ValueError, match="tokens of 4 numbers.*decodes 8"):
        ContinuousImagePipeline.from_official(files[0], weights)
