"""Signatures of FlashInfer's functions, read from its source, because an import may need CUDA."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef


def installed() -> Path | None:
    """Return the folder of the installed package `flashinfer`, or None. Does not import it."""
    spec = find_spec("flashinfer")
    return None if spec is None or not spec.submodule_search_locations else Path(spec.submodule_search_locations[0])


def signature(package: Path, name: str) -> Signature:
    """Return the signature of a function or method, for example "flashinfer.mla.Wrapper.plan".

    Functions are found as an import finds them, through the modules that import them from others. A function that only
    forwards its arguments (`**kwargs`) has the signature of its implementation, the function with the same name between
    "_" and "_impl". Raises LookupError if there is no such function.
    """
    _, *path = name.split(".")
    module, depth = package / "__init__.py", 0
    while depth < len(path) and (inner := _submodule(module.parent, path[depth])) is not None:
        module, depth = inner, depth + 1
    found = _find(module, path[depth], frozenset()) if depth < len(path) else None
    if found is None:
        raise LookupError(f"{name} does not exist")
    module, definition = found
    names = path[depth + 1 :]
    if isinstance(definition, ast.ClassDef):
        methods = definition.body
        made = _function(methods, names[0] if names else "__init__")
    else:
        methods, made = _top_level(module), definition
    if made is None:
        raise LookupError(f"{name} does not exist")
    read = _read(made.args)
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in read.parameters.values()):
        implementation = _function(methods, f"_{made.name}_impl")
        read = read if implementation is None else _read(implementation.args)
    return read


def _submodule(folder: Path, name: str) -> Path | None:
    candidates = (folder / name / "__init__.py", folder / f"{name}.py")
    return next((path for path in candidates if path.is_file()), None)


def _find(module: Path, name: str, seen: frozenset[Path]) -> tuple[Path, Definition] | None:
    """Return the module that defines a name, and the definition, or None."""
    if module in seen:
        return None
    last: tuple[Path, Definition] | None = None
    for statement in _top_level(module):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            if not _is_overload(statement):
                last = module, statement
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if alias.name != "*" and (alias.asname or alias.name) != name:
                    continue
                source = _imported(module, statement)
                wanted = name if alias.name == "*" else alias.name
                last = (_find(source, wanted, seen | {module}) if source else None) or last
    return last


def _imported(module: Path, statement: ast.ImportFrom) -> Path | None:
    """Return the file from which a statement imports, or None for a module outside the package."""
    if not statement.level:
        return None
    folder = module.parent
    for _ in range(statement.level - 1):
        folder = folder.parent
    for part in (statement.module or "").split(".") if statement.module else ():
        path = _submodule(folder, part)
        if path is None:
            return None
        folder = path.parent if path.name == "__init__.py" else path
    return folder / "__init__.py" if folder.is_dir() else folder


@cache
def _top_level(module: Path) -> list[ast.stmt]:
    """Return the statements of a module, with those in its top-level conditions and `try` blocks."""
    return list(_flat(ast.parse(module.read_text(encoding="utf-8")).body))


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        if isinstance(statement, ast.If | ast.Try):
            yield from _flat(statement.body + statement.orelse)
        else:
            yield statement


def _function(statements: list[ast.stmt], name: str) -> ast.FunctionDef | None:
    found = [each for each in statements if isinstance(each, ast.FunctionDef) and each.name == name]
    return next((each for each in reversed(found) if not _is_overload(each)), None)


def _is_overload(definition: Definition) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in definition.decorator_list)


def _read(args: ast.arguments) -> Signature:
    positional = args.posonlyargs + args.args
    first_default = len(positional) - len(args.defaults)
    parameters = []
    for index, arg in enumerate(positional):
        kind = Parameter.POSITIONAL_ONLY if index < len(args.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD
        default = None if index >= first_default else Parameter.empty
        parameters.append(Parameter(arg.arg, kind, default=default))
    if args.vararg is not None:
        parameters.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        empty = None if default is not None else Parameter.empty
        parameters.append(Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=empty))
    if args.kwarg is not None:
        parameters.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)
