from __future__ import annotations

import pytest

from runtime.errors import CheckpointError
from runtime.models.registry import config_of

BARE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_rope_parameters_may_differ_by_layer_type() -> None:
    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = config_of({**BARE, "rope_parameters": by_type})
    full, sliding = config.rope("full_attention"), config.rope("sliding_attention")
    assert (full.kind, full.factor, full.theta) == ("linear", 8.0, 1e6)
    assert (sliding.kind, sliding.theta) == ("default", 1e4)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({}, 2048),
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2048),
    ],
)
def test_context_length_follows_from_the_scaling(scaling, context) -> None:
    assert config_of({**BARE, "rope_scaling": scaling}).rope().context_length == context


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_checkpoints_have_called_longrope_by_several_names(name: str) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    values = {**BARE, "architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 8192}
    rope = config_of({**values, "rope_scaling": {"type": name, **factors}}).rope()
    assert (rope.kind, rope.factor, rope.original_context) == ("longrope", 2.0, 4096)


@pytest.mark.parametrize("section", [[4, 4], [4, 4, 1], [9, -1, 0], "248", [2.0, 3, 3]])
def test_sections_of_a_rotary_embedding_must_fit_the_head(section: object) -> None:
    rope = {"type": "mrope", "mrope_section": section}
    with pytest.raises(CheckpointError, match="mrope_section must be 3 non-negative integers with the sum 8"):
        config_of({**BARE, "rope_scaling": rope}).rope()
    fitting = config_of({**BARE, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}).rope()
    assert (fitting.kind, fitting.sections) == ("default", (2, 3, 3))


def test_layer_types_must_fit_the_layers() -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        config_of({**BARE, "layer_types": ["full_attention"]}).layer_types()
