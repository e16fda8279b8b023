"""Text to music by models of codec tokens: caption -> features -> columns of codes -> waves."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor
from transformers import (
    EncodecModel,
    MusicgenForCausalLM,
)

from visual_spec.models.columns.encodec import encode_waves
from visual_spec.models.columns.musicgen_modules import MusicCondition, MusicgenModules, text_condition
from visual_spec.models.core.offload import at_hand
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.audio_files import prepare_clip
from visual_spec.pipelines.audio_parts import AudioParts
from visual_spec.pipelines.audio_stream import WaveStream, decode_windows, plan_windows
from visual_spec.pipelines.output import AudioPipelineOutput
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.pipelines.steps import Asked, StepCallback, planned_steps
from visual_spec.pipelines.texts import Texts, check_words, tokenized

AudioListener = Callable[[Any, int, Tensor], Any]


class AudioPipeline(AudioParts):
    """Plays music from prompts.

    Args:
        transformer: a `MusicgenForCausalLM` that reads the text encoder's features as they are, or a whole
            `MusicgenForConditionalGeneration` or `MusicgenMelodyForConditionalGeneration`, which brings its own text
            encoder, projection and codec. None here, or for the sampler: the pipeline only encodes prompts
            (`encode_prompt`).
        codec: an `EncodecModel`. None: that of a whole MusicGen.
        text_encoder: `CaptionEncoder`, or an encoder of transformers beside its `tokenizer`. None: that of a whole
            MusicGen; if there is none either, pass `prompt_embeds`.
        sampler: how columns of codes are decoded, `ColumnAutoregressiveSampler`, `ColumnJacobiSampler` or
            `DraftedColumnSampler`; of a masked model `MaskedSampler`. Swap it freely (`pipe.sampler = ...`).
        tokenizer: of a text encoder of transformers.
        drafter: what `DraftedColumnSampler` drafts with: a `ColumnEagleDrafter` trained for this transformer, or a
            smaller MusicGen over the same text features and codec. Set it freely (`pipe.drafter = ...`).
        default_guidance_scale, default_temperature, default_top_k, default_top_p: those of `__call__` where it is given
            none; saved with the pipeline.
        max_audio_length_in_s: the length that the model was trained on. Longer clips are played by a sliding window.
        pattern: how the codebooks are laid out in steps, a name of `visual_spec.models.columns.patterns.LAYOUTS`.
        pattern_settings: arguments of the layout by name, such as {"group_size": 2} of "grouped" or {"levels": [0, 0,
            1, 1]} of "flat", two calls a frame.
        padding: what padding of a caption is to the decoder, see `MusicgenModules`.
        masked: whether the transformer was trained to fill in hidden codes (MAGNeT), rather than to go on.
        reach: of a masked model, see `MagnetModel`.

    Raises:
        TypeError: a component that could not be saved, or a transformer of another kind.
        ValueError: an unknown pattern, or one without its settings or that no model decodes; a codec with other
            codebooks than the transformer, a length below one frame.

    Example:
        >>> pipe = AudioPipeline.from_pretrained("tunes")
        >>> pipe("a slow sad organ melody in A minor").save("tune.wav")
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """As `VisualPipeline.from_pretrained`. Without a dtype: float32, whatever the files hold."""
        if kwargs.get("dtype") is None and kwargs.get("torch_dtype") is None:
            kwargs["dtype"] = torch.float32  # diffusers' own default misses the models of transformers
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_musicgen(
        cls, model: Any, tokenizer: Any, sampler: SchedulerMixin | None = None, **settings: Any
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
        chosen = sampler or make_sampler("columns")
        return cls(model, None, None, chosen, tokenizer, **published | settings)

    @classmethod
    def from_audiocraft(
        cls,
        source: str | os.PathLike,
        text_encoder: Any,
        tokenizer: Any,
        *,
        codec: EncodecModel | None = None,
        dtype: torch.dtype | None = torch.float32,
        sampler: SchedulerMixin | None = None,
        **settings: Any,
    ) -> Self:
        """A pipeline around an official MusicGen or AudioGen checkpoint of audiocraft, mono or stereo.

        It has the published law, and the treatment of padding of audiocraft.

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

        loaded = load_musicgen(source, text_encoder, codec=codec, dtype=dtype)
        own = loaded.settings
        published: dict[str, Any] = dict(
            default_guidance_scale=own.guidance_scale,
            default_temperature=own.temperature,
            default_top_k=own.top_k,
            max_audio_length_in_s=own.duration,
            padding="zeros",
        )
        return cls.from_musicgen(loaded.model, tokenizer, sampler, **published | settings)

    @classmethod
    def from_magnet(
        cls,
        source: str | os.PathLike,
        text_encoder: Any,
        tokenizer: Any,
        *,
        codec: EncodecModel | None = None,
        dtype: torch.dtype | None = torch.float32,
        **settings: Any,
    ) -> Self:
        """A pipeline around an official MAGNeT checkpoint, with the steps, span and law it was published with.

        It cannot be saved: what projects the text has no place in a folder of transformers. Keep the official files.
        Audiocraft's `use_sampling=False` is the setting `greedy` of `MaskedSampler`.

        Args:
            source: the folder with `state_dict.bin`, and `compression_state_dict.bin` unless `codec` is given.
            text_encoder, tokenizer: the T5 that the checkpoint names (`t5-base` for music), as transformers loads it.
            codec: in place of the folder's.
            dtype: of the transformer, which is loaded onto the CPU, where audiocraft computes in float32. Pass
                torch.float16 for a GPU; None keeps that of the file, float16 of official ones.
            settings: of the class, in place of the published ones.

        Raises:
            FileNotFoundError, OSError, ValueError: as `load_magnet` and `load_audiocraft_codec`.
        """
        from visual_spec.pipelines.magnet import official_magnet

        model, codec, sampler, published = official_magnet(source, codec=codec, dtype=dtype)
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

    # -- input ---------------------------------------------------------------------------------------------------------

    def _checked(self, args: Mapping[str, Any]) -> Asked:
        asked = self._asked(args)
        self._check_call(
            args, asked, "transformer", "sampler", *([] if self._codec is not None else ["codec"])
        )
        stretch = args["stretch_in_s"]
        if not (math.isfinite(stretch) and stretch > 0):
            raise ValueError(f"stretch_in_s={stretch}; pass the seconds that are made audible at once.")
        self._check_melody(args["melody_features"], asked.count)
        clip = asked.known = self._clip(args)
        if clip is not None and len(clip) not in (1, asked.count):
            raise ValueError(
                f"audio holds {len(clip)} clips for {asked.count} prompts; pass one for all, or one for each prompt."
            )
        frames = 0 if clip is None else math.ceil(clip.shape[-1] / self.samples_per_frame)
        self.plan(args["audio_length_in_s"], args["extend_stride_in_s"], frames)
        return asked

    def _clip(self, args: Mapping[str, Any]) -> Tensor | None:
        """The clip to go on from as [B or 1, C, N] at the codec's rate, or None."""
        audio, rate = args["audio"], args["sampling_rate"]
        if audio is None:
            if rate is not None:
                raise ValueError(f"sampling_rate={rate} given without audio; leave it out.")
            return None
        return prepare_clip(audio, rate, rate=self.sampling_rate, channels=self.channels)

    def _check_words(self, texts: Texts) -> None:
        own = getattr(self._model, "text_encoder", None)
        encoder = own if self.text_encoder is None else self.text_encoder
        check_words(encoder, self.tokenizer, texts.prompts + texts.negatives)

    def _check_melody(self, features: Tensor | None, count: int) -> None:
        if features is None:
            return
        chroma = getattr(self._model.config, "num_chroma", None)
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
        length = limit if audio_length_in_s is None else audio_length_in_s
        return plan_windows(
            length,
            extend_stride_in_s,
            given_frames,
            limit=limit,
            frame_rate=self.frame_rate,
            span=self.sampler.config.get("span", 1) if self._fills_in else 1,
        )

    def make_condition(
        self, prompt: str | list[str] | None = None, *, melody_features: Tensor | None = None, **kwargs: Any
    ) -> MusicCondition:
        """As `ReadsText.make_condition`, with the chroma of the tunes, if given."""
        return self._with_melody(super().make_condition(prompt, **kwargs), melody_features)

    def _condition(self, args: Mapping[str, Any], asked: Asked) -> MusicCondition:
        return self._with_melody(self._features(asked.source, asked.each), args["melody_features"])

    def _with_melody(self, text: TextCondition, melody: Tensor | None) -> MusicCondition:
        if melody is not None:
            melody = melody.to(text.mask.device).repeat_interleave(len(text.mask) // len(melody), 0)
        return MusicCondition(text.features, text.mask, melody=melody, negative=text.negative)

    def _features(self, texts: Texts, each: int) -> TextCondition:
        return texts.condition(self._encode, each, self._execution_device)

    def _encode(self, texts: list[str]) -> TextCondition:
        encoder = self.text_encoder
        if hasattr(encoder, "word_ids"):
            return super()._encode(texts)
        inputs = tokenized(self.tokenizer, texts).to(self._execution_device)
        owner = self._model if encoder is None else self
        with at_hand(self._model if encoder is None else encoder):
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
        audio: Any = None,
        sampling_rate: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_until: int | None = None,
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
            num_waveforms_per_prompt: clips of each prompt; those of one prompt follow each other.
            generator: one `torch.Generator` for the batch, or a list of one per clip; of any device. With a list, a
                clip depends on its own generator only.
            prompt_embeds, prompt_attention_mask: features [prompts, T, C] and their mask [prompts, T] (true at words),
                in place of `prompt`, as `encode_prompt` gives them; likewise those of `negative_prompt`.
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

        Raises:
            ValueError, TypeError: bad input, before any computation.
            ImportError: a clip at another rate than the codec's, and torchaudio is missing.
            FloatingPointError: the model gave non-finite logits; names the slot.
        """
        return self._run(locals())

    def _decode(self, args: Mapping[str, Any], asked: Asked, condition: MusicCondition) -> tuple[Any, ...]:
        law, output_type, stretch, play = (
            asked.law,
            *(args[name] for name in ("output_type", "stretch_in_s", "callback_on_audio")),
        )
        given = self._given_codes(asked.known, len(condition.features))
        windows = self.plan(args["audio_length_in_s"], args["extend_stride_in_s"], given.shape[-1])
        frames = given.shape[-1] + sum(new for _, new in windows)
        models = [self._window_model(kept + new, kept) for kept, new in windows]
        self._num_timesteps = sum(planned_steps(self.sampler, one, {}, one.grid.width) for one in models)
        stream = self._stream(frames, output_type, stretch, play)
        heard = self._listener(args, asked)
        self._guidance_scale = law.guidance_scale
        drafter = self.drafter if getattr(self.sampler, "needs_drafter", False) else None
        with at_hand(self._model, self._codec, drafter):
            codes, trace = decode_windows(
                self.sampler,
                self._window_model,
                condition,
                given,
                windows,
                progress_bar=self.progress_bar,
                stream=stream,
                streamed=play is not None and not self._fills_in,
                listener=lambda step, lengths: heard(step, lambda: int(lengths.min()), lengths=lengths),
                law=law,
                generator=args["generator"],
                **self.sampler_parts(),
            )
        self.last_trace = trace
        waves: Any = codes if output_type == "latent" or stream is None else stream.waves()
        return waves.numpy() if output_type == "np" else waves, self.sampling_rate, codes, trace

    def _stream(
        self, frames: int, output_type: str, stretch_in_s: float, listener: AudioListener | None
    ) -> WaveStream | None:
        """What makes waves of the columns of this call; None where nobody hears them."""
        if output_type == "latent" and listener is None:
            return None
        return WaveStream(
            self._codec,
            self.channels,
            frames,
            max(1, round(stretch_in_s * self.frame_rate)),
            None if listener is None else lambda *heard: listener(self, *heard),
        )

    def _given_codes(self, clip: Tensor | None, batch_size: int) -> Tensor:
        """Codes [B, K, P] of the clip to go on from; P = 0 without one."""
        if clip is None:
            count = MusicgenModules(self._model).num_codebooks
            return torch.zeros(batch_size, count, 0, dtype=torch.long, device=self._execution_device)
        with at_hand(self._model if self.codec is None else self.codec):
            codes = encode_waves(self._codec, clip).to(self._execution_device)
        return codes.repeat_interleave(batch_size // len(codes), 0)
