"""Measurements and reports. Imported lazily: naming `visual_spec.eval` loads neither torch nor Pillow."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visual_spec.eval.intervals import wilson_interval as wilson_interval
    from visual_spec.eval.quality.accuracy import summarise as summarise
    from visual_spec.eval.quality.neighbours import density_coverage as density_coverage
    from visual_spec.eval.quality.neighbours import precision_recall as precision_recall
    from visual_spec.eval.quality.published import frechet_distance as frechet_distance
    from visual_spec.eval.report.maps import acceptance_map as acceptance_map
    from visual_spec.eval.report.maps import paid_slots as paid_slots
    from visual_spec.eval.report.pages import contact_sheet as contact_sheet
    from visual_spec.eval.report.pages import write_html as write_html
    from visual_spec.eval.report.rows import ComparisonRow as ComparisonRow

# `evaluate` is not offered here: a sub-module has this name.
_HOME = {
    "ComparisonRow": "report.rows",
    "acceptance_map": "report.maps",
    "contact_sheet": "report.pages",
    "density_coverage": "quality.neighbours",
    "frechet_distance": "quality.published",
    "paid_slots": "report.maps",
    "precision_recall": "quality.neighbours",
    "summarise": "quality.accuracy",
    "wilson_interval": "intervals",
    "write_html": "report.pages",
}
__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
