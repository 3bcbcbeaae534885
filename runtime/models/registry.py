"""Which architectures there are. Torch-free: a family's file is imported when its model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtime.errors import CheckpointError

if TYPE_CHECKING:
    from runtime.layers.build import Build
    from runtime.models.config import Config
    from runtime.models.decoder import Decoder

    BuildDecoder = Callable[[Config, Build], Decoder]


@dataclass(frozen=True, slots=True)
class Entry:
    """A family's file, and the values its configuration takes where config.json is silent."""

    family: str  # the file in this folder; in config.json "model_type" is the same
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def decoder(self) -> BuildDecoder:
        """The family's function that builds the whole model, its parameters not yet filled."""
        return import_module(f"runtime.models.{self.family}").decoder


_QWEN = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_QWEN_EXPERTS = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_local_experts": 128,
}

_GEMMA = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}

_GEMMA_2 = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

ARCHITECTURES: Mapping[str, Entry] = {
    "GemmaForCausalLM": Entry(
        "gemma", {**_GEMMA, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16}
    ),
    "Gemma2ForCausalLM": Entry("gemma2", {**_GEMMA, **_GEMMA_2}),
    "LlamaForCausalLM": Entry("llama", {"max_position_embeddings": 2048}),
    "MistralForCausalLM": Entry(
        "mistral",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Phi3ForCausalLM": Entry(
        "phi3",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "Qwen2ForCausalLM": Entry("qwen2", _QWEN),
    "Qwen3ForCausalLM": Entry("qwen3", {**_QWEN, "head_dim": 128}),
    "Qwen3MoeForCausalLM": Entry("qwen3_moe", {**_QWEN, **_QWEN_EXPERTS, "num_key_value_heads": 4}),
}


def entry(architecture: str) -> Entry:
    """The entry of an architecture. Raises CheckpointError, with a hint, where there is none."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    meant = _misspelt(architecture)
    hint = f" Did you mean {meant}?" if meant else ""
    known = ", ".join(sorted(ARCHITECTURES))
    raise CheckpointError(f"The architecture {architecture} is not supported.{hint} Supported are: {known}.")


def _misspelt(architecture: str) -> str | None:
    """The name that was meant, where only letters are wrong: another number or addition is another architecture."""
    stem = _family(architecture)
    families = {_family(name): name for name in ARCHITECTURES if _digits(name) == _digits(architecture)}
    close = get_close_matches(stem, families, n=1, cutoff=0.85)
    return families[close[0]] if close else None


def _family(architecture: str) -> str:
    return architecture.lower().partition("for")[0]


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))
