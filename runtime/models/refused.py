"""Architectures that Penstock does not support, not even with transformers' code, and why. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

_GROK = (
    "its experts, norms and soft caps are published only as weights in several layouts without code that computes them "
    "in transformers, so there is nothing to check an implementation against; use another model with experts"
)
_MLLAMA = (
    "its layers attend to the image's vectors by cross-attention, for which there is no cache; use Llama 4, Gemma 3 or "
    "Qwen3-VL"
)
_PHI_3_SMALL = (
    "its layers attend in sparse blocks, for which there is no kernel; use Phi-3 mini or medium, or Phi-4, whose "
    "architecture is Phi3ForCausalLM"
)

# Maps an architecture to the end of a sentence that says why it is refused, and what to use instead.
REFUSED: Mapping[str, str] = {
    "DiffusionGemmaForBlockDiffusion": "its text is generated in blocks by diffusion; use Gemma 4",
    "Grok1ForCausalLM": _GROK,
    "Grok1ModelForCausalLM": _GROK,
    "MllamaForCausalLM": _MLLAMA,
    "MllamaForConditionalGeneration": _MLLAMA,
    "PI0ForConditionalGeneration": "its output is robot actions; use a model that generates text",
    "Phi3SmallForCausalLM": _PHI_3_SMALL,
}
