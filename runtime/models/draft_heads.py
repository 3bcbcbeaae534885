"""Tables of draft heads and of models' multi-token prediction layers, by architecture. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from runtime.modeling.entry import Entry
from runtime.models.decoders import ARCHITECTURES

_LLAMA = {"max_position_embeddings": 2048}
_QWEN = {"max_position_embeddings": 32768, "attention_bias": True}
# Draft heads use the embedding and LM head of the model. Some checkpoints also store copies, or a mask (t2d) of the
# tokens in d2t.
_UNUSED = {r"(model\.)?embed_tokens\.": None, r"t2d$": None, r"model\.(?=(layers|midlayer|fc|norm)\.)": ""}
_EAGLE = {**_UNUSED, r"(model\.)?lm_head\.": None}
_EAGLE3 = {**_UNUSED, r"layers\.0\.": "midlayer."}


def _nextn(base: str, family: str, tensors: Mapping[str, str | None]) -> Entry:
    entry = ARCHITECTURES[base]
    return replace(entry, family=family, layer_types=(), tensors=tensors, draft_head=True)


# For a prediction layer that is stored after the model's own layers. `tensor_name` in the loader has renumbered it as
# layer 0. Its copies of the embedding and of the LM head are not used.
_AFTER_LAYERS = {r"model\.layers\.0\.(embed_tokens|shared_head\.head)\.": None}
_MIMO: Mapping[str, str | None] = {r"model\.mtp_layers\.0\.": "mtp.", r"": None}
_MTP: Mapping[str, str | None] = {r"mtp\.": "mtp.", r"": None}

DRAFT_HEADS: Mapping[str, Entry] = {
    "LlamaForCausalLMEagle": Entry("eagle:eagle", _LLAMA, tensors=_EAGLE, spelling="llama", draft_head=True),
    "Qwen2ForCausalLMEagle": Entry("eagle:eagle", _QWEN, tensors=_EAGLE, draft_head=True),
    "LlamaForCausalLMEagle3": Entry("eagle:eagle3", _LLAMA, tensors=_EAGLE3, spelling="llama", draft_head=True),
    "DeepseekV3ForCausalLMNextN": _nextn("DeepseekV3ForCausalLM", "deepseek:nextn", _AFTER_LAYERS),
    "Glm4MoeForCausalLMNextN": _nextn("Glm4MoeForCausalLM", "glm:nextn", _AFTER_LAYERS),
    "MiMoForCausalLMMTP": _nextn("MiMoForCausalLM", "qwen2:mimo_nextn", _MIMO),
    "Qwen3NextForCausalLMMTP": _nextn("Qwen3NextForCausalLM", "qwen3_next:nextn", _MTP),
}
# Architecture in the config.json of an EAGLE checkpoint -> architecture of the draft head.
EAGLE_NAMES: Mapping[str, str] = {
    "LlamaForCausalLM": "LlamaForCausalLMEagle",
    "LlamaForCausalLMEagle": "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM": "LlamaForCausalLMEagle",
    "EagleForCausalLM": "LlamaForCausalLMEagle",
    "Qwen2ForCausalLM": "Qwen2ForCausalLMEagle",
    "Qwen2ForCausalLMEagle": "Qwen2ForCausalLMEagle",
    "EagleQwen2ForCausalLM": "Qwen2ForCausalLMEagle",
}
EAGLE3_NAMES: Mapping[str, str] = dict.fromkeys(
    ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3ForCausalLM"),
    "LlamaForCausalLMEagle3",
)
# Architecture of a model -> architecture of its multi-token prediction layers.
NEXTN: Mapping[str, str] = {
    "DeepseekV3ForCausalLM": "DeepseekV3ForCausalLMNextN",
    "Glm4MoeForCausalLM": "Glm4MoeForCausalLMNextN",
    "MiMoForCausalLM": "MiMoForCausalLMMTP",
    "Qwen3NextForCausalLM": "Qwen3NextForCausalLMMTP",
}
# Prefix of the tensors of multi-token prediction layers that checkpoints do not store as `model.layers.N`.
OWN_PREFIXES: Mapping[str, str] = {"MiMoForCausalLMMTP": "model.mtp_layers.0.", "Qwen3NextForCausalLMMTP": "mtp."}
