"""Read the initial placement of experts (`--init-expert-location`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np

from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError
from runtime.experts.balance import balanced
from runtime.experts.placement import placed

FLAG = "--init-expert-location"
MAX_FILE_BYTES = 2**30


def read_expert_places(plan: Plan, facts: ModelFacts) -> dict[str, list[int]]:
    """Return layer number (as text) -> expert in each slot. Return {} for the placement "trivial", or without EP.

    A table `physical_to_logical_map` [L, slots] is used unchanged. From a table of token counts, `logical_count` [L, X]
    or [steps, L, X], a balanced placement is computed. L is the model's number of layers; rows of layers without
    experts are not used. Raises ConfigurationError if the table does not fit the model.
    """
    experts, location = plan.experts, plan.experts.location
    if location == "trivial" or experts.ep_size == 1:
        return {}
    body = _read(location)
    if "physical_to_logical_map" in body:
        table = _table(body["physical_to_logical_map"], "physical_to_logical_map")
        lines = {str(layer): line.tolist() for layer, line in enumerate(table)}
    elif "logical_count" in body:
        counts = _table(body["logical_count"], "logical_count", dims=(2, 3))
        counts = counts.swapaxes(0, 1) if counts.ndim == 3 else counts
        if counts.shape[-1] != facts.num_experts:
            raise ConfigurationError(f"{FLAG}: logical_count has {counts.shape[-1]} experts, not {facts.num_experts}.")
        slots = balanced(
            dict(enumerate(counts)),
            num_slots=facts.num_experts + experts.num_redundant,
            num_ranks=experts.ep_size,
            num_nodes=plan.parallel.stage_nodes,
            num_groups=facts.num_expert_groups,
            algorithm=experts.balance_algorithm,
        )
        lines = {str(layer): line for layer, line in slots.items()}
    else:
        raise ConfigurationError(f"{FLAG}: physical_to_logical_map or logical_count is missing.")
    if len(lines) != facts.num_layers:
        raise ConfigurationError(f"{FLAG}: the table has {len(lines)} layers, the model {facts.num_layers}.")
    return {layer: line for layer, line in lines.items() if _check(layer, line, plan, facts)}


def _check(layer: str, line: Sequence[int], plan: Plan, facts: ModelFacts) -> bool:
    """Return False for a row of zeros, which belongs to a layer without experts, and True for a valid row.

    Raises ConfigurationError for an invalid row.
    """
    if not any(line):
        return False
    experts = plan.experts
    if len(line) != facts.num_experts + experts.num_redundant:
        raise ConfigurationError(
            f"{FLAG}: layer {layer} has {len(line)} slots, not {facts.num_experts} experts and "
            f"{experts.num_redundant} copies (--ep-num-redundant-experts)."
        )
    try:
        placed(line, facts.num_experts, experts.ep_size)
    except ValueError as error:
        raise ConfigurationError(f"{FLAG}: layer {layer}: {error}") from error
    return True


def _read(location: str) -> Mapping[str, Any]:
    try:
        if location.endswith((".json", ".pt")) and Path(location).stat().st_size > MAX_FILE_BYTES:
            raise ConfigurationError(f"{FLAG}: {location} is larger than {MAX_FILE_BYTES} bytes.")
        if location.endswith(".pt"):
            import torch

            body = torch.load(location, map_location="cpu", weights_only=True)
        else:
            text = Path(location).read_text(encoding="utf-8") if location.endswith(".json") else location
            body = json.loads(text)
    except (OSError, ValueError, RuntimeError, UnpicklingError) as error:
        raise ConfigurationError(f"{FLAG}: {location[:200]} cannot be read: {error}") from error
    if not isinstance(body, Mapping):
        raise ConfigurationError(f"{FLAG} must be an object with physical_to_logical_map or logical_count.")
    return body


def _table(value: Any, name: str, dims: tuple[int, ...] = (2,)) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    try:
        table = np.array(value.tolist() if hasattr(value, "tolist") else value)
    except ValueError as error:
        raise ConfigurationError(f"{FLAG}: the lines of {name} have different lengths.") from error
    if table.ndim not in dims or not np.issubdtype(table.dtype, np.integer) or (table < 0).any():
        raise ConfigurationError(f"{FLAG}: {name} must be a table of numbers from 0 on.")
    return table
