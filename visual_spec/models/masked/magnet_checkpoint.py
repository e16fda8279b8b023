"""Official MAGNeT checkpoints (Ziv et al. 2024), as audiocraft exports them, into transformers' modules.

A folder holds `state_dict.bin`, the language model, and `compression_state_dict.bin`, its EnCodec or the name of one.
Both are `torch.save` files of a dict with the weights under "best_state", and the settings of the training run under
"xp.cfg", as YAML. The text encoder, a T5, is not included. The language model becomes a `MusicgenForCausalLM`, whose
modules compute the same without a causal mask; `models.musicgen.MagnetModel` runs them.

Files are read with `torch.load(weights_only=True)` only, and every key is accounted for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncodecConfig, EncodecModel, MusicgenForCausalLM
from transformers.models.encodec.modeling_encodec import EncodecConvTranspose1d
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

from visual_spec.models.core.checkpoints import (
    Difference,
    check_values,
    fill,
    plain_weights,
    read_content,
    some,
)
from visual_spec.models.masked.audiocraft_settings import (
    TrainingSettings,
    count,
    counts,
    flag,
    number,
    positive,
    read_settings,
    shown,
    word,
)

LANGUAGE_MODEL, CODEC = "state_dict.bin", "compression_state_dict.bin"

_KEEP = '{k: c[k] for k in ("best_state", "xp.cfg") if k in c}'
_OUTPUT_PROJECTION = "condition_provider.conditioners.description.output_proj"
_LAYER_NAMES = {
    "self_attn": "self_attn",
    "cross_attention": "encoder_attn",
    "linear1": "fc1",
    "linear2": "fc2",
    "norm1": "self_attn_layer_norm",
    "norm_cross": "encoder_attn_layer_norm",
    "norm2": "final_layer_norm",
}


@dataclass(frozen=True)
class MagnetSettings:
    """The settings of a checkpoint. Missing ones have the values of the official 10 s music model, except the first
    number of steps, which is 60 for clips longer than 10 s.

    Attributes:
        duration: seconds of the training clips.
        frame_rate: frames a second.
        sampling_rate: of the codec.
        reach: frames to either side that stages after the first see; None: all.
        span: frames that are hidden together.
        steps: steps of each codebook.
        temperature, top_k, top_p: of the law.
        guidance_scale, least_guidance: the scale at the beginning of a codebook, and the one it falls to.
        text_encoder: name of the T5 whose states the model reads.
    """

    duration: float
    frame_rate: int
    sampling_rate: int
    reach: int | None
    span: int
    steps: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    guidance_scale: float
    least_guidance: float
    text_encoder: str

    @property
    def num_frames(self) -> int:
        """T, frames of a clip: those of whole spans, as in audiocraft. A clip of 10 s has 498 of 500."""
        return round(self.duration * self.frame_rate) // self.span * self.span


@dataclass(frozen=True)
class MagnetCheckpoint:
    """A language model and its settings.

    Attributes:
        model: the language model; `enc_to_dec_proj` is the projection of the text encoder's states. Run it with
            `padding="zeros"` to get the results of audiocraft.
    """

    model: MusicgenForCausalLM
    settings: MagnetSettings


def load_magnet(
    source: str | os.PathLike,
    *,
    dtype: torch.dtype | None = torch.float32,
    num_heads: int | None = None,
) -> MagnetCheckpoint:
    """Return the language model of an official checkpoint.

    Args:
        source: `state_dict.bin`, or the folder that holds it.
        dtype: dtype of the weights: float32, because the model is loaded onto the CPU, where audiocraft computes in
            float32. None keeps that of the file (float16 for official ones).
        num_heads: attention heads, for a file without settings; the weights do not determine them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint, is one of another model, or needs pickle; settings are not supported
            by transformers' modules; or keys are missing, unexpected or mis-shaped, which the message lists.
    """
    path = _file(source, LANGUAGE_MODEL)
    weights, config = _unpack(path, read_content(path, _KEEP))
    kind = config("lm_model", "transformer_lm_magnet")
    if kind != "transformer_lm_magnet":
        raise ValueError(
            f"{path} holds a {kind!r}, not MAGNeT's 'transformer_lm_magnet'; MusicGen is loaded from its transformers "
            "folder, with MusicgenForConditionalGeneration.from_pretrained."
        )
    config.refuse_others(
        {
            "transformer_lm.norm_first": (True,),
            "transformer_lm.activation": ("gelu",),
            "transformer_lm.norm": ("layer_norm",),
            "transformer_lm.positional_embedding": ("sin",),
            "transformer_lm.positional_scale": (1, None),
            "transformer_lm.max_period": (10_000, None),
            "transformer_lm.past_context": (None,),
            "transformer_lm.causal": (False,),
            "transformer_lm.kv_repeat": (1,),
            "codebooks_pattern.modeling": ("parallel",),
            "fuser.cross": (["description"],),
            "fuser.sum": ([], None),
            "fuser.prepend": ([], None),
            "fuser.input_interpolate": ([], None),
            "fuser.cross_attention_pos_emb": (False, None),
        },
    )
    heads = config("transformer_lm.num_heads", num_heads)
    model = _language_model(path, weights, heads, config("transformer_lm.num_layers"))
    dim, width = weights[f"{_OUTPUT_PROJECTION}.weight"].shape
    model.enc_to_dec_proj = nn.Linear(width, dim, device="meta")
    # These buffers are computed, not loaded; on the meta device they were not computed.
    positions: Any = model.model.decoder.embed_positions
    with torch.device("cpu"):
        positions.weights = positions.get_embedding(positions.num_positions, positions.embedding_dim)
    kept = weights["emb.0.weight"].dtype if dtype is None else dtype
    model = fill(model, dict(_renamed(weights)), str(path), dtype=kept)
    return MagnetCheckpoint(model, _settings(config, len(model.lm_heads)))


def load_magnet_codec(
    source: str | os.PathLike, *, pretrained: str | os.PathLike | None = None
) -> EncodecModel:
    """Return the EnCodec of an official checkpoint, in float32.

    Args:
        source: `compression_state_dict.bin`, or the folder that holds it.
        pretrained: name or folder of a codec to load in place of one that the file only names (the music models name
            `facebook/encodec_32khz`). None: the one that the file names.

    Raises:
        FileNotFoundError, OSError: there is no such file, or no such codec.
        ValueError: as in `load_magnet`.
    """
    path = _file(source, CODEC)
    content = read_content(path, _KEEP)
    if isinstance(content, Mapping) and isinstance(content.get("pretrained"), str):
        name = str(content["pretrained"])
        if pretrained is None and name.startswith("dac_"):
            raise ValueError(f"{path} names the codec {name!r}, which is no EnCodec; MAGNeT's is one.")
        try:
            return EncodecModel.from_pretrained(name if pretrained is None else pretrained).eval()
        except OSError as error:
            raise OSError(
                f"{path} only names its codec, {name}, and that could not be loaded; pass pretrained=, a folder of it "
                f"({' '.join(str(error).split())[:160]})."
            ) from error
    weights, config = _unpack(path, content)
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
        },
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
    _check_keys(path, weights, shapes, "an EnCodec with the settings in the file")
    check_values(weights, str(path))
    codec = EncodecModel(settings)
    codec.load_state_dict({key: weights[name] for name, key in official.items()})
    return codec.eval()


# -- reading -----------------------------------------------------------------------------------------------------------


def _file(source: str | os.PathLike, name: str) -> Path:
    path = Path(source)
    if path.is_dir():
        if not (path / name).exists():
            held = sorted(file.name for file in path.iterdir())
            raise FileNotFoundError(
                f"{path} holds no {name}, as official MAGNeT folders do; it holds {', '.join(held[:5]) or 'nothing'}."
            )
        path = path / name
    return path


def _unpack(path: Path, content: Any) -> tuple[dict[str, Tensor], TrainingSettings]:
    """Return weights and settings."""
    state = content.get("best_state") if isinstance(content, Mapping) else None
    if isinstance(state, Mapping) and isinstance(state.get("model"), Mapping):
        state = state["model"]  # a training run that was not exported
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        held = some(map(repr, content)) if isinstance(content, Mapping) else "no dict"
        raise ValueError(
            f"{path} holds no weights under 'best_state' ({held}); pass a file that audiocraft exported, such as the "
            f"{LANGUAGE_MODEL} and {CODEC} of facebook/magnet-small-10secs."
        )
    return plain_weights(state, str(path)), read_settings(path, content.get("xp.cfg", ""))


def _check_keys(
    path: Path, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], what: str
) -> None:
    if difference := Difference.between(weights, shapes):
        raise ValueError(f"{path} does not hold {what}: {difference}.")


# -- the language model ------------------------------------------------------------------------------------------------


def _language_model(
    path: Path, weights: Mapping[str, Tensor], num_heads: Any, num_layers: Any
) -> MusicgenForCausalLM:
    """Return the model for weights whose keys and shapes are all right, on the meta device.

    Args:
        num_heads, num_layers: from the settings; None if they do not say.
    """
    table, linear = weights.get("emb.0.weight"), weights.get("transformer.layers.0.linear1.weight")
    text = weights.get(f"{_OUTPUT_PROJECTION}.weight")
    if table is None or linear is None or text is None or not table.ndim == linear.ndim == text.ndim == 2:
        held = ", ".join(list(weights)[:4])
        raise ValueError(
            f"{path} is no MAGNeT checkpoint: of emb.0.weight, transformer.layers.0.linear1.weight and "
            f"{_OUTPUT_PROJECTION}.weight it does not hold all as matrices, but {len(weights)} keys such as {held}."
        )
    books = len({key.split(".")[1] for key in weights if key.startswith("emb.")})
    layers = len({key.split(".")[2] for key in weights if key.startswith("transformer.layers.")})
    (entries, dim), hidden = table.shape, linear.shape[0]
    shapes: dict[str, tuple[int, ...]] = {"out_norm.weight": (dim,), "out_norm.bias": (dim,)}
    shapes |= {f"{_OUTPUT_PROJECTION}.weight": (dim, text.shape[1]), f"{_OUTPUT_PROJECTION}.bias": (dim,)}
    for book in range(books):
        shapes |= {f"emb.{book}.weight": (entries, dim), f"linears.{book}.weight": (entries - 1, dim)}
    for layer in range(layers):
        start = f"transformer.layers.{layer}"
        for name in ("self_attn", "cross_attention"):
            shapes |= {
                f"{start}.{name}.in_proj_weight": (3 * dim, dim),
                f"{start}.{name}.out_proj.weight": (dim, dim),
            }
        for name in ("norm1", "norm_cross", "norm2"):
            shapes |= {f"{start}.{name}.weight": (dim,), f"{start}.{name}.bias": (dim,)}
        shapes |= {f"{start}.linear1.weight": (hidden, dim), f"{start}.linear2.weight": (dim, hidden)}
    _check_keys(path, weights, shapes, f"a MAGNeT of {books} codebooks, {layers} layers and width {dim}")
    if num_layers not in (None, layers):
        raise ValueError(
            f"{path} holds {layers} layers, and its settings say {shown(num_layers)}; copy or download it again."
        )
    if num_heads is None:
        raise ValueError(
            f"{path} does not tell the number of attention heads; pass num_heads (16 for the official small models, 24 "
            "for the medium ones)."
        )
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1 or dim % num_heads:
        raise ValueError(f"num_heads={num_heads!r}; pass an integer that divides the width {dim}.")
    with torch.device("meta"):
        return MusicgenForCausalLM(
            MusicgenDecoderConfig(
                vocab_size=entries - 1,
                num_codebooks=books,
                hidden_size=dim,
                num_hidden_layers=layers,
                num_attention_heads=num_heads,
                ffn_dim=hidden,
                dropout=0.0,
                pad_token_id=entries - 1,
                bos_token_id=entries - 1,
                is_decoder=True,
                add_cross_attention=True,
            )
        )


def _renamed(weights: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Yield the weights of the language model under transformers' keys."""
    for key, value in weights.items():
        part = key.split(".")
        if part[0] == "emb":
            yield f"model.decoder.embed_tokens.{part[1]}.weight", value
        elif part[0] == "linears":
            yield f"lm_heads.{part[1]}.weight", value
        elif part[0] == "out_norm":
            yield f"model.decoder.layer_norm.{part[1]}", value
        elif part[0] == "condition_provider":
            yield f"enc_to_dec_proj.{part[-1]}", value
        else:
            start = f"model.decoder.layers.{part[2]}.{_LAYER_NAMES[part[3]]}"
            if part[4] == "in_proj_weight":
                # Queries, keys and values, one below the other. Copied, because tensors that share memory cannot be
                # saved.
                for name, matrix in zip("qkv", value.chunk(3), strict=True):
                    yield f"{start}.{name}_proj.weight", matrix.clone()
            else:
                yield f"{start}.{'.'.join(part[4:])}", value


def _settings(config: TrainingSettings, num_codebooks: int) -> MagnetSettings:
    duration = config.of_kind(number, "dataset.segment_duration", 10)
    first = 20 if duration <= 10 else 60
    usual = [first] + [10] * (num_codebooks - 1)
    reach = config.of_kind(count, "transformer_lm.subcodes_context", 5)
    generate = "generate.lm"
    top_k = config.of_kind(count, f"{generate}.top_k", 0)
    top_p = config.of_kind(number, f"{generate}.top_p", 0.9)
    return MagnetSettings(
        duration=duration,
        frame_rate=config.of_kind(count, "transformer_lm.compression_model_framerate", 50),
        sampling_rate=config.of_kind(count, "sample_rate", 32_000),
        reach=None if reach < 0 else reach,
        span=config.of_kind(positive, "masking.span_len", 3),
        steps=tuple(config.of_kind(counts, f"{generate}.decoding_steps", usual)),
        temperature=config.of_kind(number, f"{generate}.temp", 3.0),
        # Audiocraft's 0 means no top-p, and with top-p it uses no top-k.
        top_k=0 if top_p else top_k,
        top_p=top_p or 1.0,
        guidance_scale=config.of_kind(number, f"{generate}.max_cfg_coef", 10.0),
        least_guidance=config.of_kind(number, f"{generate}.min_cfg_coef", 1.0),
        text_encoder=config.of_kind(word, "conditioners.description.t5.name", "t5-base"),
    )


# -- the codec ---------------------------------------------------------------------------------------------------------


def _codec_config(config: TrainingSettings, most: int) -> EncodecConfig:
    """Return the configuration for the settings, with at most `most` parts of a kind, the number of tensors."""
    of = config.of_kind
    if not of(count, "seanet.lstm", 2):
        raise ValueError(
            f"{config.path} was trained with seanet.lstm=0; transformers' EnCodec always has an LSTM."
        )
    rate = of(count, "encodec.sample_rate", 32_000)
    ratios = of(counts, "seanet.ratios", [8, 5, 4, 2])
    bins, books = of(count, "rvq.bins", 1024), of(count, "rvq.n_q", 8)
    numbers = {"seanet.n_residual_layers": of(count, "seanet.n_residual_layers", 1), "rvq.n_q": books}
    numbers["seanet.lstm"] = of(count, "seanet.lstm", 2)
    for name, value in numbers.items():
        if value > most:
            raise ValueError(
                f"{config.path} was trained with {name}={value}, and holds {most} tensors; they differ."
            )
    if min(rate, books, *ratios) < 1 or bins < 2:
        raise ValueError(
            f"{config.path} was trained with encodec.sample_rate={rate}, seanet.ratios={ratios}, rvq.bins={bins} and "
            f"rvq.n_q={books}; all are at least 1, and bins 2."
        )
    frame_rate = math.ceil(rate / math.prod(ratios))
    made = EncodecConfig(
        # Kilobits a second of all codebooks: transformers derives the number of codebooks from them, rounding down.
        target_bandwidths=[(books + 0.01) * frame_rate * math.ceil(math.log2(bins)) / 1000],
        sampling_rate=rate,
        audio_channels=of(count, "encodec.channels", 1),
        hidden_size=of(count, "seanet.dimension", 128),
        num_filters=of(count, "seanet.n_filters", 32),
        num_residual_layers=of(count, "seanet.n_residual_layers", 1),
        upsampling_ratios=ratios,
        kernel_size=of(count, "seanet.kernel_size", 7),
        last_kernel_size=of(count, "seanet.last_kernel_size", 7),
        residual_kernel_size=of(count, "seanet.residual_kernel_size", 3),
        dilation_growth_rate=of(count, "seanet.dilation_base", 2),
        use_causal_conv=of(flag, "seanet.causal", False),
        pad_mode=of(word, "seanet.pad_mode", "constant"),
        compress=of(count, "seanet.compress", 2),
        num_lstm_layers=of(count, "seanet.lstm", 2),
        trim_right_ratio=of(number, "seanet.decoder.trim_right_ratio", 1.0),
        codebook_size=bins,
        use_conv_shortcut=not of(flag, "seanet.true_skip", True),
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
