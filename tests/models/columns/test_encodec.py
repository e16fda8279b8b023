"""EnCodec as codes and waves: against transformers' own `encode` and `decode`, whole and in stretches."""

import functools
from typing import Any

import pytest
import torch
from transformers import EncodecConfig, EncodecModel

from scripts.train.codec import initialise
from tests.helpers.refusals import refuses
from visual_spec.models.columns.encodec import StreamingDecoder, decode_codes, encode_waves

BOOKS, SIZE, HOP = 3, 16, 40


@functools.cache
def codec(causal: bool = False, *, layers: int = 2, growth: int = 1) -> Any:
    torch.manual_seed(0)
    config = EncodecConfig(
        target_bandwidths=[2.0, BOOKS * 4.0],  # 1000 frames of 4 bits a second
        sampling_rate=40_000,
        hidden_size=8,
        num_filters=4,
        num_residual_layers=growth,
        upsampling_ratios=[5, 4, 2],
        num_lstm_layers=layers,
        codebook_size=SIZE,
        use_causal_conv=causal,
        use_conv_shortcut=not causal,
    )
    model = EncodecModel(config)
    initialise(model)
    model = model.double().eval()
    for layer in model.quantizer.layers:
        layer.codebook.embed.normal_()  # pyright: ignore
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, torch.nn.LSTM):  # which remembers for long
                bias: Any = layer.bias_hh_l0
                bias[layer.hidden_size : 2 * layer.hidden_size] += 2.0
    return model


def codes_of(batch: int, frames: int, channels: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(frames)
    return torch.randint(0, SIZE, (batch, BOOKS * channels, frames), generator=generator)


@pytest.mark.parametrize("frames", [1, 2, 5, 40])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_decoding_whole_is_that_of_transformers(causal, frames):
    codes = codes_of(2, frames)
    want = codec(causal).decode(codes[None], [None]).audio_values
    got = decode_codes(codec(causal), codes)
    assert got.shape == (2, 1, frames * HOP) and (got - want).abs().max() < 1e-12


@torch.no_grad()
def test_codes_are_those_of_transformers_and_stereo_alternates():
    waves = torch.randn(2, 2, 7 * HOP, generator=torch.Generator().manual_seed(1))
    got = encode_waves(codec(), waves)
    assert got.shape == (2, 2 * BOOKS, 7) and len(got.unique()) > 6
    for channel in range(2):
        want = codec().encode(waves[:, channel : channel + 1].double(), bandwidth=BOOKS * 4.0).audio_codes[0]
        assert torch.equal(got[:, channel::2], want)
        alone = decode_codes(codec(), got[:, channel::2].contiguous())
        assert (decode_codes(codec(), got, 2)[:, channel : channel + 1] - alone).abs().max() < 1e-12
    assert torch.equal(encode_waves(codec(), waves[:, :1]), got[:, ::2])


@pytest.mark.parametrize("stretches", [[40], [1] * 40, [3, 1, 20, 2, 14], [13, 27], [39, 1]])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_a_stream_has_the_waves_of_the_whole_clip(causal, stretches):
    """The LSTM remembers all of the clip, so a stream that forgot anything would be heard."""
    model, codes = codec(causal, growth=2), codes_of(2, 40, 2)
    want = decode_codes(model, codes, 2)
    stream, heard, put = StreamingDecoder(model, 2), [], 0
    for number, part in enumerate(codes.split(stretches, -1)):
        put += part.shape[-1]
        heard.append(stream(part, last=number == len(stretches) - 1))
        if number < len(stretches) - 1:  # nothing is held back for longer than announced
            assert sum(wave.shape[-1] for wave in heard) == max(0, put - stream.delay) * HOP
    got = torch.cat(heard, -1)
    assert got.shape == want.shape == (2, 2, 40 * HOP) and (got - want).abs().max() < 1e-10
    kept: Any = stream.first.kept
    assert stream.delay < 16 and kept.shape[-1] <= stream.first.radius


@torch.no_grad()
def test_the_first_frame_is_heard_to_the_end():
    codes = codes_of(1, 40)
    other = codes.clone()
    other[..., 0] = (other[..., 0] + 1) % SIZE
    moved = (decode_codes(codec(), codes) - decode_codes(codec(), other)).abs()
    assert moved[..., -HOP:].max() > 1e-9


def test_what_does_not_fit_is_refused():
    chunked = EncodecModel(EncodecConfig(num_filters=2, chunk_length_s=1.0, overlap=0.01, normalize=True))
    refuses(ValueError, "normalize=True, chunk_length_s=1.0", StreamingDecoder, chunked)
    refuses(ValueError, "channels=3.*1.*2", StreamingDecoder, codec(), 3)
    refuses(ValueError, r"\(2, 3, 40\)", encode_waves, codec(), torch.zeros(2, 3, 40))
    refuses(ValueError, "nan.*infinity", encode_waves, codec(), torch.full((1, 1, 40), torch.nan))
    stream = StreamingDecoder(codec())
    stream(codes_of(2, 3))
    for codes, message in [
        (codes_of(2, 3)[:, :2], r"takes \[B, 3, n\]"),
        (codes_of(1, 3), "batch.*1.*2"),
        (codes_of(2, 3) + SIZE, "pass 0 to 15"),
    ]:
        refuses(ValueError, message, stream, codes)
    stream(codes_of(2, 3), last=True)
    refuses(ValueError, "clip.*StreamingDecoder", stream, codes_of(2, 3))
