"""Text to music by models of codec tokens: caption -> features -> columns of codes -> waves."""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, Self

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from einops import repeat
from torch import Tensor
from transformers import (
    EncodecModel,
    MusicgenForCausalLM,
    MusicgenForConditionalGeneration,
    MusicgenMelodyForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5EncoderModel,
)

from visual_spec.models.columns.encodec import check_codec, encode_waves
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition, MusicgenModules, text_condition
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.core.offload import at_hand
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.audio_files import Waves, prepare_clip
from visual_spec.pipelines.audio_stream import ClipWindow, WaveStream, decode_windows, plan_windows
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.output import AudioPipelineOutput
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.pipelines.steps import Generators, StepCallback, StepListener, check_each, planned_steps
from visual_spec.pipelines.texts import ReadsText, Texts, as_condition, check_words, tokenized
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.trace import DecodeTrace
from visual_spec.samplers.registry import MASKED

AudioListener = Callable[[Any, int, Tensor], object]

# Seconds of a window: no model is trained on an hour, and what a window needs is allocated at once.
_LONGEST = 3600


class AudioPipeline(ReadsText):
    """Plays music from prompts.

    Args:
        transformer: a `MusicgenForCausalLM` that reads the text encoder's features as they are, or a whole
            `MusicgenForConditionalGeneration` or `MusicgenMelodyForConditionalGeneration`, which brings its own text
            encoder, projection and codec. None here, or for the sampler: the pipeline only encodes prompts
            (`encode_prompt`).
        codec: an `EncodecModel`. None: the codec of a whole MusicGen.
        text_encoder: a `CaptionEncoder`, or an encoder of transformers with its `tokenizer`. None: the encoder of a
            whole MusicGen; if there is none either, pass `prompt_embeds`.
        sampler: how columns of codes are decoded, `ColumnAutoregressiveSampler`, `ColumnJacobiSampler` or
            `DraftedColumnSampler`; for a masked model `MaskedSampler`. Swap it freely (`pipe.sampler = ...`).
        tokenizer: of a text encoder of transformers.
        drafter: what `DraftedColumnSampler` drafts with: a `ColumnEagleDrafter` trained for this transformer, or a
            smaller MusicGen over the same text features and codec. Set it freely (`pipe.drafter = ...`).
        default_guidance_scale, default_temperature, default_top_k, default_top_p: used where a call names none; saved
            with the pipeline.
        max_audio_length_in_s: the length that the model was trained on. Longer clips are played by a sliding window.
        pattern: how the codebooks are laid out in steps, a name of `visual_spec.models.columns.patterns.LAYOUTS`.
        pattern_settings: arguments of the layout by name, such as {"group_size": 2} of "grouped" or {"levels": [0, 0,
            1, 1]} of "flat", two calls a frame.
        padding: what padding of a caption is to the decoder, see `MusicgenModules`.
        masked: whether the transformer was trained to fill in hidden codes (MAGNeT), rather than to go on.
        reach: frames to either side that a masked model sees, see `MagnetModel`.

    Raises:
        TypeError: a component that could not be saved, or a transformer of another kind.
        ValueError: an unknown pattern, or one without its settings; a codec with other codebooks than the transformer,
            a length below one frame.

    Example:
        >>> pipe = AudioPipeline.from_pretrained("tunes")
        >>> pipe("a slow sad organ melody in A minor").save("tune.wav")
    """

    model_cpu_offload_seq = "text_encoder->drafter->transformer"
    # A clip that is streamed is heard while it is decoded.
    _exclude_from_cpu_offload = ["codec"]
    _optional_components = ["codec", "text_encoder", "tokenizer", "drafter"]
    _callback_tensor_inputs = ["lengths"]
    _output_types = ("np", "pt", "latent")
    _sample = "clip"
    _each = "num_waveforms_per_prompt"
    _unseen = "the music will not tell"
    _fitting_drafter = (
        "a ColumnEagleDrafter trained for this model (python -m visual_spec.training.column_drafter)"
    )

    codec: Any
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
        drafter: ModelMixin | MusicgenForCausalLM | MusicgenForConditionalGeneration | None = None,
        pattern_settings: dict[str, Any] | None = None,
    ): ...

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """As `VisualPipeline.from_pretrained`. Without a dtype: float32, whatever the files hold."""
        if kwargs.get("dtype") is None and kwargs.get("torch_dtype") is None:
            kwargs["dtype"] = torch.float32  # diffusers' own default misses the models of transformers
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_musicgen(
        cls,
        model: MusicgenForConditionalGeneration | MusicgenMelodyForConditionalGeneration,
        tokenizer: Any,
        sampler: SchedulerMixin | None = None,
        **settings: Any,
    ) -> Self:
        """A pipeline around a MusicGen of transformers, with the published guidance 3 and top-k 250.

        Args:
            model: a `MusicgenForConditionalGeneration` or `MusicgenMelodyForConditionalGeneration`, mono or stereo; it
                is not changed.
            tokenizer: of its text encoder, or the processor that holds it.
            sampler: default `ColumnAutoregressiveSampler()`, plain decoding.
            settings: of the class, in place of the published ones.

        Raises:
            TypeError, ValueError: as the class.
        """
        published = {"default_top_k": 250, "max_audio_length_in_s": 30.0}
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        return cls(model, None, None, sampler or make_sampler("columns"), tokenizer, **published | settings)

    @classmethod
    def from_audiocraft(
        cls,
        source: str | os.PathLike,
        text_encoder: T5EncoderModel | str | os.PathLike,
        tokenizer: Any,
        *,
        codec: EncodecModel | None = None,
        dtype: torch.dtype | None = torch.float32,
        sampler: SchedulerMixin | None = None,
        **settings: Any,
    ) -> Self:
        """A pipeline around an official MusicGen or AudioGen checkpoint of audiocraft, mono or stereo.

        It has the published law, and treats padding as audiocraft does.

        Args:
            source: the folder with `state_dict.bin`, and `compression_state_dict.bin` unless `codec` is given.
            text_encoder, tokenizer: the T5 that the checkpoint names (`t5-base` for music), as transformers loads it.
            codec: in place of the folder's.
            dtype: of the decoder, as in `from_magnet`.
            sampler, settings: as in `from_musicgen`.

        Raises:
            FileNotFoundError, OSError, ValueError: as `visual_spec.models.columns.musicgen_checkpoint.load_musicgen`.
        """
        from visual_spec.models.columns.musicgen_checkpoint import load_musicgen

        model, duration = load_musicgen(source, text_encoder, codec=codec, dtype=dtype)
        published = _published(model.generation_config, duration)
        return cls.from_musicgen(model, tokenizer, sampler, **published | settings)

    @classmethod
    def from_magnet(
        cls,
        source: str | os.PathLike,
        text_encoder: T5EncoderModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        codec: EncodecModel | None = None,
        dtype: torch.dtype | None = torch.float32,
        **settings: Any,
    ) -> Self:
        """A pipeline around an official MAGNeT checkpoint, with the steps, span and law it was published with.

        It cannot be saved: what projects the text has no place in a folder of transformers. Keep the official files.
        Audiocraft's `use_sampling=False` is the setting `greedy` of `MaskedSampler`.

        Args:
            source, text_encoder, tokenizer, codec: as in `from_audiocraft`.
            dtype: of the transformer, which is loaded onto the CPU, where audiocraft computes in float32. Pass
                torch.float16 for a GPU; None keeps the dtype of the file, float16 of official ones.
            settings: of the class, in place of the published ones.

        Raises:
            FileNotFoundError, OSError, ValueError: as `load_magnet` and `load_audiocraft_codec`.
        """
        from visual_spec.models.columns.audiocraft_codec import load_audiocraft_codec
        from visual_spec.models.masked.magnet_checkpoint import load_magnet
        from visual_spec.samplers.masked.presets import PRESETS

        model, own = load_magnet(source, dtype=dtype)
        codec = load_audiocraft_codec(source) if codec is None else codec
        steps = {"steps": own.steps, "span": own.span, "least_guidance": own.least_guidance}
        sampler = PRESETS["magnet"].sampler(**steps)
        published = _published(own, own.duration) | {
            "default_top_p": own.top_p,
            "masked": True,
            "reach": own.reach,
        }
        return cls(model, codec, text_encoder, sampler, tokenizer, **published | settings)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As `DiffusionPipeline.save_pretrained`.

        Raises:
            ValueError: an official MAGNeT, whose projection of the text would be lost.
        """
        if isinstance(self._model, MusicgenForCausalLM) and hasattr(self._model, "enc_to_dec_proj"):
            raise ValueError(
                "this transformer projects its text by a layer that transformers would not load again; keep the "
                "official files, and load them with AudioPipeline.from_magnet."
            )
        super().save_pretrained(save_directory, *args, **kwargs)

    # -- what the components are ---------------------------------------------------------------------------------------

    def _check_parts(self) -> None:
        if self.transformer is None:
            return  # it encodes prompts
        modules = MusicgenModules(self._model, self.config["padding"])
        self._pattern(modules.num_codebooks)
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
        """The transformer, uncompiled: its modules run, not its `forward`."""
        return getattr(self.transformer, "_orig_mod", self.transformer)

    @property
    def _codec(self) -> Any:
        return getattr(self._model, "audio_encoder", None) if self.codec is None else self.codec

    @property
    def _fills_in(self) -> bool:
        """Whether the model fills in hidden codes, rather than going on."""
        return MASKED in self.calls

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

    def _pattern(self, codebooks: int) -> CodebookPattern | None:
        """The layout of the configuration; None: the model's own delay, where both channels of stereo lag alike."""
        settings = dict(self.config["pattern_settings"] or {})
        pattern = CodebookPattern.named(self.config["pattern"], codebooks, **settings)
        return pattern if settings or self.config["pattern"] != "delay" else None

    def _columns(self, model: PreTrainedModel, kept: int, new: int) -> MusicgenColumnModel:
        """A MusicGen over a window of frames that are kept from before, and frames that are new."""
        pattern = self._pattern(MusicgenModules(model).num_codebooks)
        padding = self.config["padding"]
        return MusicgenColumnModel(model, kept + new, prompt_frames=kept, padding=padding, pattern=pattern)

    def _window(self, kept: int, new: int) -> ClipWindow:
        """What decodes a window of frames that are kept from before, and frames that are new."""
        if self._fills_in:
            padding, reach = self.config["padding"], self.config["reach"]
            model = MagnetModel(self._model, kept + new, padding=padding, reach=reach)
        else:
            model = self._columns(self._model, kept, new)
        return ClipWindow(kept, model, self.sampler_parts(kept, new))

    def _decoded(self) -> tuple[object, dict[str, Any]] | None:
        return None if self.transformer is None else self._window(0, self.max_frames)[1:]

    def sampler_parts(self, kept: int = 0, new: int | None = None) -> dict[str, Any]:
        """What the sampler asks for beside the model: a drafter, or the codes of each codebook.

        Args:
            kept, new: frames of the window: those kept from before, and those to decode (None: `max_frames`).
        """
        if getattr(self.sampler, "needs_drafter", False):
            if isinstance(self.drafter, ModelMixin):
                return {"drafter": self.drafter}
            return {"drafter": self._columns(self.drafter, kept, self.max_frames if new is None else new)}
        if not getattr(self.sampler, "needs_codebook", False):
            return {}
        with at_hand(self._codec):
            books = torch.stack([layer.codebook.embed for layer in self._codec.quantizer.layers])
        # Both channels of stereo use the codec's codebooks, and their codes of one level stand side by side.
        return {"codebook": repeat(books, "k v d -> (k c) v d", c=self.channels)}

    # -- input ---------------------------------------------------------------------------------------------------------

    @property
    def _needed(self) -> tuple[str, ...]:  # type: ignore[override]
        return "transformer", "sampler", *([] if self._codec is not None else ["codec"])

    def _clip(self, audio: Waves | None, rate: int | None, count: int) -> Tensor | None:
        """The clip to go on from as [1 or count, C, N] at the codec's rate, or None; `count`: prompts."""
        if audio is not None:
            clip = prepare_clip(audio, rate, rate=self.sampling_rate, channels=self.channels)
            check_each(len(clip), "clips of audio", count)
            return clip
        if rate is not None:
            raise ValueError(f"sampling_rate={rate} given without audio; leave it out.")
        return None

    def plan(
        self, audio_length_in_s: float | None, extend_stride_in_s: float | None, given_frames: int = 0
    ) -> list[tuple[int, int]]:
        """The windows that a clip is decoded in, see `plan_windows`.

        Args:
            given_frames: of the clip to go on from.

        Raises:
            ValueError: as `plan_windows`.
        """
        limit = self.config["max_audio_length_in_s"]
        return plan_windows(
            limit if audio_length_in_s is None else audio_length_in_s,
            extend_stride_in_s,
            given_frames,
            limit=limit,
            frame_rate=self.frame_rate,
            span=self.sampler.config.get("span", 1) if self._fills_in else 1,
        )

    def make_condition(
        self, prompt: str | list[str] | None = None, *, melody_features: Tensor | None = None, **kwargs: Any
    ) -> MusicCondition:
        """As `ReadsText.make_condition`; `melody_features` as for a call."""
        return _with_melody(super().make_condition(prompt, **kwargs), melody_features)

    @property
    def _feature_dtype(self) -> None:
        return None

    def _check_words(self, texts: list[str]) -> None:
        own = getattr(self._model, "text_encoder", None)
        encoder = own if self.text_encoder is None else self.text_encoder
        check_words(encoder, self.tokenizer, texts)

    def _encode(self, texts: list[str]) -> TextCondition:
        if hasattr(self.text_encoder, "word_ids"):
            return super()._encode(texts)
        inputs = tokenized(self.tokenizer, texts).to(self._execution_device)
        owner, encoder = (self._model,) * 2 if self.text_encoder is None else (self, self.text_encoder)
        with at_hand(encoder):
            return text_condition(owner, inputs["input_ids"], inputs["attention_mask"])

    # -- playing -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | list[str] | None = None,
        audio_length_in_s: float | None = None,
        extend_stride_in_s: float | None = None,
        audio: Waves | None = None,
        sampling_rate: int | None = None,
        num_waveforms_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        melody_features: Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        stretch_in_s: float = 0.5,
        callback_on_audio: AudioListener | None = None,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_until: int | None = None,
        output_logprobs: bool = False,
    ) -> AudioPipelineOutput:
        """Play.

        Args:
            prompt: one prompt or a list.
            negative_prompt: what guidance leads away from, in place of no text; one for all prompts, or one for each.
            audio_length_in_s: rounded to whole frames; None: the length that the model was trained on. A masked model
                whose sampler decodes spans of frames plays whole spans: of 10 s at 50 Hz in spans of 3, 498 frames.
            extend_stride_in_s: for longer clips: the window of the trained length moves by so many seconds, and what
                is left in it of the music so far is what the model goes on from. The memory of the decoding is that
                of one window.
            audio, sampling_rate: a clip to go on from, [N], [C, N] or [B, C, N], and its rate in Hz. It counts in
                `audio_length_in_s`, and what comes out begins with it, as the codec renders it.
            guidance_scale: `s` of `unconditional + s * (conditional - unconditional)`; above 1 each target call runs
                the unconditional rows too, at 1 or below none.
            temperature, top_k, top_p: the law of a code (`TokenLaw`). None: the model's own, `default_top_k` and so on.
            guidance_until: columns from this one on, of every window, are drawn without guidance.
            num_waveforms_per_prompt: clips of each prompt, one after the other.
            generator: one `torch.Generator` for the batch, or a list of one per clip; of any device. With a list, a
                clip depends on its own generator only.
            prompt_embeds, prompt_attention_mask: features [prompts, T, C] and their mask [prompts, T] (true at words),
                in place of `prompt`, as `encode_prompt` gives them; likewise for `negative_prompt`.
            melody_features: of a MusicGen Melody, the chroma of a tune that the clips follow, the `input_features` of
                transformers' processor: [1 or prompts, L, chroma]. Every window of a longer clip follows the same tune.
            output_type, return_dict: "np", "pt", or "latent" for the codes [B, K, T]; False returns a tuple.
            stretch_in_s: codes become waves in stretches of so many seconds, streamed or not.
            callback_on_audio: called as (pipe, start, waves) for every stretch, as soon as its columns are committed:
                `waves`, float32 [B, C, m] on the CPU, begins at sample `start`. All of them are `audios`, bit by bit.
                A masked model knows no column before it knows its window.
            callback_on_step_end: called as (pipe, step, timestep, kwargs) after every target call: `step` is the
                index of the call (0: the first prefill), `timestep` the number of columns that the slowest clip has.
                It returns None, or `kwargs` unchanged. After `pipe._interrupt = True` the call ends, with the leading
                frames that all clips have; a masked model has none of an unfinished window.
            callback_on_step_end_tensor_inputs: which tensors `kwargs` holds: "lengths", columns committed [B].
            output_logprobs: keep the log-probability of each code, `trace.logprobs` and `trace.model_logprobs`, by
                column as the trace [B, S, K] (of a masked model by frame); of a longer clip, window after window.

        Raises:
            ValueError, TypeError: bad input, before any computation.
            FloatingPointError: the model gave non-finite logits; names the slot.
        """
        law = self.make_law(guidance_scale, temperature, top_k, top_p, guidance_until)
        negative = negative_prompt, negative_prompt_embeds, negative_prompt_attention_mask
        texts = Texts(prompt, prompt_embeds, prompt_attention_mask, *negative)
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        self.check_inputs(texts, num_waveforms_per_prompt, law, generator, output_type)
        self.check_logprobs(output_logprobs)
        if not (math.isfinite(stretch_in_s) and stretch_in_s > 0):
            raise ValueError(f"stretch_in_s={stretch_in_s}; pass the seconds that are made audible at once.")
        if melody_features is not None:
            _check_melody(melody_features, self._model, len(texts))
        clip = self._clip(audio, sampling_rate, len(texts))
        frames = 0 if clip is None else math.ceil(clip.shape[-1] / self.samples_per_frame)
        plan = self.plan(audio_length_in_s, extend_stride_in_s, frames)
        with self.running():
            encoded = self.encode_prompt(texts, num_waveforms_per_prompt=num_waveforms_per_prompt)
            condition = _with_melody(as_condition(*encoded), melody_features)
            known = self._known_codes(clip, len(condition.mask))
            stream = None
            if output_type != "latent" or callback_on_audio is not None:
                total = known.shape[-1] + sum(new for _, new in plan)
                stretch = max(1, round(stretch_in_s * self.frame_rate))
                play = None if callback_on_audio is None else functools.partial(callback_on_audio, self)
                stream = WaveStream(self._codec, self.channels, total, stretch, play)
            codes, trace = self.draw_codes(
                plan, condition, known, law, generator, listener, stream, output_logprobs
            )
            waves = codes if output_type == "latent" or stream is None else stream.waves()
        made: Any = (waves.numpy() if output_type == "np" else waves, self.sampling_rate, codes, trace)
        return AudioPipelineOutput(*made) if return_dict else made

    def draw_codes(
        self,
        plan: list[tuple[int, int]],
        condition: MusicCondition,
        known: Tensor,
        law: TokenLaw,
        generator: Generators,
        listener: StepListener,
        stream: WaveStream | None = None,
        output_logprobs: bool = False,
    ) -> tuple[Tensor, DecodeTrace]:
        """Let the sampler decode window after window, beside a progress bar. Returns codes [B, K, T] and the trace.

        Args:
            plan: the windows, see `plan`.
            known: codes [B, K, P] of a clip to go on from; P = 0 without one.
            listener: what tells the callback about steps.
            stream: what makes waves of the columns as they come.
            output_logprobs: as of the sampler.
        """
        made = {frames: self._window(*frames) for frames in set(plan)}
        windows = [made[frames] for frames in plan]
        self._num_timesteps = sum(
            planned_steps(self.sampler, one.model, {}, one.model.grid.width) for one in windows
        )
        self._guidance_scale = law.guidance_scale
        drafter = self.drafter if getattr(self.sampler, "needs_drafter", False) else None
        with at_hand(self._model, self._codec, drafter):
            codes, trace = decode_windows(
                self.sampler,
                condition,
                known,
                windows,
                progress_bar=self.progress_bar,
                stream=stream,
                listener=lambda step, lengths: listener(step, lambda: int(lengths.min()), lengths=lengths),
                law=law,
                generator=generator,
                **({"output_logprobs": True} if output_logprobs else {}),
            )
        self.last_trace = trace
        return codes, trace

    def _known_codes(self, clip: Tensor | None, batch_size: int) -> Tensor:
        """Codes [B, K, P] of the clip to go on from; P = 0 without one."""
        if clip is None:
            count = MusicgenModules(self._model).num_codebooks
            return torch.zeros(batch_size, count, 0, dtype=torch.long, device=self._execution_device)
        with at_hand(self._model if self.codec is None else self.codec):
            codes = encode_waves(self._codec, clip).to(self._execution_device)
        return codes.repeat_interleave(batch_size // len(codes), 0)


def _with_melody(text: TextCondition, melody: Tensor | None) -> MusicCondition:
    if melody is not None:
        melody = melody.to(text.mask.device).repeat_interleave(len(text.mask) // len(melody), 0)
    return MusicCondition(text.features, text.mask, melody=melody, negative=text.negative)


def _published(own: Any, duration: float) -> dict[str, Any]:
    """Settings that files of MusicGen and of MAGNeT name."""
    return {
        "default_guidance_scale": own.guidance_scale,
        "default_temperature": own.temperature,
        "default_top_k": own.top_k,
        "max_audio_length_in_s": duration,
        "padding": "zeros",
    }


def _check_melody(features: Tensor, model: PreTrainedModel, count: int) -> None:
    """Refuse the chroma of tunes that the model does not follow, or of another number than `count` prompts."""
    chroma = getattr(model.config, "num_chroma", None)
    if chroma is None:
        raise ValueError(
            "melody_features given, but this model follows no tune; load a MusicgenMelodyForConditionalGeneration, "
            "or leave them out."
        )
    shape = tuple(features.shape)
    if len(shape) != 3 or shape[0] not in (1, count) or not shape[1] or shape[2] != chroma:
        raise ValueError(
            f"melody_features of shape {shape} for {count} prompts; pass [1 or {count}, L, {chroma}], the "
            "input_features of the model's processor."
        )
