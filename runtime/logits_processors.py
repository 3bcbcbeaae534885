"""Logits processors: functions on this machine that requests select by name (--logits-processors).

    def ban_digits(logits, output_ids, params):  # logits: float32 [V], changed in place
        logits[params["digits"]] = -float("inf")

Requests send a name, never code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from runtime.constraint import Constraint, HostData, Output
from runtime.errors import ConfigurationError, InvalidRequest

# Called with the logits (float32 [V]), the ids of the output so far, and the request's `custom_params`.
Processor = Callable[[Any, list[int], Mapping[str, Any]], object]


def load_processors(paths: Sequence[str]) -> dict[str, Processor]:
    """Import the functions. Return them by the names that requests use.

    Each path is package.module.function or NAME=package.module.function. Raises `ConfigurationError` if a function
    cannot be imported, or if two functions have the same name.
    """
    found: dict[str, Processor] = {}
    for each in paths:
        name, path = name_of(each), each.rpartition("=")[2]
        module, _, attribute = path.rpartition(".")
        try:
            function = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"--logits-processors {each} cannot be imported ({error}). Use the form NAME=package.module.function."
            ) from error
        if not callable(function):
            raise ConfigurationError(f"--logits-processors {each} is not a function.")
        if name in found:
            raise ConfigurationError(f"--logits-processors: two functions are called {name}.")
        found[name] = function
    return found


def name_of(path: str) -> str:
    """Return the name by which requests select a function. `path` is NAME=package.module.function or the path alone."""
    name, _, function = path.rpartition("=")
    return name or function.rpartition(".")[2]


def check_name(name: str, known: Collection[str]) -> None:
    """Raise `InvalidRequest` unless the server has a function with this name."""
    if name not in known:
        shown = ", ".join(known) or "none; start it with --logits-processors"
        raise InvalidRequest(
            f"custom_logit_processor must name a function of this server ({shown}), not {name[:80]!r}; code is not "
            "accepted.",
            param="custom_logit_processor",
        )


class ProcessedLogits:
    """A `Constraint` that calls a logits processor before each token, in addition to the inner constraint."""

    def __init__(self, function: Processor, params: Mapping[str, Any], inner: Constraint | None) -> None:
        self._function, self._params, self._inner = function, params, inner

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Make the sampler call the logits processor for the next token, and request the inner constraint's data."""
        output_ids = output.ids[output.num_prompt : output.num_prompt + output.num_output]
        data.process_with(partial(self._process, output_ids))
        if self._inner is None:
            data.give()
        else:
            self._inner.host_data_after(choice, output, data)

    def _process(self, output_ids: list[int], logits: Any) -> None:
        self._function(logits, output_ids, self._params)
