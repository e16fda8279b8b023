"""The cleaning of captions, against what the official code makes of the same texts."""

import pytest

from visual_spec.models.text.captions import clean_caption

CLEANED = {
    "A photo of a kangaroo, in an orange hoodie.": "a photo of a kangaroo, in an orange hoodie.",
    "  Two   SPACES\n": "two spaces",
    "A dog—a big one – runs": "a dog-a big one - runs",
    "“curly” and ‘single’ quotes": "\"curly\" and 'single' quotes",
    "'quoted'": "quoted",
    "see https://example.com/x or www.foo.org now": "see or now",
    "<b>bold</b> &amp; plain": "bold plain",
    "<person> with a hat": "person with a hat",
    "by @somebody at 10.0.0.1": "by at",
    "photo_1.jpeg of a cat #12 (large) [2] {x} | y / z": "of a cat large 2 x y z",
    "part-no-1-of-this-set": "part no 1 of this set",
    "half-way there": "half-way there",
    "jc6640 chair 6640vc231": "chair",
    "free shipping worldwide, page 12": "worldwide",
    "1920x1080 wallpaper": "wallpaper",
    "a4 paper, 3d render, 4k": "a4 paper, 3d render, 4k",
    "wait... what": "wait what",
    "so.. what": "so what",
    "one,two.three": "one, two. three",
    "a+b": "a b",
    "50%20off": "50 off",
    "漢字 and kana かな": "and kana かな",
    "": "",
    "***": "",
}


@pytest.mark.parametrize("caption", CLEANED)
def test_captions_are_cleaned_as_officially(caption):
    assert clean_caption(clean_caption(caption)) == CLEANED[caption]


def test_hidden_parts_of_a_page_are_dropped():
    assert clean_caption("a <script>var x = 1 < 2;</script>fox <i>runs</i>") == "a fox runs"
