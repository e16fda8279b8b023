"""Pipelines that draw classes: numbers, or names where they are known."""

import difflib
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visual_spec.pipelines.base import VisualPipeline

Labels = int | str | Sequence[int | str] | np.ndarray | Tensor


class ClassNames:
    """What the classes of a model are called.

    Args:
        num_classes: classes, numbered from 0; None: not known, any number passes.
        id2label: the name of every class, in order, several names of one class separated by commas; None: they have
            numbers only.

    Raises:
        ValueError: another number of names than of classes.
    """

    def __init__(self, num_classes: int | None, id2label: Sequence[str] | None = None):
        if id2label is not None and num_classes is not None and len(id2label) != num_classes:
            raise ValueError(f"{len(id2label)} names for {num_classes} classes; pass one name per class.")
        self.num_classes = num_classes
        named = ((name.strip(), i) for i, text in enumerate(id2label or ()) for name in text.split(","))
        self._ids: dict[str, int] = {}
        for name, index in named:
            # Where two classes share a name ("crane"), the first one has it.
            self._ids.setdefault(name, index)

    def ids(self, labels: Labels) -> list[int]:
        """Class numbers of labels: numbers, their digits, or names.

        Raises:
            TypeError, ValueError: a label that is none of these; names those that are close.
        """
        labels = _plain(labels)
        if isinstance(labels, (Integral, str)):
            labels = [labels]  # type: ignore[list-item]
        if not isinstance(labels, Sequence) or isinstance(labels, (bytes, bytearray)):
            raise TypeError(f"labels={labels!r}; pass a class number or name, or a list of them.")
        if not labels:
            raise ValueError("labels is an empty list; pass at least one class.")
        return [self._id(_plain(label)) for label in labels]

    def _id(self, label: object) -> int:
        if isinstance(label, str) and label not in self._ids and not label.isdecimal():
            close = difflib.get_close_matches(label, self._ids, n=3)
            advice = "see pipe.config['id2label']"
            if close:
                advice = f"close names are {', '.join(map(repr, close))}"
            elif not self._ids:
                advice = f"this pipeline knows no names, pass {self._numbers}"
            raise ValueError(f"unknown class {label!r}; {advice}.")
        if isinstance(label, str):
            label = self._ids[label] if label in self._ids else int(label)
        if isinstance(label, bool) or not isinstance(label, Integral):
            raise TypeError(f"label {label!r} is a {type(label).__name__}; pass a class number or name.")
        number = int(label)
        if number < 0 or (self.num_classes is not None and number >= self.num_classes):
            raise ValueError(f"class {number} given; allowed are {self._numbers}.")
        return number

    @property
    def _numbers(self) -> str:
        return "numbers from 0" if self.num_classes is None else f"0 to {self.num_classes - 1}"


class DrawsClasses(VisualPipeline):
    """What pipelines share whose pictures are of classes."""

    transformer: Any

    _each = "num_images_per_label"
    _of_texts = ""  # what takes a transformer of captions; "": no such transformer fits

    def _check_parts(self) -> None:
        """Also refuses a transformer that draws no classes, or other names than one of each class."""
        super()._check_parts()
        if (
            self._of_texts
            and self.transformer is not None
            and self.transformer.config.get("num_classes") is None
        ):
            raise ValueError(f"the transformer draws from captions; use {self._of_texts}.")
        self.class_names()

    def make_condition(self, labels: Labels, *, num_images_per_prompt: int = 1) -> Tensor:
        """Class numbers as samplers take them: long [labels * num_images_per_prompt], on the pipeline's device."""
        ids = torch.tensor(self.label_ids(labels), device=self._execution_device)
        return ids.repeat_interleave(num_images_per_prompt)

    @property
    def num_classes(self) -> Any:
        """Number of classes, labelled 0 to num_classes - 1; None while the pipeline has no transformer."""
        return None if self.transformer is None else self.transformer.config["num_classes"]

    def class_names(self) -> ClassNames:
        """What the classes are called."""
        return ClassNames(self.num_classes, self.config["id2label"])

    def label_ids(self, labels: Labels) -> list[int]:
        """Class numbers of labels: numbers, their digits, or names where the pipeline has `id2label`.

        Raises:
            TypeError, ValueError: a label that is none of these; names those that are close.
        """
        return self.class_names().ids(labels)


def _plain(labels: Any) -> Any:
    """Arrays, tensors and their elements as Python's own numbers, texts and lists."""
    return labels.tolist() if hasattr(labels, "tolist") else labels


def one_of(default: Any = None, /, **given: Any) -> Any:
    """The value of an argument that has two names; where none is given, the default.

    Raises:
        TypeError: both are given; or none of them, and there is no default.
    """
    values = [value for value in given.values() if value is not None]
    if len(values) > 1 or not values and default is None:
        raise TypeError(
            f"{'both' if values else 'neither'} of {' and '.join(given)} given; pass one of them."
        )
    return values[0] if values else default
