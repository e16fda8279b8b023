"""Language models as audiocraft exports them, in transformers' modules: MusicGen, AudioGen and MAGNeT.

A folder holds `state_dict.bin`, the language model, and `compression_state_dict.bin`, its codec or the name of one.
Both are `torch.save` files of a dict with the weights under "best_state", and the settings of the training run under
"xp.cfg", as YAML. The text encoder, a T5, is not included; the projection of its states is. All three models have the
same decoder, transformers' `MusicgenForCausalLM`; MAGNeT runs it without a causal mask.

Files are read with `torch.load(weights_only=True)` only, and every key is accounted for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MusicgenForCausalLM
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

from visual_spec.models.columns.audiocraft_settings import TrainingSettings, read_settings, shown
from visual_spec.models.core.checkpoints import Difference, fill, plain_weights, read_content, some
from visual_spec.models.core.settings import whole

LANGUAGE_MODEL, CODEC = "state_dict.bin", "compression_state_dict.bin"
KEEP = '{k: c[k] for k in ("best_state", "xp.cfg") if k in c}'  # what a file without pickle needs

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
# The kinds of models in the settings, and what reads them.
_READERS = {
    "transformer_lm": ("MusicGen", "AudioPipeline.from_audiocraft(folder, text_encoder, tokenizer)"),
    "transformer_lm_magnet": ("MAGNeT", "AudioPipeline.from_magnet(folder, text_encoder, tokenizer)"),
}
# Settings of all of them.
_COMMON: dict[str, tuple[Any, ...]] = {
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
    allowed: Mapping[str, tuple[Any, ...]],
    *,
    dtype: torch.dtype | None,
    num_heads: int | None = None,
) -> tuple[MusicgenForCausalLM, TrainingSettings]:
    """Return the decoder of an exported language model, and its settings.

    Args:
        source: `state_dict.bin`, or the folder that holds it.
        kind: of the model in the settings, "transformer_lm" or "transformer_lm_magnet".
        allowed: settings of this kind, and the values that transformers' modules compute.
        dtype: dtype of the weights; None keeps that of the file.
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
    if (found := config("lm_model", kind)) != kind:
        other = _READERS.get(found) if isinstance(found, str) else None
        raise ValueError(
            f"{path} holds a {shown(found)}, not {name}'s {kind!r}"
            + (
                f"; it is a {other[0]}, loaded by {other[1]}."
                if other
                else "; pass the file of another model."
            )
        )
    config.refuse_others(_COMMON | dict(allowed))
    heads = config("transformer_lm.num_heads", num_heads)
    model = _language_model(path, name, weights, heads, config("transformer_lm.num_layers"))
    dim, width = weights[f"{_OUTPUT_PROJECTION}.weight"].shape
    model.enc_to_dec_proj = nn.Linear(width, dim, device="meta")
    # These buffers are computed, not loaded; on the meta device they were not computed.
    positions: Any = model.model.decoder.embed_positions
    with torch.device("cpu"):
        positions.weights = positions.get_embedding(positions.num_positions, positions.embedding_dim)
    kept = weights["emb.0.weight"].dtype if dtype is None else dtype
    return fill(model, dict(_renamed(weights)), str(path), dtype=kept), config


def kind_of(source: str | os.PathLike) -> str:
    """Return the name of the model in an exported file or folder, "MusicGen" or "MAGNeT".

    Raises:
        FileNotFoundError, ValueError: as in `load_language_model`; or it holds a model of another kind.
    """
    path = named_file(source, LANGUAGE_MODEL)
    _, config = unpack(path, read_content(path, KEEP))
    found = config("lm_model")
    if not isinstance(found, str) or found not in _READERS:
        raise ValueError(
            f"{path} holds a {shown(found)} of audiocraft; those that are read are {' and '.join(_READERS)}."
        )
    return _READERS[found][0]


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


def check_keys(
    path: Path, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Refuse weights whose keys and shapes differ from those of `what`."""
    if difference := Difference.between(weights, shapes):
        raise ValueError(f"{path} does not hold {what}: {difference}.")


# -- the language model ------------------------------------------------------------------------------------------------


def _language_model(
    path: Path, name: str, weights: Mapping[str, Tensor], num_heads: Any, num_layers: Any
) -> MusicgenForCausalLM:
    """Return the model for weights whose keys and shapes are all right, on the meta device.

    Args:
        name: of the model, for errors.
        num_heads, num_layers: from the settings; None if they do not say.
    """
    table, linear = weights.get("emb.0.weight"), weights.get("transformer.layers.0.linear1.weight")
    text = weights.get(f"{_OUTPUT_PROJECTION}.weight")
    if table is None or linear is None or text is None or not table.ndim == linear.ndim == text.ndim == 2:
        held = ", ".join(list(weights)[:4])
        raise ValueError(
            f"{path} is no {name} checkpoint: of emb.0.weight, transformer.layers.0.linear1.weight and "
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
        for part in ("self_attn", "cross_attention"):
            shapes |= {
                f"{start}.{part}.in_proj_weight": (3 * dim, dim),
                f"{start}.{part}.out_proj.weight": (dim, dim),
            }
        for part in ("norm1", "norm_cross", "norm2"):
            shapes |= {f"{start}.{part}.weight": (dim,), f"{start}.{part}.bias": (dim,)}
        shapes |= {f"{start}.linear1.weight": (hidden, dim), f"{start}.linear2.weight": (dim, hidden)}
    check_keys(path, weights, shapes, f"a {name} of {books} codebooks, {layers} layers and width {dim}")
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
