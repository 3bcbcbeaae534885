"""A build hook of hatchling that compiles the C++ kernels into a wheel.

The environment variable PENSTOCK_KERNELS selects the processors: `this` (the default), `all`, `none`, or an
architecture such as `aarch64`, which needs a cross compiler on other machines. Without a compiler the wheel has no
compiled kernels, and Penstock compiles them at its first start if it then finds a compiler.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "PENSTOCK_KERNELS"
INSIDE = "ops/cpp/prebuilt"  # folder of the wheel that contains the libraries


class KernelHook(BuildHookInterface):
    """Adds compiled kernels to wheels. Editable installs get none, because their sources may change."""

    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels and add their files to `build_data`.

        Raises ValueError for an unknown choice, and if a cross compiler is missing.
        """
        choice = os.environ.get(VARIABLE, "this")
        if version == "editable" or choice == "none":
            return
        sys.path.insert(0, self.root)  # a build environment has hatchling, but not this project
        try:
            from ops.cpp.build import BuildError
            from ops.cpp.prebuilt import compile_target, targets_of
            from ops.machine import Machine
        finally:
            sys.path.remove(self.root)
        targets, compiler = targets_of(choice, Machine.probe())
        if compiler is None or not targets:
            self.app.display_warning("No C++ compiler, or an unknown processor: this wheel has no compiled kernels.")
            return
        self._scratch = tempfile.TemporaryDirectory()  # must live until the wheel is written
        for target in targets:
            self.app.display_info(f"Compiling the C++ kernels for {target.name}")
            try:
                path = compile_target(target, compiler, Path(self._scratch.name))
            except BuildError as error:
                if choice != "this":
                    raise
                self.app.display_warning(f"The C++ kernels do not compile, so this wheel has none: {error}")
                return
            build_data["force_include"][str(path)] = f"{INSIDE}/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{targets[0].machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled libraries after the wheel is written."""
        if self._scratch is not None:
            self._scratch.cleanup()
