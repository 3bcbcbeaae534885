"""Kernels with a deliberate error. If a mutant passes a test, the test proves nothing about the kernel."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest import mock

import ops


def mutant(operation: str, old: str, new: str, folder: Path, file: str = "with_triton") -> ModuleType:
    """Load `ops.<operation>.<file>` from `folder`, with one place of its source changed.

    Raises ValueError unless `old` occurs exactly once.
    """
    source = (Path(ops.__file__).parent / operation / f"{file}.py").read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times in the {operation} kernels")
    path = folder / f"mutant_{operation}.py"
    # a file, because Triton reads the source of kernels from it
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def backend_with_mutant(operation: str, old: str, new: str, folder: Path) -> ModuleType:
    """Load `ops.<operation>.with_triton` with one place changed, in it or in one of the files triton_*.py beside it.

    Raises ValueError unless `old` occurs exactly once in them.
    """
    package = import_module(f"ops.{operation}")
    files = sorted(Path(ops.__file__).parent.joinpath(operation).glob("triton_*.py"))
    file = next((each.stem for each in files if old in each.read_text(encoding="utf-8")), "with_triton")
    broken = mutant(operation, old, new, folder, file)
    if file == "with_triton":
        return broken
    entry, own = f"{package.__name__}.with_triton", f"{package.__name__}.triton_"
    before = {name: module for name, module in vars(package).items() if isinstance(module, ModuleType)}
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name == entry or name.startswith(own)]:
            del sys.modules[name]
        sys.modules[f"{package.__name__}.{file}"] = broken
        backend = import_module(entry)
    vars(package).update(before)
    return backend
