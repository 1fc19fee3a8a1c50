"""Take one function out of an engine's source file and run it alone, where importing the engine needs a GPU."""

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["lift", "literal"]


def lift(file: Path, name: str, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function of a file, with ``scope`` for the names that it takes from elsewhere; imports in it are left out.

    Raises `LookupError` where the file has no such function.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    function = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if function is None:
        raise LookupError(f"{file.name} has no function {name}")
    function.decorator_list, function.returns = [], None
    for argument in (*function.args.args, *function.args.kwonlyargs):
        argument.annotation = None
    function.body = [node for node in function.body if not isinstance(node, ast.ImportFrom)]
    names = dict(scope)
    # The engine's own code, from a file that its package installed.
    exec(compile(ast.Module([function], []), str(file), "exec"), names)  # noqa: S102
    found: Callable[..., Any] = names[name]
    return found


def literal(file: Path, name: str) -> Any:
    """Return the value of a name that a file sets to a literal; raises `LookupError` where it does not."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in node.targets):
            return ast.literal_eval(node.value)
    raise LookupError(f"{file.name} sets no {name}")
