"""T5 caption features for the official text-conditional LlamaGen: flan-t5-xl, left-padded, cached on disk.

Replaces `CaptionEncoder` in an `ImagePipeline`. A folder of these features is a plain transformers folder
(`config.json`, weights, tokenizer files), so an original flan-t5-xl folder or Hub id loads unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from visual_spec.files.whole import write_atomically, written_whole
from visual_spec.models.core.fingerprint import written
from visual_spec.models.core.offload import align_weights, decodes
from visual_spec.models.core.saved import check_there
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.models.text.caption_encoder import warn_cut
from visual_spec.models.text.captions import clean_caption

if TYPE_CHECKING:
    from transformers import T5EncoderModel

MAX_TOKENS = 120  # prefix length of the official text-conditional models


class T5Features(ModelMixin, ConfigMixin):
    """Maps captions to the last hidden states of a T5 encoder.

    Captions are cleaned twice and tokenized with their end token, padded to `max_words`. Each row of the features is
    then rotated so that its valid tokens are at its end, with zeros before them (LlamaGen, official text-conditional
    sampling code).

    Args:
        encoder: a transformers `T5EncoderModel`.
        tokenizer: its tokenizer.
        max_words: longest caption in tokens, the end token included; also the prefix length of the image model.
        cache_folder: folder that stores features, one file per caption; None stores none. Stored features are used only
            with the same weights, in the same dtype, for the same tokens.
        clean: whether captions are cleaned. Infinity does not clean them.
    """

    config_name = "features_config.json"

    def __init__(
        self,
        encoder: T5EncoderModel,
        tokenizer: Any,
        max_words: int = MAX_TOKENS,
        cache_folder: str | os.PathLike | None = None,
        clean: bool = True,
    ):
        super().__init__()
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.cache_folder = None if cache_folder is None else Path(cache_folder)
        self.register_to_config(max_words=max_words, clean=clean)
        self._fingerprint: tuple[object, str] | None = None  # of the weights as they were

    # -- loading and saving --------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        *,
        torch_dtype: torch.dtype | None = None,
        max_words: int | None = None,
        cache_folder: str | os.PathLike | None = None,
        clean: bool | None = None,
        **loading: Any,
    ) -> Self:
        """Load a folder or Hub id of a T5, or what `save_pretrained` wrote.

        Args:
            torch_dtype: dtype of the weights; None: float32, as diffusers loads.
            max_words: None: as saved, or 120.
            cache_folder: see the class.
            clean: None: as saved, or true.
            loading: revision, token, cache_dir, local_files_only, variant and device_map are passed on to transformers.

        Raises:
            ValueError: there is no such folder, or it has no configuration, or another model's.
            OSError: nothing can be fetched under a Hub id.
        """
        from transformers import AutoConfig, AutoTokenizer, T5EncoderModel

        check_there(folder, "config.json", loading)
        folder = os.fspath(folder)
        if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, "config.json")):
            raise ValueError(
                f"{folder} has no config.json; pass a folder of flan-t5-xl as transformers saves it (config.json, "
                "weights, tokenizer files), or its Hub id 'google/flan-t5-xl'."
            )
        names = ("revision", "token", "cache_dir", "local_files_only")
        options = {name: loading[name] for name in names if loading.get(name) is not None}
        config = AutoConfig.from_pretrained(folder, **options)
        if config.model_type not in ("t5", "mt5", "umt5"):
            raise ValueError(
                f"{folder} holds a {config.model_type} model; LlamaGen reads the features of a T5 encoder "
                "(officially flan-t5-xl)."
            )
        of_weights = {
            name: loading[name] for name in ("device_map", "variant") if loading.get(name) is not None
        }
        dtype = torch_dtype or torch.float32
        encoder = T5EncoderModel.from_pretrained(folder, dtype=dtype, **options, **of_weights)
        align_weights(encoder)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        saved = os.path.join(folder, cls.config_name)
        kept: dict[str, Any] = json.loads(Path(saved).read_text()) if os.path.exists(saved) else {}
        longest = max_words or kept.get("max_words", MAX_TOKENS)
        cleaned = kept.get("clean", True) if clean is None else clean
        return cls(encoder, tokenizer, longest, cache_folder, cleaned).eval()

    def save_pretrained(
        self, save_directory: str | os.PathLike, *, variant: str | None = None, **options: Any
    ) -> None:
        """Write encoder, tokenizer, `max_words` and `clean` into one folder.

        Args:
            variant: goes into the names of the weights' files, such as "fp16".
            options: max_shard_size is passed on to transformers.
        """
        known = {name: options[name] for name in ("max_shard_size",) if options.get(name)}
        with written_whole(save_directory) as folder:
            self.encoder.save_pretrained(folder, variant=variant, **known)
            self.tokenizer.save_pretrained(folder)
            self.save_config(folder)

    # -- the interface of CaptionEncoder -------------------------------------------------------------------------------

    @property
    def max_words(self) -> int:
        """Longest caption in tokens."""
        return self.config["max_words"]

    @property
    def dim(self) -> int:
        """Width of the features, the caption width of the image model (2048 for flan-t5-xl)."""
        return self.encoder.config.d_model

    def unknown_words(self, prompts: list[str]) -> list[str]:
        """Return no words: T5 spells every word in pieces."""
        return []

    def check_prompts(self, prompts: list[str]) -> None:
        """Refuse, by ValueError, prompts of which cleaning leaves nothing. (The official code draws something.)"""
        for prompt in prompts:
            if not self._clean(prompt):
                raise ValueError(f"prompt {prompt!r} has no words; give at least one")

    def word_ids(self, prompts: list[str]) -> Tensor:
        """Return token ids `[B, max_words]`, padded at the end as T5 was trained.

        What is beyond `max_words` tokens, of which the last is the end token, is cut off with a warning. (The official
        code cuts without one.)

        Raises:
            ValueError: cleaning leaves nothing of a prompt.
        """
        self.check_prompts(prompts)
        rows = []
        for prompt in prompts:
            ids = self.tokenizer(self._clean(prompt)).input_ids
            if len(ids) > self.max_words:
                *ids, end = ids
                left_out = self.tokenizer.decode(ids[self.max_words - 1 :])
                warn_cut(prompt, left_out, self.max_words - 1, "tokens")
                ids = [*ids[: self.max_words - 1], end]
            rows.append(ids + [self._padding] * (self.max_words - len(ids)))
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def _clean(self, prompt: str) -> str:
        return clean_caption(clean_caption(prompt)) if self.config["clean"] else prompt.strip()

    @decodes
    def forward(self, prompts: list[str] | Tensor) -> TextCondition:
        """Return features `[B, max_words, C]` and mask of prompts, or of token ids `[B, max_words]`.

        Raises:
            ValueError: as in `word_ids`.
        """
        ids = prompts if isinstance(prompts, Tensor) else self.word_ids(prompts)
        mask = ids != self._padding
        features = self._encode(ids, mask) if self.cache_folder is None else self._through_cache(ids, mask)
        return left_padded(features, mask)

    @property
    def _padding(self) -> int:
        return self.tokenizer.pad_token_id

    def _encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state

    # -- the cache -----------------------------------------------------------------------------------------------------

    def _through_cache(self, ids: Tensor, mask: Tensor) -> Tensor:
        paths = [self._path(row[valid]) for row, valid in zip(ids, mask, strict=True)]
        out = torch.zeros(*ids.shape, self.dim, dtype=self.dtype, device=ids.device)
        absent = []
        for index, (path, valid) in enumerate(zip(paths, mask, strict=True)):
            features = self._read(path, int(valid.sum()))
            if features is None:
                absent.append(index)
            else:
                out[index, valid] = features
        if absent:
            out[absent] = self._encode(ids[absent], mask[absent])
            for index in absent:
                features = out[index, mask[index]].contiguous().cpu()
                write_atomically(paths[index], save({"features": features}), overwrite=True)
        return out

    def _path(self, ids: Tensor) -> Path:
        assert self.cache_folder is not None
        name = hashlib.sha256(f"{self._weights_fingerprint()} {ids.tolist()}".encode()).hexdigest()
        return self.cache_folder / name[:2] / f"{name}.safetensors"

    def _weights_fingerprint(self) -> str:
        """A hash of some numbers of every weight, which distinguishes encoders, revisions and dtypes; names do not."""
        now = self.dtype, written(self.encoder)
        if self._fingerprint is None or self._fingerprint[0] != now:
            digest = hashlib.sha256()
            for name, weight in self.encoder.state_dict().items():
                flat = weight.flatten()
                some = flat[:: max(1, len(flat) // 16)][:16].double().cpu()
                digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {some.tolist()}".encode())
            self._fingerprint = now, digest.hexdigest()
        return self._fingerprint[1]

    def _read(self, path: Path, length: int) -> Tensor | None:
        """Return features `[length, C]`, or None if there are no readable ones."""
        try:
            with safe_open(path, "pt") as file:
                features = file.get_tensor("features")
        except (OSError, SafetensorError):
            return None
        fits = features.shape == (length, self.dim) and features.dtype == self.dtype
        return features.to(self.device) if fits else None


def left_padded(features: Tensor, mask: Tensor) -> TextCondition:
    """Rotate every row so that its valid tokens are at its end, and zero the rest.

    Args:
        features: `[B, T, C]`, valid tokens first.
        mask: bool `[B, T]`, true at valid tokens.
    """
    length = mask.shape[1]
    columns = torch.arange(length, device=mask.device)
    source = (columns + mask.sum(1, keepdim=True)) % length  # [B, T]
    rotated = features.gather(1, source[..., None].expand_as(features))
    flipped = mask.flip(1)
    return TextCondition(rotated.masked_fill(~flipped[..., None], 0), flipped)
