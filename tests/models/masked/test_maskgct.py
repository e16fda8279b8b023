"""MaskGCT: official layouts and decoding, against straight-line computations of single samples with the same noise."""

from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers.maskgct import FRAME, STRIDES, decoder_shapes, random_codes, write_codecs
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.models.masked import maskgct_straight as straight
from tests.models.masked.maskgct_straight import BOOKS, CODES, DIM, HEADS, PHONES, SEMANTIC
from visual_spec.models.masked.maskgct import (
    AcousticCondition,
    AcousticDecoder,
    AcousticNetwork,
    SemanticCondition,
    SemanticDecoder,
    SemanticNetwork,
)
from visual_spec.models.masked.maskgct_checkpoint import (
    load_acoustic_codec,
    load_acoustic_network,
    load_semantic_codec,
    load_semantic_network,
)
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHOICE, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.presets import PRESETS
from visual_spec.samplers.masked.speculative import SpeculativeMaskedSampler

# Lengths of the phones, the prompt and the codes to decode. The first has more phones than its prompt has codes, which
# the published code does not survive.
LENGTHS = [(8, 3, 19), (4, 6, 24), (5, 0, 7)]


@pytest.fixture(scope="module")
def semantic(tmp_path_factory) -> tuple[SemanticNetwork, dict[str, Tensor]]:
    weights = straight.random_weights(straight.semantic_shapes(), 0)
    path = tmp_path_factory.mktemp("t2s") / "model.safetensors"
    save_file(weights, path)
    return load_semantic_network(path, num_heads=HEADS), weights


@pytest.fixture(scope="module")
def acoustic(tmp_path_factory) -> tuple[list[AcousticNetwork], list[dict[str, Tensor]]]:
    networks, all_weights = [], []
    for seed, books in ((1, 1), (2, BOOKS)):
        weights = straight.random_weights(straight.acoustic_shapes(books), seed)
        path = tmp_path_factory.mktemp("s2a") / "model.safetensors"
        save_file(weights, path)
        networks.append(load_acoustic_network(path, num_heads=HEADS))
        all_weights.append(weights)
    return networks, all_weights


def spoken(scale: float = 3.5, rescale: float = 0.75) -> SemanticCondition:
    return SemanticCondition(
        phones=[random_codes(10 + i, p, below=PHONES) for i, (p, _, _) in enumerate(LENGTHS)],
        prompts=[random_codes(20 + i, q) for i, (_, q, _) in enumerate(LENGTHS)],
        lengths=[length for _, _, length in LENGTHS],
        guidance_scale=scale,
        guidance_rescale=rescale,
    )


def heard(scale: float = 3.5) -> AcousticCondition:
    return AcousticCondition(
        semantic=[random_codes(30 + i, q + length) for i, (_, q, length) in enumerate(LENGTHS)],
        prompts=[random_codes(40 + i, q, BOOKS, below=CODES) for i, (_, q, _) in enumerate(LENGTHS)],
        guidance_scale=scale,
    )


def noise_of(seed: int) -> CounterNoise:
    return CounterNoise(draw_keys([torch.Generator().manual_seed(seed)], 1), "cpu")


def counters(length: int, book: int = 0, books: int = 1) -> Tensor:
    return (torch.arange(length) * books + book)[None]


@pytest.mark.parametrize("scale, rescale", [(3.5, 0.75), (2.0, 1.0), (1.0, 0.75)])
def test_semantic_logits_of_a_ragged_batch(semantic, scale, rescale):
    network, weights = semantic
    condition = spoken(scale, rescale)
    model = SemanticDecoder(network, 24)
    state = model.prepare(condition, batch_size=3, guided=False)
    tokens = random_codes(3, 3, 24, below=SEMANTIC + 1)
    tokens[:, :2] = SEMANTIC  # hidden
    for past in (0.0, 0.4):
        model.set_time(state, past)
        logits = model(state, tokens[..., None], 0)
        for row, (_, _, length) in enumerate(LENGTHS):
            own = tokens[row, :length]
            expected = straight.semantic_logits(
                weights,
                condition.phones[row],
                condition.prompts[row],
                own.masked_fill(own == SEMANTIC, -1),
                1 - past,
                scale,
                rescale,
            )
            torch.testing.assert_close(logits[row, :length], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("book", [0, 1, 2])
def test_acoustic_logits_of_a_ragged_batch(acoustic, book):
    (first, rest), weights = acoustic
    condition = heard()
    model = AcousticDecoder(first, rest, 24)
    state = model.prepare(condition, batch_size=3, guided=False)
    tokens = random_codes(4, 3, 24, BOOKS, below=CODES)
    tokens[:, ::2, book], tokens[:, :, book + 1 :] = CODES, CODES
    model.set_time(state, 0.25)
    logits = model(state, tokens, book)
    for row, (_, _, length) in enumerate(LENGTHS):
        own = tokens[row, :length]
        expected = straight.acoustic_logits(
            weights[min(book, 1)],
            book,
            condition.semantic[row],
            condition.prompts[row],
            own.masked_fill(own == CODES, -1),
            0.75,
            3.5,
            0.75,
        )
        torch.testing.assert_close(logits[row, :length], expected, rtol=1e-9, atol=1e-9)


def test_text_to_semantic_decodes_what_the_published_loop_decodes(semantic):
    network, weights = semantic
    condition, steps = spoken(), 5
    model = SemanticDecoder(network, 24)
    sampler = PRESETS["maskgct"].sampler(steps=steps)
    law = TokenLaw(temperature=0.9, top_k=6)
    result = sampler(
        model,
        condition,
        law=law,
        batch_size=3,
        generator=seeded(5, 6, 7),
        known_tokens=model.known_tokens(condition.lengths),
    )
    assert int(result.trace.target_calls[0]) == steps
    for row, (_, _, length) in enumerate(LENGTHS):
        noise, slots = noise_of(5 + row), counters(length)
        expected = straight.decoded(
            lambda codes, time, row=row: straight.semantic_logits(
                weights, condition.phones[row], condition.prompts[row], codes, time, 3.5, 0.75
            ),
            length,
            steps,
            0.9,
            6,
            lambda step, n=noise, s=slots: n.gumbel(s, SEMANTIC, TOKEN, step, torch.float64)[0],
            lambda step, n=noise, s=slots: n.gumbel(s, 1, CHOICE, step, torch.float64)[0, :, 0],
        )
        assert result.tokens[row, :length].tolist() == expected.tolist()
        assert (result.tokens[row, length:] == 0).all()


def test_semantic_to_acoustic_decodes_what_the_published_loop_decodes(acoustic):
    (first, rest), weights = acoustic
    condition, steps = heard(), (4, 3, 1)
    model = AcousticDecoder(first, rest, 24)
    sampler = PRESETS["maskgct-acoustic"].sampler(steps=steps)
    law = TokenLaw(temperature=1.5, top_k=5)
    result = sampler(
        model,
        condition,
        law=law,
        batch_size=3,
        generator=seeded(5, 6, 7),
        known_tokens=model.known_tokens(condition.lengths),
    )
    for row, (_, _, length) in enumerate(LENGTHS):
        noise = noise_of(5 + row)
        codes = torch.full((length, BOOKS), -1)
        for book, count in enumerate(steps):
            slots = counters(length, book, BOOKS)

            def logits(own: Tensor, time: float, row=row, book=book, codes=codes) -> Tensor:
                fed = codes.clone()
                fed[:, book] = own
                return straight.acoustic_logits(
                    weights[min(book, 1)],
                    book,
                    condition.semantic[row],
                    condition.prompts[row],
                    fed,
                    time,
                    3.5,
                    0.75,
                )

            codes[:, book] = straight.decoded(
                logits,
                length,
                count,
                1.5,
                5,
                lambda step, n=noise, s=slots: n.gumbel(s, CODES, TOKEN, step, torch.float64)[0],
                lambda step, n=noise, s=slots: n.gumbel(s, 1, CHOICE, step, torch.float64)[0, :, 0],
            )
        assert result.tokens[row, :length].tolist() == codes.tolist()


def test_the_presets_are_the_published_settings():
    assert PRESETS["maskgct"].law == TokenLaw(temperature=0.9, top_k=164)  # ceil(0.02 * 8192)
    assert PRESETS["maskgct-acoustic"].law == TokenLaw(temperature=1.5, top_k=21)  # ceil(0.02 * 1024)
    assert PRESETS["maskgct-acoustic"].settings["steps"] == (25, 10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lengths": [19, 24]}, "3 prompts.*2.*3"),
        ({"lengths": [19, 20, 7]}, "the longest 24"),
        ({"lengths": [19, 24, 0]}, "at least 1"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan"),
        ({"guidance_rescale": 1.5}, "from 0 to 1"),
        ({"phones": [torch.zeros(2, dtype=torch.long)] * 2}, "3 samples"),
        ({"phones": [torch.full((2,), PHONES)] * 3}, f"0 to {PHONES - 1}"),
        ({"prompts": [torch.full((2,), SEMANTIC)] * 3}, f"0 to {SEMANTIC - 1}"),
    ],
)
def test_conditions_that_do_not_fit_are_refused(semantic, changes, message):
    fields = {name: getattr(spoken(), name) for name in SemanticCondition.__dataclass_fields__}
    model = SemanticDecoder(semantic[0], 24)
    with pytest.raises(ValueError, match=message):
        model.prepare(SemanticCondition(**fields | changes), batch_size=3, guided=False)


def test_guided_laws_other_networks_and_one_token_a_call_are_refused(semantic, acoustic):
    model = SemanticDecoder(semantic[0], 24)
    with pytest.raises(ValueError, match="guidance_scale.*condition"):
        MaskedSampler()(model, spoken(), law=TokenLaw(guidance_scale=2.0), batch_size=3)
    with pytest.raises(ValueError, match="SemanticDecoder"):
        SpeculativeMaskedSampler()(model, spoken(), law=TokenLaw(), batch_size=3)
    (first, rest), _ = acoustic
    with pytest.raises(ValueError, match="pass \\[Q, 3\\] each"):
        AcousticDecoder(first, rest, 30).prepare(
            AcousticCondition(heard().semantic, [torch.zeros(0, 2, dtype=torch.long)] * 3),
            batch_size=3,
            guided=False,
        )
    other = AcousticNetwork(1, CODES + 1, SEMANTIC, DIM, 1, HEADS)
    refuses(ValueError, "vocab_size=25, .* 24;", AcousticDecoder, other, rest, 24)
    refuses(ValueError, "num_heads=2", AcousticNetwork, 1, CODES, SEMANTIC, 10, 1, 2)


def test_networks_of_other_layouts_are_refused(tmp_path, semantic):
    weights = straight.random_weights(straight.semantic_shapes(), 0)
    save_file(weights, tmp_path / "more.safetensors")
    refuses(ValueError, r"MaskGCT.*layer_emb\.weight", load_acoustic_network, tmp_path / "more.safetensors")


# -- codecs ------------------------------------------------------------------------------------------------------------


def test_the_acoustic_codec_in_its_official_layout(tmp_path):
    weights = write_codecs(tmp_path)
    codec = load_acoustic_codec(tmp_path / "encoder.safetensors", tmp_path / "decoder.safetensors")
    assert (codec.samples_per_frame, codec.frame_rate) == (6, 4000)
    wave = torch.randn(2, 66, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    codes = codec.encode(wave[:, None])
    for row in range(2):
        latents = straight.acoustic_encoder(weights["encoder"], wave[row], STRIDES)
        assert torch.equal(codes[row], straight.codes_of(weights["decoder"], latents, BOOKS))
    waves = codec.decode(codes)
    assert waves.shape == (2, 1, 6 * codes.shape[2])
    for row in range(2):
        latents: Any = sum(
            straight.plain_conv(
                weights["decoder"],
                f"quantizer.quantizers.{k}.out_project",
                weights["decoder"][f"quantizer.quantizers.{k}.codebook.weight"][codes[row, k]].T,
            )
            for k in range(BOOKS)
        )
        features = straight.backbone(weights["decoder"], "model.backbone", latents, 2)
        expected = straight.spectrum_wave(weights["decoder"], features, FRAME, 6)
        torch.testing.assert_close(waves[row, 0], expected, rtol=1e-8, atol=1e-8)


def test_the_semantic_codec_in_its_official_layout(tmp_path):
    weights = write_codecs(tmp_path)
    codec = load_semantic_codec(tmp_path / "semantic_codec.safetensors", tmp_path / "stats.pt")
    features = torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    codes = codec.encode(features)
    w, moments = weights["semantic_codec"], weights["stats"]
    for row in range(2):
        scaled = (features[row] - moments["mean"]) / moments["var"].sqrt()
        inner = straight.backbone(w, "encoder.0", scaled.T, 2)
        latents = inner @ w["encoder.1.weight"].T + w["encoder.1.bias"]
        assert torch.equal(codes[row], straight.codes_of(w, latents.T, 1)[0])


def test_codecs_of_other_layouts_are_refused(tmp_path):
    write_codecs(tmp_path)
    with pytest.raises(ValueError, match="MaskGCT"):
        load_acoustic_codec(tmp_path / "decoder.safetensors", tmp_path / "decoder.safetensors")
    weights = straight.random_weights(decoder_shapes(), 4)
    save_file(weights | {"model.head.istft.window": torch.ones(FRAME)}, tmp_path / "window.safetensors")
    with pytest.raises(ValueError, match="Hann.*16"):
        load_acoustic_codec(tmp_path / "encoder.safetensors", tmp_path / "window.safetensors")
    del weights["quantizer.quantizers.1.in_project.weight_g"]
    save_file(weights, tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match=r"quantizer\.quantizers\.1\.in_project\.weight_g"):
        load_acoustic_codec(tmp_path / "encoder.safetensors", tmp_path / "half.safetensors")
