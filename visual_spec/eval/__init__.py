"""Measurements and reports. Imported lazily: naming `visual_spec.eval` loads neither torch nor Pillow."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visual_spec.eval.accuracy import evaluate_accuracy as evaluate_accuracy
    from visual_spec.eval.accuracy import summarise as summarise
    from visual_spec.eval.accuracy import wilson_interval as wilson_interval
    from visual_spec.eval.report import ComparisonRow as ComparisonRow
    from visual_spec.eval.report import acceptance_map as acceptance_map
    from visual_spec.eval.report import contact_sheet as contact_sheet
    from visual_spec.eval.report import paid_slots as paid_slots
    from visual_spec.eval.report import write_html as write_html

__all__ = [
    "ComparisonRow",
    "acceptance_map",
    "contact_sheet",
    "evaluate_accuracy",
    "paid_slots",
    "summarise",
    "wilson_interval",
    "write_html",
]
_IN_ACCURACY = ("evaluate_accuracy", "summarise", "wilson_interval")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module = "accuracy" if name in _IN_ACCURACY else "report"
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
