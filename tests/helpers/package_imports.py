"""Which modules of the package a file imports."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "visual_spec"


def imported_modules(path: Path, *, of: str = "visual_spec", for_types: bool = True) -> set[str]:
    """Absolute names of the modules of ours that a file imports, at any level of nesting.

    Args:
        of: the package whose modules count.
        for_types: also those under `if TYPE_CHECKING`.
    """
    names: set[str] = set()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    if not for_types:
        blocks = (n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))
        hidden = {id(inner) for block in blocks for part in block.body for inner in ast.walk(part)}
        nodes = [node for node in nodes if id(node) not in hidden]
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; imports across sub-packages are absolute"
            # `from visual_spec.models import llamagen` names a module, `... import TokenGrid` does not; both count.
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return {name for name in names if name.split(".")[0] == of}
