"""Legends, captions and spectrograms: the drawing that the reports share. Pillow only, with its built-in font."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from visual_spec.data.waves import levels

Colour = tuple[int, int, int]
# (run, paid slot): six hues far apart when neighbours, each readable on the paper colour and on a dark page.
RUN_COLOURS = (
    ((178, 208, 240), (33, 96, 170)),
    ((250, 213, 166), (196, 103, 14)),
    ((187, 226, 195), (32, 122, 66)),
    ((229, 200, 236), (124, 56, 145)),
    ((249, 199, 194), (186, 48, 41)),
    ((177, 226, 226), (15, 116, 122)),
)
PAPER = (251, 250, 247)
MAP_GROUND = (240, 238, 232)
INK = (28, 30, 36)
MUTED = (104, 106, 114)
GOOD = (24, 118, 66)
SUPERSAMPLE = 4
# Of a spectrogram, from silence to full scale; each colour is darker or lighter than the one before it.
_MEL_COLOURS = ((18, 20, 44), (70, 34, 110), (165, 48, 106), (233, 110, 60), (250, 196, 92), (252, 250, 214))
_LEAST_DECIBELS = -80.0
_MEL_WINDOW = 1024  # samples of a spectrum


def labelled_strip(width: int, entries: Sequence[tuple[Image.Image | Colour, str]]) -> Image.Image:
    """Symbols of 18 pixels, or colours, with their texts, on as many lines of 24 pixels as the width asks for."""
    size, unit, gap = 14, 18, 26
    places, x, y = [], 0, 9
    for symbol, text in entries:
        picture = Image.new("RGB", (unit, unit), symbol) if isinstance(symbol, tuple) else symbol
        needed = picture.width + 8 + text_width(text, size)
        if x and x + needed > width:
            x, y = 0, y + 24
        places.append((x, y, picture, text))
        x += needed + gap
    strip = Image.new("RGB", (width, y + 25), PAPER)
    draw = ImageDraw.Draw(strip)
    for x, y, picture, text in places:
        strip.paste(picture, (x, y))
        draw_text(draw, (x + picture.width + 8, y), text, size, MUTED)
    return strip


def fit_square(picture: Image.Image, size: int) -> Image.Image:
    """The picture in a square of `size` pixels, its proportions kept."""
    picture = picture.convert("RGB")
    ratio = size / max(picture.size)
    resized = picture.resize(
        (max(1, round(picture.width * ratio)), max(1, round(picture.height * ratio))),
        Image.Resampling.LANCZOS,
    )
    square = Image.new("RGB", (size, size), PAPER)
    square.paste(resized, ((size - resized.width) // 2, (size - resized.height) // 2))
    return square


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def text_width(text: str, size: int) -> int:
    return round(_font(size).getlength(text))


def draw_text(draw: ImageDraw.ImageDraw, xy, text: str, size: int, fill, *, bold: bool = False) -> None:
    # Pillow's built-in font has one weight; printing it twice, a fraction of a pixel apart, stands in for bold.
    for shift in (0.0, size / 40) if bold else (0.0,):
        draw.text((xy[0] + shift, xy[1]), text, font=_font(size), fill=fill)


def wrap_text(text: str, size: int, width: int, most: int = 5) -> list[str]:
    """The text in at most `most` lines of `width` pixels; what does not fit ends in three dots."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(joined, size) <= width:
            lines[-1] = joined
        elif len(lines) == most:
            lines[-1] += " ..."
            break
        else:
            lines.append(word)
    return [_shortened(line, size, width) for line in lines]


def _shortened(line: str, size: int, width: int) -> str:
    """The line, or the longest beginning of it that fits with three dots; at least one letter."""
    line = line[: 2 * width + 4]  # no letter is narrower than half a pixel
    if len(line) <= 4 or text_width(line, size) <= width:
        return line
    line = line.removesuffix("...")
    count = bisect_right(range(2, len(line)), width, key=lambda end: text_width(line[:end] + "...", size))
    return line[: 1 + count] + "..."


def mel_picture(audio: np.ndarray | Tensor, sampling_rate: int, width: int, height: int) -> Image.Image:
    """The log mel spectrogram of a clip, [C, N] or [N]: time to the right, pitch upwards, -80 dB to 0 dB.

    Raises:
        ValueError: no samples, or values that are not finite.
    """
    wave = torch.as_tensor(audio).double()
    wave = wave.mean(0) if wave.ndim == 2 else wave
    if not wave.numel() or not wave.isfinite().all():
        raise ValueError(f"a clip of {wave.numel()} samples, or with nan or infinity; pass finite samples.")
    decibels = levels(wave, _MEL_WINDOW, sampling_rate)  # [bands, frames]
    share = (1 - decibels.clamp(_LEAST_DECIBELS, 0) / _LEAST_DECIBELS).flip(0).numpy()
    stops = np.linspace(0, 1, len(_MEL_COLOURS))
    colours = [np.interp(share, stops, channel) for channel in np.array(_MEL_COLOURS, float).T]
    picture = Image.fromarray(np.rint(np.stack(colours, -1)).astype(np.uint8))
    return picture.resize((width, height), Image.Resampling.BICUBIC)
