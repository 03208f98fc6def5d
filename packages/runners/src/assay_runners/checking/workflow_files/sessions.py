"""The sessions of a noxfile, read without executing it."""

import ast
from pathlib import Path

from assay.errors import UsageError


def read_sessions(root: Path) -> set[str]:
    """Read the names that `nox -s` accepts in this checkout.

    Raises: UsageError if there is no noxfile, or it defines no session.
    """
    file = root / "noxfile.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    found = {
        name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if (name := _session_name(decorator, node.name))
    }
    if not found:
        raise UsageError(f"{file} has no session")
    return found


def _session_name(decorator: ast.expr, function: str) -> str:
    """Read the name from `@nox.session` or `@nox.session(name="x")`; "" for other decorators."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if ast.unparse(called) != "nox.session":
        return ""
    if isinstance(decorator, ast.Call):
        for keyword in decorator.keywords:
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
    return function
