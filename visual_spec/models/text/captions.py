"""The caption cleaning with which the official text-conditional LlamaGen was trained.

It was made for web-scraped captions (DeepFloyd IF, then PixArt-alpha). It drops addresses, file names, article numbers
and shop language, and makes typography uniform. Without it T5 gets other tokens than those the image model knows: the
cleaning lower-cases, and drops brackets, slashes and "#", for example.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from urllib.parse import unquote_plus

_FILE_TYPES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DASHES = (
    r"\-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
    r"\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
)

# (pattern, replacement), applied in this order to lower-case text.
_DOMAIN = r"[a-z0-9.-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_ADDRESSES = [
    (rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{_DOMAIN})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{_DOMAIN})", ""),
]
_TYPOGRAPHY = [
    (r"@\w+\b", ""),  # nicknames
    (r"[\u31c0-\u31ff\u3200-\u9fff]", ""),  # strokes, enclosed letters, ideographs
    (f"[{_DASHES}]+", "-"),
    (r"[`´«»“”¨]", '"'),
    (r"[‘’]", "'"),
    (r"&quot;?|&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),  # network addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),  # a literal backslash-n
    (r"#(?:\d{1,3}|\d{5,})\b|\b\d{6,}\b", ""),  # article numbers
    (rf"\S+\.(?:{_FILE_TYPES})", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
]
_CONTROL = "[\x00-\x08\x0b\x0e-\x1f\x7f\u206a-\u206f\ufeff\ufff9-\ufffc]"
_CODES_AND_SHOPS = [
    (r"\b[a-z]{1,3}\d{3,15}\b", "", re.IGNORECASE),
    (r"\b[a-z]+\d+[a-z]+\b", "", re.IGNORECASE),
    (r"\b\d+[a-z]+\d+\b", "", re.IGNORECASE),
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILE_TYPES})(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-z]+\d+[a-z]+\d+[a-z\d]*\b", " ", re.IGNORECASE),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # sizes; the second x is Cyrillic
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
]
_ENDS = [(r"^[\"']([\w\W]+)[\"']$", r"\1"), (r"^['_,\-:;]", ""), (r"['_,\-:+]$", ""), (r"^\.\S+$", "")]


def clean_caption(caption: str) -> str:
    """A caption after one pass of the official cleaning. The official code makes two; the second may change more.

    Of the repair of wrongly decoded text (the library ftfy), only the removal of control characters is done. Its other
    changes to correctly decoded text, ligatures and full-width letters, are also made by T5's tokenizer.
    """
    text = unquote_plus(caption).strip().lower().replace("<person>", "person")
    text = _apply(_ADDRESSES, text)
    text = _apply(_TYPOGRAPHY, _without_tags(text))
    if len(re.findall("[-_]", text)) > 3:  # words-joined-in-this-way
        text = re.sub("[-_]", " ", text)
    text = html.unescape(html.unescape(re.sub(_CONTROL, "", text))).strip()
    text = _apply(_CODES_AND_SHOPS, text)
    return _apply(_ENDS, text).strip()


def _apply(rules: list, text: str) -> str:
    for pattern, replacement, *flags in rules:
        text = re.sub(pattern, replacement, text, flags=flags[0] if flags else 0)
    return text


class _TextOfTags(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style") and self._hidden > 0

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def _without_tags(text: str) -> str:
    if "<" not in text and "&" not in text:
        return text
    parser = _TextOfTags()
    parser.feed(text)
    parser.close()
    return "".join(parser.parts)
