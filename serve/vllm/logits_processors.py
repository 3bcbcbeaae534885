"""vLLM's interface for custom logits processors, implemented with the engine's hook `on_logits`.

Each request has its own instance of every processor. Therefore an instance always processes a batch of one row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.errors import InvalidRequest
from serve.python.hooks import OnLogits
from serve.python.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor, device

State = TypeVar("State")
RequestLogitsProcessor = Callable[..., Any]  # (output ids, logits) or (prompt ids, output ids, logits) -> logits [V]


@dataclass(slots=True)
class BatchUpdate:
    """The rows that were added to a batch, as tuples (row, parameters, prompt ids, output ids).

    The list of output ids grows with the output. Penstock leaves `removed` and `moved` empty.
    """

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]] = ()
    moved: Sequence[Any] = ()


class LogitsProcessor:
    """Base class of logits processors with vLLM's interface. Subclasses define `update_state` and `apply`.

    Penstock passes None as `vllm_config`.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError` if the processor does not support a request's parameters."""

    def __init__(self, vllm_config: Any, device: device, is_pin_memory: bool) -> None:
        """Create a processor for logits on this device."""

    def is_argmax_invariant(self) -> bool:
        """Return True if the processor never changes which token is most likely."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the state for the added rows. `batch_update` is None if the batch has not changed."""
        raise NotImplementedError

    def apply(self, logits: Tensor) -> Tensor:
        """Return the processed logits, float32 [rows, vocabulary]. The processor may change them in place."""
        raise NotImplementedError


class AdapterLogitsProcessor(LogitsProcessor):
    """A processor with one function per request. Subclasses define `new_req_logits_processor`."""

    def __init__(self, vllm_config: Any, device: device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._functions: dict[int, Callable[[Tensor], Any]] = {}

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function for a request with these parameters, or None to leave its logits unchanged."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Create the functions of the added rows."""
        process_dict_updates(self._functions, batch_update, self._bound)

    def _bound(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Any] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        first = () if len(inspect.signature(function).parameters) == 2 else (prompt_ids,)
        return lambda logits: function(*first, output_ids, logits)

    def apply(self, logits: Tensor) -> Tensor:
        """Call the function of each row, and return the logits."""
        for row, function in self._functions.items():
            changed = function(logits[row])
            if changed is not None:
                logits[row] = changed
        return logits


def process_dict_updates(
    states: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Set the state of each added row to `new_state(parameters, prompt ids, output ids)`.

    If `new_state` returns None, the row's state is removed. Returns whether `states` changed.
    """
    changed = False
    for row, params, prompt_ids, output_ids in () if batch_update is None else batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            states[row] = state
            changed = True
        elif states.pop(row, None) is not None:
            changed = True
    return changed


def hook_of(processors: Sequence[type[LogitsProcessor]], params: SamplingParams, prompt: list[int]) -> OnLogits | None:
    """Return the hook that runs these processors for one request, or None without processors.

    Raises `InvalidRequest` if the request has several outputs.
    """
    if not processors:
        return None
    if params.n > 1:
        raise InvalidRequest("n must be 1 with logits_processors; give the prompt several times.", param="n")
    for each in processors:
        each.validate_params(params)
    return _Hook(processors, params, prompt)


class _Hook:
    """Calls the processors of one request. The processors are created when the first logits arrive."""

    def __init__(self, processors: Sequence[type[LogitsProcessor]], params: SamplingParams, prompt: list[int]) -> None:
        self._classes = processors
        self._params = params
        self._prompt = prompt
        self._made: list[LogitsProcessor] | None = None
        self._output: list[int] = []  # updated in place, because processors keep a reference to this list

    def __call__(self, ids: list[int], logits: Tensor) -> Tensor:
        self._output[:] = ids[len(self._prompt) :]
        update = None
        if self._made is None:
            self._made = [each(None, logits.device, False) for each in self._classes]
            update = BatchUpdate(1, added=[(0, self._params, self._prompt, self._output)])
        rows = logits[None]
        for each in self._made:
            each.update_state(update)
            rows = each.apply(rows)
        return rows[0]
