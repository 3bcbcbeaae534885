"""Granite with mixtures of experts: Granite's factors, and the weights of all experts in one tensor."""

from __future__ import annotations

from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames
from runtime.models.config import Config
from runtime.models.decoder import Decoder
from runtime.models.granite import scaled
from runtime.models.mixtures import block_sparse

NAMES = ExpertNames(
    router="router.layer", gate="input_linear.weight", up="input_linear.weight", down="output_linear.weight"
)


def decoder(config: Config, build: Build) -> Decoder:
    """Experts in every layer."""
    return scaled(config, build, lambda index: block_sparse(config, index, build, NAMES))
