"""Nothing that ships can be made to run what it reads, and no check disappears under `python -O`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path for name in ("serve", "runtime", "ops") for path in (ROOT / name).rglob("*.py"))

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
HARMLESS = {("pickle", "UnpicklingError")}  # the class of an error that torch raises
BUILTINS = {"eval", "exec", "__import__"}
CALLS = {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("os", "system"), ("os", "popen")}


def trouble(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what) of everything that must not stand in code that is served."""
    return [(getattr(node, "lineno", 0), what) for node in ast.walk(tree) if (what := _trouble(node))]


def _trouble(node: ast.AST) -> str:
    if isinstance(node, ast.Assert):
        return "assert"
    if isinstance(node, ast.Import):
        names = {alias.name.partition(".")[0] for alias in node.names}
        return ", ".join(sorted(names & MODULES))
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").partition(".")[0]
        taken = {(module, alias.name) for alias in node.names}
        return module if module in MODULES and not taken <= HARMLESS else ""
    return _trouble_of_call(node) if isinstance(node, ast.Call) else ""


def _trouble_of_call(call: ast.Call) -> str:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if given.get("shell", "False") != "False":
        return "shell"
    if given.get("allow_pickle", "False") != "False":
        return "allow_pickle"
    function = call.func
    if isinstance(function, ast.Name):
        return function.id if function.id in BUILTINS else ""
    if not isinstance(function, ast.Attribute):
        return ""
    owner = ast.unparse(function.value)
    if (owner, function.attr) in CALLS:
        return f"{owner}.{function.attr}"
    if (owner, function.attr) == ("torch", "load") and given.get("weights_only") != "True":
        return "torch.load without weights_only"
    return ""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_dangerous_is_served(path: Path) -> None:
    assert trouble(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_there_is_something_to_look_at() -> None:
    assert len(SHIPPED) > 100


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import pickle", "pickle"),
        ("import marshal as m", "marshal"),
        ("from pickle import loads", "pickle"),
        ("from pickle import UnpicklingError, loads", "pickle"),
        ("from dill.source import x", "dill"),
        ("eval('1')", "eval"),
        ("exec(code)", "exec"),
        ("yaml.load(text, Loader=yaml.SafeLoader)", "yaml.load"),
        ("torch.load(path)", "torch.load without weights_only"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("subprocess.run(line, shell=True)", "shell"),
        ("def f(x):\n    assert x", "assert"),
    ],
)
def test_each_kind_is_noticed(code: str, what: str) -> None:
    assert [found for _, found in trouble(ast.parse(code))] == [what]


@pytest.mark.parametrize(
    "code",
    [
        "from pickle import UnpicklingError",
        "model.eval()",
        "yaml.safe_load(text)",
        "torch.load(p, weights_only=True)",
    ],
)
def test_what_is_harmless_passes(code: str) -> None:
    assert trouble(ast.parse(code)) == []
