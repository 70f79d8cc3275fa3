"""README's table of modules: all of them are in it, and each imports from its own row and those below alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "lightning_resilience"


def rows() -> dict[str, int]:
    """The row of each module."""
    section = (ROOT / "README.md").read_text().split("## Modules")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {module: row for row, cell in enumerate(cells) for module in re.findall(r"`(\w+)`", cell)}


def imports(path: Path) -> set[str]:
    """The modules of the package that one of them imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            package, _, module = node.module.partition(".")
            if package == PACKAGE:
                found |= {module} if module else {alias.name for alias in node.names}
    return found


def test_every_module_is_in_the_table_and_imports_downward_only() -> None:
    row = rows()
    modules = {path.stem: path for path in (ROOT / PACKAGE).glob("*.py") if not path.stem.startswith("_")}
    assert row.keys() == modules.keys()
    upward = [
        f"{name} imports {other}"
        for name, path in modules.items()
        for other in imports(path)
        if other in row and row[other] < row[name]
    ]
    assert not upward
