"""Language models as audiocraft exports them, in transformers' modules: MusicGen, AudioGen and MAGNeT.

A folder holds `state_dict.bin`, the language model, and `compression_state_dict.bin`, its codec or the name of one.
Both are `torch.save` files of a dict with the weights under "best_state", and the settings of the training run under
"xp.cfg", as YAML. The text encoder, a T5, is not included; the projection of its states is. All three models have the
same decoder, transformers' `MusicgenForCausalLM`; MAGNeT runs it without a causal mask.

Files are read with `torch.load(weights_only=True)` only, and every key is accounted for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MusicgenForCausalLM
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

from visual_spec.models.columns.audiocraft_settings import TrainingSettings, read_settings, shown
from visual_spec.models.core.checkpoints import fill, plain_weights, read_content
from visual_spec.models.core.layouts import KeyLayout, count_parts
from visual_spec.models.core.saved import some
from visual_spec.models.core.settings import whole

LANGUAGE_MODEL, CODEC = "state_dict.bin", "compression_state_dict.bin"
KEEP = '{k: c[k] for k in ("best_state", "xp.cfg") if k in c}'  # what a file without pickle needs

_OUTPUT_PROJECTION = "condition_provider.conditioners.description.output_proj"
_DECODER = KeyLayout(
    "language model of audiocraft",
    "state_dict.bin as audiocraft exported it",
    renamed={
        r"^emb\.(\d+)\.": r"model.decoder.embed_tokens.\1.",
        r"^linears\.": "lm_heads.",
        r"^out_norm\.": "model.decoder.layer_norm.",
        rf"^{re.escape(_OUTPUT_PROJECTION)}\.": "enc_to_dec_proj.",
        r"^transformer\.layers\.": "model.decoder.layers.",
        r"(^model\.decoder\.layers\.\d+)\.cross_attention\.": r"\1.encoder_attn.",
        r"(^model\.decoder\.layers\.\d+)\.linear([12])\.": r"\1.fc\2.",
        r"(^model\.decoder\.layers\.\d+)\.norm1\.": r"\1.self_attn_layer_norm.",
        r"(^model\.decoder\.layers\.\d+)\.norm_cross\.": r"\1.encoder_attn_layer_norm.",
        r"(^model\.decoder\.layers\.\d+)\.norm2\.": r"\1.final_layer_norm.",
    },
)
# The kinds of models in the settings, and what reads them.
_READERS = {
    "transformer_lm": ("MusicGen", "AudioPipeline.from_audiocraft(folder, text_encoder, tokenizer)"),
    "transformer_lm_magnet": ("MAGNeT", "AudioPipeline.from_magnet(folder, text_encoder, tokenizer)"),
}
# Settings of all of them.
_COMMON: dict[str, tuple[object, ...]] = {
    "transformer_lm.norm_first": (True,),
    "transformer_lm.activation": ("gelu",),
    "transformer_lm.norm": ("layer_norm",),
    "transformer_lm.positional_embedding": ("sin",),
    "transformer_lm.positional_scale": (1, None),
    "transformer_lm.max_period": (10_000, None),
    "transformer_lm.past_context": (None,),
    "transformer_lm.kv_repeat": (1,),
    "transformer_lm.layer_scale": (None,),
    "transformer_lm.qk_layer_norm": (False, None),
    "transformer_lm.qk_layer_norm_cross": (False, None),
    "fuser.cross": (["description"],),
    "fuser.sum": ([], None),
    "fuser.prepend": ([], None),
    "fuser.input_interpolate": ([], None),
    "fuser.cross_attention_pos_emb": (False, None),
}


def load_language_model(
    source: str | os.PathLike,
    kind: str,
    allowed: Mapping[str, tuple[object, ...]],
    *,
    dtype: torch.dtype | None,
    num_heads: int | None = None,
) -> tuple[MusicgenForCausalLM, TrainingSettings]:
    """Return the decoder of an exported language model, and its settings.

    Args:
        source: `state_dict.bin`, or the folder that holds it.
        kind: of the model in the settings, "transformer_lm" or "transformer_lm_magnet".
        allowed: settings of this kind, and the values that transformers' modules compute.
        dtype: dtype of the weights. Callers ask for float32, because the model is loaded onto the CPU, where
            audiocraft computes in float32. None keeps the file's (float16 for official ones).
        num_heads: attention heads, for a file without settings; the weights do not determine them.

    Returns:
        The decoder, with the projection of the text encoder's states as `enc_to_dec_proj`; and the settings.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint, is one of another model, or needs pickle; settings are not supported
            by transformers' modules; or keys are missing, unexpected or mis-shaped, which the message lists.
    """
    path = named_file(source, LANGUAGE_MODEL)
    weights, config = unpack(path, read_content(path, KEEP))
    name, _ = _READERS[kind]
    if (stated := config("lm_model", kind)) != kind:
        other = _READERS.get(stated) if isinstance(stated, str) else None
        raise ValueError(
            f"{path} holds a {shown(stated)}, not {name}'s {kind!r}"
            + (
                f"; it is a {other[0]}, loaded by {other[1]}."
                if other
                else "; pass the file of another model."
            )
        )
    config.refuse_others(_COMMON | dict(allowed))
    heads = config("transformer_lm.num_heads", num_heads)
    model, what = _language_model(path, name, weights, heads, config("transformer_lm.num_layers"))
    # These buffers are computed, not loaded; on the meta device they were not computed.
    positions: Any = model.model.decoder.embed_positions
    with torch.device("cpu"):
        positions.weights = positions.get_embedding(positions.num_positions, positions.embedding_dim)
    kept = weights["emb.0.weight"].dtype if dtype is None else dtype
    weights = _DECODER.translated(_split(weights), str(path))
    return fill(model, weights, str(path), what=what, dtype=kept), config


def kind_of(source: str | os.PathLike) -> str:
    """Return the name of the model in an exported file or folder, "MusicGen" or "MAGNeT".

    Raises:
        FileNotFoundError, ValueError: as in `load_language_model`; or it holds a model of another kind.
    """
    path = named_file(source, LANGUAGE_MODEL)
    _, config = unpack(path, read_content(path, KEEP))
    stated = config("lm_model")
    if not isinstance(stated, str) or stated not in _READERS:
        raise ValueError(
            f"{path} holds a {shown(stated)} of audiocraft; those that are read are {' and '.join(_READERS)}."
        )
    return _READERS[stated][0]


# -- reading -----------------------------------------------------------------------------------------------------------


def named_file(source: str | os.PathLike, name: str) -> Path:
    """Return the path of a file that is given by itself or by its folder.

    Raises:
        FileNotFoundError: the folder holds no such file.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / name).exists():
            held = sorted(file.name for file in path.iterdir())
            raise FileNotFoundError(
                f"{path} holds no {name}, as folders of audiocraft do; it holds {', '.join(held[:5]) or 'nothing'}."
            )
        path = path / name
    return path


def unpack(path: Path, content: Any) -> tuple[dict[str, Tensor], TrainingSettings]:
    """Return the weights and settings in the content of a file.

    Raises:
        ValueError: there are no weights, or they are not plain.
    """
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


# -- the language model ------------------------------------------------------------------------------------------------


def _language_model(
    path: Path, name: str, weights: Mapping[str, Tensor], num_heads: Any, num_layers: object
) -> tuple[MusicgenForCausalLM, str]:
    """The model that the sizes of weights make, on the meta device, and what to call it in errors."""
    table, linear = weights.get("emb.0.weight"), weights.get("transformer.layers.0.linear1.weight")
    text = weights.get(f"{_OUTPUT_PROJECTION}.weight")
    if table is None or linear is None or text is None or not table.ndim == linear.ndim == text.ndim == 2:
        held = ", ".join(list(weights)[:4])
        raise ValueError(
            f"{path} is no {name} checkpoint: of emb.0.weight, transformer.layers.0.linear1.weight and "
            f"{_OUTPUT_PROJECTION}.weight it does not hold all as matrices, but {len(weights)} keys such as {held}."
        )
    books, layers = count_parts(weights, "emb."), count_parts(weights, "transformer.layers.")
    (entries, dim), hidden = table.shape, linear.shape[0]
    if num_layers not in (None, layers):
        raise ValueError(
            f"{path} holds {layers} layers, and its settings say {shown(num_layers)}; copy or download it again."
        )
    if num_heads is None:
        raise ValueError(
            f"{path} does not tell the number of attention heads; pass num_heads (16 for the official small models, 24 "
            "for the medium ones, 32 for the large ones)."
        )
    if dim % whole("num_heads", num_heads):
        raise ValueError(f"num_heads={num_heads!r}; pass an integer that divides the width {dim}.")
    with torch.device("meta"):
        model = MusicgenForCausalLM(
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
        model.enc_to_dec_proj = nn.Linear(text.shape[1], dim)
    return model, f"a {name} of {books} codebooks, {layers} layers and width {dim}"


def _split(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with queries, keys and values apart, which stand one below the other in one matrix."""
    renamed: dict[str, Tensor] = {}
    for key, value in weights.items():
        if key.endswith(".in_proj_weight"):
            start = key.removesuffix("in_proj_weight")
            renamed |= {
                f"{start}{name}_proj.weight": part for name, part in zip("qkv", value.chunk(3), strict=False)
            }
        else:
            renamed[key] = value
    return renamed
