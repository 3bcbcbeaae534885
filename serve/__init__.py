"""Penstock: a language-model serving engine in one asyncio process.

from serve import Engine

async with Engine(model_path="...") as engine:
    print((await engine.generate("Hello"))["text"])
"""

from __future__ import annotations

from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.errors import (
        CheckpointError,
        ConfigurationError,
        EngineClosed,
        EngineFailure,
        InvalidRequest,
        Overloaded,
        PenstockError,
        RequestError,
    )
    from serve.python.engine import Engine
    from serve.python.recording import Recording
    from serve.python.sampling import SamplingParams, StructuredOutputsParams
    from serve.python.sync_engine import SyncEngine
    from serve.vllm.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "ConfigurationError",
    "Engine",
    "EngineClosed",
    "EngineFailure",
    "InvalidRequest",
    "Overloaded",
    "PenstockError",
    "Recording",
    "RequestError",
    "SamplingParams",
    "StructuredOutputsParams",
    "SyncEngine",
    "__version__",
    "http_server",  # pyright: ignore[reportUnsupportedDunderAll]  # in a higher layer
]

_MODULES = {
    "Engine": "serve.python.engine",
    "LLM": "serve.vllm.llm",
    "Recording": "serve.python.recording",
    "SamplingParams": "serve.python.sampling",
    "StructuredOutputsParams": "serve.python.sampling",
    "SyncEngine": "serve.python.sync_engine",
    "http_server": "serve.server.beside",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `--help` does not import the engine."""
    if name not in __all__:
        raise AttributeError(f"module 'serve' has no attribute '{name}'")
    check_packages()
    return getattr(import_module(_MODULES.get(name, "runtime.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class WrongPackageError(ImportError):
    """Raised if a package of Penstock is missing, or if Python finds another project's package of that name first."""


def check_packages(names: tuple[str, ...] = ("runtime", "ops")) -> None:
    """Raise `WrongPackageError` if Python does not find the named packages in the folder that contains this package.

    The packages are not imported. The check runs before any import from `runtime` and `ops`, because other projects
    also have packages with these names.
    """
    root = Path(__file__).resolve().parent.parent
    for name in names:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            raise WrongPackageError(f"Penstock's package '{name}' is missing; install Penstock again.")
        if Path(spec.origin).resolve() != root / name / "__init__.py":
            raise WrongPackageError(
                f"The package '{name}' is not Penstock's: Python finds {spec.origin} first. Use a virtual "
                f"environment without the other '{name}', or start from another folder."
            )
