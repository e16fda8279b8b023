"""Self-contained pages: made of templates, with files inline."""

from __future__ import annotations

import base64
from pathlib import Path


def render_page(template: str, /, **values: object) -> str:
    """A page made of a template of this package.

    Args:
        template: its name, such as "comparison.html.jinja".
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


def data_url(kind: str, content: bytes) -> str:
    """A file within a page; `kind` is its MIME type."""
    return f"data:{kind};base64," + base64.b64encode(content).decode()
