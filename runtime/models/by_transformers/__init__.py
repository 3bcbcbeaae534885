"""Models without a family of ours: transformers' own modules, with our attention, cache and batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ops.select import Kernels
    from runtime.config.model_facts import ModelFacts
    from runtime.config.plan import ModelPlan
    from runtime.models.decoder import Decoder


def load_by_transformers(facts: ModelFacts, plan: ModelPlan, kernels: Kernels) -> Decoder:
    """The model on plan.device in plan.dtype. Imports transformers' models only now.

    Raises CheckpointError for tensors that are missing, left over or misshapen.
    """
    from runtime.models.by_transformers.model import load

    return load(facts, plan, kernels)
