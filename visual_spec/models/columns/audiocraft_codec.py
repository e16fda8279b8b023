"""EnCodec (Defossez et al. 2022) as audiocraft exports it, into transformers' `EncodecModel`.

`compression_state_dict.bin` beside a MusicGen, AudioGen or MAGNeT holds the codec, or only the name of one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch
from transformers import EncodecConfig, EncodecModel
from transformers.models.encodec.modeling_encodec import EncodecConvTranspose1d

from visual_spec.models.columns.audiocraft import CODEC, KEEP, named_file, unpack
from visual_spec.models.columns.audiocraft_settings import TrainingSettings
from visual_spec.models.core.checkpoints import check_values, read_content
from visual_spec.models.core.saved import Difference
from visual_spec.models.core.settings import COUNT, Within


def load_audiocraft_codec(
    source: str | os.PathLike, *, pretrained: str | os.PathLike | None = None
) -> EncodecModel:
    """Return the EnCodec of an official checkpoint, in float32.

    Args:
        source: `compression_state_dict.bin`, or the folder that holds it.
        pretrained: name or folder of a codec to load in place of one that the file only names (the music models name
            `facebook/encodec_32khz`). None: the one that the file names.

    Raises:
        FileNotFoundError, OSError: there is no such file, or no such codec.
        ValueError: the file is not a checkpoint, is one of another codec, or needs pickle; settings are not supported
            by transformers' modules; or keys are missing, unexpected or mis-shaped, which the message lists.
    """
    path = named_file(source, CODEC)
    content = read_content(path, KEEP)
    if isinstance(content, Mapping) and isinstance(content.get("pretrained"), str):
        name = str(content["pretrained"])
        if pretrained is None and name.startswith("dac_"):
            raise ValueError(
                f"{path} names the codec {name!r}, which is no EnCodec; pass the EnCodec that the model was trained on."
            )
        try:
            codec = name if pretrained is None else pretrained
            return EncodecModel.from_pretrained(codec, dtype=torch.float32).eval()
        except OSError as error:
            raise OSError(
                f"{path} only names its codec, {name}, and that could not be loaded; pass pretrained=, a folder of it, "
                f"or codec= to what loads the whole model ({' '.join(str(error).split())[:160]})."
            ) from error
    weights, config = unpack(path, content)
    config.refuse_others(
        {
            "compression_model": ("encodec",),
            "encodec.autoencoder": ("seanet",),
            "encodec.quantizer": ("rvq",),
            "encodec.renormalize": (False, None),
            "seanet.activation": ("ELU",),
            "seanet.activation_params.alpha": (1.0,),
            "seanet.norm": ("weight_norm",),
            "seanet.disable_norm_outer_blocks": (0,),
            "seanet.decoder.final_activation": (None,),
            "seanet.encoder": ({}, None),
        }
    )
    settings = _codec_config(config, most=len(weights))
    # First without memory: settings that do not match the weights may ask for any size.
    try:
        with torch.device("meta"):
            codec = EncodecModel(settings)
    except (ValueError, RuntimeError, OverflowError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path} has settings that make no EnCodec: {' '.join(str(error).split())[:160]}"
        ) from error
    official = {_official_codec_key(codec, key): key for key in codec.state_dict()}
    shapes = {name: tuple(codec.state_dict()[key].shape) for name, key in official.items()}
    if difference := Difference.between(weights, shapes):
        raise ValueError(f"{path} does not hold an EnCodec with the settings in the file: {difference}.")
    check_values(weights, str(path))
    codec = EncodecModel(settings)
    codec.load_state_dict({key: weights[name] for name, key in official.items()})
    return codec.eval()


def _codec_config(config: TrainingSettings, most: int) -> EncodecConfig:
    """Return the configuration for the settings, with at most `most` parts of a kind, the number of tensors."""
    of = config.of_kind
    if not of(int, "seanet.lstm", 2):
        raise ValueError(
            f"{config.path} was trained with seanet.lstm=0; transformers' EnCodec always has an LSTM."
        )
    rate = of(int, "encodec.sample_rate", 32_000, COUNT)
    ratios = of(list, "seanet.ratios", [8, 5, 4, 2], COUNT)
    bins, books = of(int, "rvq.bins", 1024, Within(2)), of(int, "rvq.n_q", 8, COUNT)
    numbers = {"seanet.n_residual_layers": of(int, "seanet.n_residual_layers", 1), "rvq.n_q": books}
    numbers["seanet.lstm"] = of(int, "seanet.lstm", 2)
    for name, value in numbers.items():
        if value > most:
            raise ValueError(
                f"{config.path} was trained with {name}={value}, and holds {most} tensors; they differ."
            )
    frame_rate = math.ceil(rate / math.prod(ratios))
    made = EncodecConfig(
        # Kilobits a second of all codebooks: transformers derives the number of codebooks from them, rounding down.
        target_bandwidths=[(books + 0.01) * frame_rate * math.ceil(math.log2(bins)) / 1000],
        sampling_rate=rate,
        audio_channels=of(int, "encodec.channels", 1),
        hidden_size=of(int, "seanet.dimension", 128),
        num_filters=of(int, "seanet.n_filters", 32),
        num_residual_layers=of(int, "seanet.n_residual_layers", 1),
        upsampling_ratios=ratios,
        kernel_size=of(int, "seanet.kernel_size", 7),
        last_kernel_size=of(int, "seanet.last_kernel_size", 7),
        residual_kernel_size=of(int, "seanet.residual_kernel_size", 3),
        dilation_growth_rate=of(int, "seanet.dilation_base", 2),
        use_causal_conv=of(bool, "seanet.causal", False),
        pad_mode=of(str, "seanet.pad_mode", "constant"),
        compress=of(int, "seanet.compress", 2),
        num_lstm_layers=of(int, "seanet.lstm", 2),
        trim_right_ratio=of(float, "seanet.decoder.trim_right_ratio", 1.0),
        codebook_size=bins,
        use_conv_shortcut=not of(bool, "seanet.true_skip", True),
    )
    assert made.num_quantizers == books
    return made


def _official_codec_key(codec: EncodecModel, key: str) -> str:
    """Return audiocraft's name of a tensor of transformers' EnCodec."""
    if key.startswith("quantizer."):
        return key.replace("quantizer.layers.", "quantizer.vq.layers.").replace(".codebook.", "._codebook.")
    side, _, rest = key.partition(".layers.")
    if ".conv." in rest:
        # Audiocraft wraps a convolution twice, once for the padding and once for the norm.
        inner, _, tensor = rest.partition(".conv.")
        transposed = isinstance(codec.get_submodule(f"{side}.layers.{inner}"), EncodecConvTranspose1d)
        name = "convtr" if transposed else "conv"
        tensor = {
            "parametrizations.weight.original0": "weight_g",
            "parametrizations.weight.original1": "weight_v",
        }.get(tensor, tensor)
        rest = f"{inner}.{name}.{name}.{tensor}"
    return f"{side}.model.{rest}"
