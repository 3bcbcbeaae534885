"""Kernels with a deliberate error. If a mutant passes a test, the test proves nothing about the kernel."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

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
