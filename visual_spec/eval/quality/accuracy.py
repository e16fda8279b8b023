"""How often pictures show what their prompts ask for, as a parser of the data read them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from visual_spec.data import tunes
from visual_spec.eval.intervals import rate, share_figure
from visual_spec.eval.tables import column, interval, table

# All that the parsers of the procedural data read, in the order of tables.
_SEEN = "one_object thing shape colour size count relation direction speed ending background texture camera consistency"
ATTRIBUTES = tuple(dict.fromkeys((*_SEEN.split(), *tunes.ATTRIBUTES)))


def hits_of(attributes: Tensor) -> list[dict[str, bool]]:
    """Return what a parser said of each sample, from what `extractors.parsed_attributes` keeps of it, [N, A]."""
    return [
        {name: value == 1 for name, value in zip(ATTRIBUTES, row, strict=True) if value >= 0}
        for row in attributes.tolist()
    ]


def summarise(hits: Sequence[dict[str, bool]]) -> dict[str, Any]:
    """Accuracy of samples from what `visual_spec.data.shapes_parser.score` says of each.

    Returns:
        all_correct: the share of pictures with every attribute right. attributes: {name: the same for one attribute,
        over the prompts that ask for it}. mean_attribute: the mean over samples of the share of attributes right.
        All with intervals, see `visual_spec.eval.intervals`. unread: samples whose prompts the parser does not know,
        which count nowhere else.

    Raises:
        ValueError: if there are no samples, or none whose prompt the parser knows.
    """
    unread, hits = sum(not answers for answers in hits), [answers for answers in hits if answers]
    if not hits:
        raise ValueError(
            f"no samples to summarise: {unread} prompts that the parser does not know. It reads captions of the "
            "embedded models' data; leave the metric parser out."
        )
    names = dict.fromkeys(name for answers in hits for name in answers)
    return {
        "all_correct": rate([all(answers.values()) for answers in hits]),
        "mean_attribute": share_figure([sum(answers.values()) / len(answers) for answers in hits]),
        "attributes": {name: rate([f[name] for f in hits if name in f]) for name in names},
        "unread": unread,
    }


def accuracy_table(accuracies: dict[str, dict[str, Any]]) -> str:
    """Markdown: one line for each named summary, one column for each attribute, rates in per cent with intervals."""
    names = list(dict.fromkeys(name for summary in accuracies.values() for name in summary["attributes"]))
    keys = {name: f"attributes.{name}" for name in names}
    keys |= {"mean of these": "mean_attribute", "whole prompt": "all_correct"}
    columns = [interval(name, key, 1, times=100) for name, key in keys.items()]
    rows = [{"title": title, **summary} for title, summary in accuracies.items()]
    return table(rows, [column("sampler", "{}", "title"), *columns])
