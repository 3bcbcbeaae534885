"""The facts of a small fictional model, for tests of the plan."""

from __future__ import annotations

from runtime.config.model_facts import ModelFacts

FACTS = ModelFacts(
    architecture="LlamaForCausalLM",
    path="/models/small",
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    hidden_size=512,
    vocab_size=1000,
    context_length=2048,
    dtype="bfloat16",
)
TOKEN_BYTES = 2 * 4 * 2 * 64 * 2  # keys and values x layers x kv heads x head dim x bytes
