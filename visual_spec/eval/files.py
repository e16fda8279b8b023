"""Pages from templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def render_page(template: str, /, **values: Any) -> str:
    """A page made of a template of this package.

    Args:
        template: its name, such as "report.html.jinja".
        values: what it asks for; text is escaped.

    Raises:
        jinja2.UndefinedError: it asks for more.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values)
