"""The EnCodec of audiocraft's files: computed by plain functions in the official layout, against the module."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.audiocraft_files import BOOKS, CODEC_SETTINGS, changed, codec_weights, write
from tests.helpers.refusals import refuses
from visual_spec.models.columns.audiocraft_codec import load_audiocraft_codec
from visual_spec.models.columns.encodec import decode_codes, encode_waves


class Straight:
    """EnCodec by plain functions over the official weights, in float64."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.w = {name: value.double() for name, value in weights.items()}

    def kernel(self, name: str) -> Tensor:
        direction = self.w[f"{name}.weight_v"]
        length = direction.square().sum((1, 2), keepdim=True).sqrt()
        return self.w[f"{name}.weight_g"] * direction / length

    def conv(self, x: Tensor, name: str, stride: int = 1, dilation: int = 1) -> Tensor:
        kernel = self.kernel(f"{name}.conv.conv")
        total = (kernel.shape[-1] - 1) * dilation + 1 - stride
        right = total // 2
        missing = -x.shape[-1] % stride
        x = F.pad(x, (total - right, right + missing))
        return F.conv1d(x, kernel, self.w[f"{name}.conv.conv.bias"], stride=stride, dilation=dilation)

    def transposed(self, x: Tensor, name: str, stride: int) -> Tensor:
        kernel = self.kernel(f"{name}.convtr.convtr")
        total = kernel.shape[-1] - stride
        y = F.conv_transpose1d(x, kernel, self.w[f"{name}.convtr.convtr.bias"], stride=stride)
        return y[..., total - total // 2 : y.shape[-1] - total // 2]

    def residual(self, x: Tensor, name: str, dilation: int) -> Tensor:
        y = self.conv(F.elu(x), f"{name}.block.1", dilation=dilation)
        return x + self.conv(F.elu(y), f"{name}.block.3")

    def lstm(self, x: Tensor, name: str) -> Tensor:
        steps = list(x.unbind(-1))
        for layer in range(2):
            hidden = cell = torch.zeros_like(steps[0])
            for at, value in enumerate(steps):
                gates = (
                    value @ self.w[f"{name}.lstm.weight_ih_l{layer}"].T
                    + self.w[f"{name}.lstm.bias_ih_l{layer}"]
                )
                gates = gates + hidden @ self.w[f"{name}.lstm.weight_hh_l{layer}"].T
                gates = gates + self.w[f"{name}.lstm.bias_hh_l{layer}"]
                entry, forget, new, out = gates.chunk(4, 1)
                cell = forget.sigmoid() * cell + entry.sigmoid() * new.tanh()
                hidden = out.sigmoid() * cell.tanh()
                steps[at] = hidden
        return x + torch.stack(steps, -1)

    def latents(self, waves: Tensor) -> Tensor:
        x = self.conv(waves.double(), "encoder.model.0")
        for place, ratio in ((1, 2), (5, 3)):
            for block in range(2):
                x = self.residual(x, f"encoder.model.{place + block}", 2**block)
            x = self.conv(F.elu(x), f"encoder.model.{place + 3}", ratio)
        return self.conv(F.elu(self.lstm(x, "encoder.model.9")), "encoder.model.11")

    def quantise(self, x: Tensor) -> Tensor:
        codes = []
        for book in range(BOOKS):
            table = self.w[f"quantizer.vq.layers.{book}._codebook.embed"]
            distance = (x[:, None] - table[None, :, :, None]).square().sum(2)  # [B, V, T]
            codes.append(distance.argmin(1))
            x = x - table[codes[-1]].transpose(1, 2)
        return torch.stack(codes, 1)

    def decode(self, codes: Tensor) -> Tensor:
        tables = [self.w[f"quantizer.vq.layers.{book}._codebook.embed"] for book in range(BOOKS)]
        x = sum(table[codes[:, book]] for book, table in enumerate(tables)).transpose(1, 2)  # type: ignore[union-attr]
        x = self.lstm(self.conv(x, "decoder.model.0"), "decoder.model.1")
        for place, ratio in ((3, 3), (7, 2)):
            x = self.transposed(F.elu(x), f"decoder.model.{place}", ratio)
            for block in range(2):
                x = self.residual(x, f"decoder.model.{place + 1 + block}", 2**block)
        return self.conv(F.elu(x), "decoder.model.11")


def test_the_codec_is_that_of_a_plain_computation_in_the_official_layout(tmp_path):
    path = write(tmp_path, "compression_state_dict.bin", codec_weights(), CODEC_SETTINGS)
    codec = load_audiocraft_codec(path).double()
    assert codec.config.num_quantizers == BOOKS and codec.config.frame_rate == 67  # 400 / 6, rounded up
    straight = Straight(codec_weights())
    generator = torch.Generator().manual_seed(2)
    waves = torch.randn(2, 1, 62, generator=generator).double()
    latents = straight.latents(waves)
    assert (codec.encoder(waves) - latents).abs().max() < 1e-10 and latents.std() > 0.1
    assert torch.equal(encode_waves(codec, waves), straight.quantise(latents))
    latents = 0.5 * torch.randn(2, 6, 9, generator=generator).double()
    codes = straight.quantise(latents)
    assert torch.equal(codec.quantizer.encode(latents).transpose(0, 1), codes)
    assert all(len(book.unique()) > 4 for book in codes.unbind(1))
    decoded = straight.decode(codes)
    assert (decode_codes(codec, codes) - decoded).abs().max() < 1e-10 and decoded.std() > 0.1


def test_a_file_that_names_its_codec(tmp_path):
    codec = load_audiocraft_codec(
        write(tmp_path, "compression_state_dict.bin", codec_weights(), CODEC_SETTINGS)
    )
    codec.save_pretrained(tmp_path / "encodec")
    torch.save(
        {"pretrained": "facebook/encodec_32khz", "exported": True}, tmp_path / "compression_state_dict.bin"
    )
    found = load_audiocraft_codec(tmp_path, pretrained=tmp_path / "encodec")
    for key, value in codec.state_dict().items():
        assert torch.equal(found.state_dict()[key], value)
    with pytest.raises(OSError, match="encodec_32khz.*pretrained"):
        load_audiocraft_codec(tmp_path)  # there is no network
    torch.save({"pretrained": "dac_44khz", "exported": True}, tmp_path / "compression_state_dict.bin")
    refuses(ValueError, "'dac_44khz'.*EnCodec", load_audiocraft_codec, tmp_path)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("seanet.norm", "time_group_norm", r"seanet\.norm='time_group_norm'.*'weight_norm'"),
        ("seanet.lstm", 0, "seanet.lstm=0"),
        ("seanet.decoder.final_activation", "Tanh", "final_activation='Tanh'"),
        ("encodec.renormalize", True, "encodec.renormalize=True"),
        ("encodec.quantizer", "no_quant", "encodec.quantizer='no_quant'"),
    ],
)
def test_settings_of_another_codec_are_refused(tmp_path, name, value, message):
    settings = changed(CODEC_SETTINGS, name, value)
    path = write(tmp_path, "compression_state_dict.bin", codec_weights(), settings)
    refuses(ValueError, message, load_audiocraft_codec, path)


def test_codecs_of_absurd_sizes_are_refused_before_they_are_built(tmp_path):
    for name, value in {
        "seanet.dimension": 10**9,
        "seanet.n_filters": 10**8,
        "seanet.ratios": [10**6, 10**6],
        "seanet.n_residual_layers": 10**9,
        "seanet.lstm": 10**9,
        "seanet.kernel_size": -3,
        "rvq.bins": 10**12,
        "rvq.n_q": 10**9,
        "rvq.n_q ": 0,
        "encodec.sample_rate": 0,
    }.items():
        settings = changed(CODEC_SETTINGS, name.strip(), value)
        path = write(tmp_path, "compression_state_dict.bin", codec_weights(), settings)
        with pytest.raises(ValueError, match="compression_state_dict.bin") as error:
            load_audiocraft_codec(path)
        assert "\n" not in str(error.value), name
