"""The components of a music pipeline: what fits together, what they say about clips, and the models of a window."""

import math
from typing import Any

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from einops import repeat
from transformers import (
    EncodecModel,
    MusicgenForCausalLM,
    MusicgenForConditionalGeneration,
    MusicgenMelodyForConditionalGeneration,
    PreTrainedTokenizerBase,
    T5EncoderModel,
)

from visual_spec.models.columns.encodec import check_codec
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicgenModules
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.columns.stacks import check_stacked
from visual_spec.models.core.offload import at_hand
from visual_spec.models.drafters.column_eagle import ColumnEagleDrafter
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.output import AudioPipelineOutput
from visual_spec.pipelines.texts import ReadsText
from visual_spec.samplers.registry import MASKED

_LONGEST = (
    3600  # seconds of a window: no model is trained on an hour, and what a window needs is allocated at once
)


class AudioParts(ReadsText):
    """The components of an `AudioPipeline`, which says what they are.

    Raises:
        TypeError, ValueError: as `AudioPipeline`.
    """

    model_cpu_offload_seq = "text_encoder->drafter->transformer"
    # A clip that is streamed is heard while it is decoded.
    _exclude_from_cpu_offload = ["codec"]
    _optional_components = ["codec", "text_encoder", "tokenizer", "drafter"]
    _callback_tensor_inputs = ["lengths"]
    _output_types = ("np", "pt", "latent")
    _sample = "clip"
    _output = AudioPipelineOutput
    _each = "num_waveforms_per_prompt"
    _unseen = "the music will not tell"
    _fitting_drafter = (
        "a ColumnEagleDrafter trained for this model (python -m visual_spec.training.column_drafter)"
    )

    transformer: Any
    codec: Any
    text_encoder: Any
    tokenizer: Any

    @registers
    def __init__(
        self,
        transformer: MusicgenForCausalLM
        | MusicgenForConditionalGeneration
        | MusicgenMelodyForConditionalGeneration
        | None,
        codec: EncodecModel | None,
        text_encoder: CaptionEncoder | T5EncoderModel | None,
        sampler: SchedulerMixin | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        default_guidance_scale: float = 3.0,
        default_top_k: int = 0,
        max_audio_length_in_s: float = 30.0,
        pattern: str = "delay",
        padding: str = "masked",
        default_temperature: float = 1.0,
        default_top_p: float = 1.0,
        masked: bool = False,
        reach: int | None = 5,
        drafter: ColumnEagleDrafter | MusicgenForCausalLM | MusicgenForConditionalGeneration | None = None,
        pattern_settings: dict[str, Any] | None = None,
    ): ...

    # -- what the parts are --------------------------------------------------------------------------------------------

    @property
    def _fills_in(self) -> bool:
        """Whether the model fills in hidden codes, rather than going on."""
        return MASKED in self.calls

    def _check_parts(self) -> None:
        if self.transformer is None:
            return  # it encodes prompts
        modules = MusicgenModules(self._model, self.config["padding"])
        if (pattern := self._pattern(modules.num_codebooks)) is not None and pattern.stacked:
            check_stacked(pattern)
        if self._codec is None:
            return  # it makes codes, which nobody hears
        check_codec(self._codec)
        books = len(self._codec.quantizer.layers) * self.channels
        size = self._codec.config.codebook_size
        if (modules.num_codebooks, modules.vocab_size) != (books, size):
            raise ValueError(
                f"the transformer predicts {modules.num_codebooks} codebooks of {modules.vocab_size} codes, but the "
                f"codec has {books} of {size}; load both from the same model."
            )
        length = self.config["max_audio_length_in_s"]
        if not (length <= _LONGEST and self.max_frames >= 1):
            raise ValueError(
                f"max_audio_length_in_s={length}; pass the length that the model was trained on, at least one frame of "
                f"{1 / self.frame_rate:g} s and at most {_LONGEST} s."
            )

    @property
    def _model(self) -> Any:
        return getattr(
            self.transformer, "_orig_mod", self.transformer
        )  # the decoder's parts are run, not `forward`

    @property
    def _codec(self) -> Any:
        return getattr(self._model, "audio_encoder", None) if self.codec is None else self.codec

    @property
    def channels(self) -> int:
        """1, or 2 of a stereo model."""
        config = self._model.config
        return getattr(config, "decoder", config).audio_channels

    @property
    def sampling_rate(self) -> int:
        """Samples per second."""
        return self._codec.config.sampling_rate

    @property
    def samples_per_frame(self) -> int:
        """Samples that a frame of codes becomes."""
        return math.prod(self._codec.config.upsampling_ratios)

    @property
    def frame_rate(self) -> float:
        """Frames of codes per second."""
        return self.sampling_rate / self.samples_per_frame

    @property
    def max_frames(self) -> int:
        """Frames of the longest clip that is played in one go."""
        return round(self.config["max_audio_length_in_s"] * self.frame_rate)

    def _window_model(self, num_frames: int, prompt_frames: int) -> MusicgenColumnModel | MagnetModel:
        if self._fills_in:
            settings = {"padding": self.config["padding"], "reach": self.config["reach"]}
            return MagnetModel(self._model, num_frames, **settings)
        return self._columns_of(self._model, num_frames, prompt_frames)

    def _window_drafter(self, num_frames: int, prompt_frames: int) -> Any:
        if isinstance(self.drafter, ColumnEagleDrafter):
            return self.drafter
        return self._columns_of(self.drafter, num_frames, prompt_frames)

    def _columns_of(self, model: Any, num_frames: int, prompt_frames: int) -> MusicgenColumnModel:
        settings: dict[str, Any] = {"padding": self.config["padding"]}
        settings["pattern"] = self._pattern(MusicgenModules(model).num_codebooks)
        return MusicgenColumnModel(model, num_frames, prompt_frames=prompt_frames, **settings)

    def _pattern(self, codebooks: int) -> CodebookPattern | None:
        """Return the layout of the configuration; None is that of the model: of stereo, both channels lag alike.

        Raises:
            ValueError: as `CodebookPattern.named`.
        """
        settings = dict(self.config["pattern_settings"] or {})
        pattern = CodebookPattern.named(self.config["pattern"], codebooks, **settings)
        return pattern if settings or self.config["pattern"] != "delay" else None

    def _decoded(self) -> tuple[Any, dict[str, Any]] | None:
        if self.transformer is None:
            return None
        parts = self.sampler_parts()
        if (make_drafter := parts.pop("make_drafter", None)) is not None:
            parts["drafter"] = make_drafter(self.max_frames, 0)
        return self._window_model(self.max_frames, 0), parts

    def sampler_parts(self) -> dict[str, Any]:
        """What the sampler asks for beside the model: a drafter for each window, the codes of each codebook."""
        if getattr(self.sampler, "needs_drafter", False):
            return {"make_drafter": self._window_drafter}
        if not getattr(self.sampler, "needs_codebook", False):
            return {}
        with at_hand(self._codec):
            books = torch.stack([layer.codebook.embed for layer in self._codec.quantizer.layers])
        # Both channels of stereo use the codec's codebooks, and their codes of one level stand side by side.
        return {"codebook": repeat(books, "k v d -> (k c) v d", c=self.channels)}
