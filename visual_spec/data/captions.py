"""The data of captioned pictures: `shapes` and `things`."""

from typing import Any

from visual_spec.data import shapes, things

PICTURES: dict[str, Any] = {"shapes": shapes, "things": things}


def captions_of(pipe: Any) -> Any:
    """The data whose captions a pipeline of pictures knows: the module of `things`, or else of `shapes`."""
    words = getattr(pipe.text_encoder.config, "vocabulary", ())
    return things if set(things.vocabulary()) <= set(words) else shapes
