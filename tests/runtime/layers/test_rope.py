"""RoPE scalings that the parity tests do not cover, because transformers needs several passes for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from ops.attention import AttentionMetadata
from ops.select import select
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.rope import Rope, inverse_frequencies
from runtime.layers.rope_parameters import RopeParameters


def parameters(**values) -> RopeParameters:
    return RopeParameters(**{"theta": 10000.0, "dim": 8, "max_position": 64, **values})


def at(positions: list[Any]) -> ForwardBatch:
    """Return a batch with one token at each of these positions."""
    tensor = torch.tensor(positions)
    count = len(tensor)
    attention = AttentionMetadata.build([0], [count], np.zeros((1, count), np.int32), 1)
    return ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64), positions=tensor, attention=attention, cache={}
    )


def test_dynamic_scaling_waits_until_the_context_is_longer_than_trained() -> None:
    plain, _ = inverse_frequencies(parameters(), 64)
    within, _ = inverse_frequencies(parameters(kind="dynamic", factor=2.0), 64)
    beyond, _ = inverse_frequencies(parameters(kind="dynamic", factor=2.0), 128)
    assert torch.equal(within, plain)
    # At twice the context the base grows by 3 ** (dim / (dim - 2)), so the slowest pair rotates at a third of its
    # speed.
    torch.testing.assert_close(beyond[-1], plain[-1] / 3)
    assert beyond[0] == plain[0]


def test_longrope_takes_its_factors_by_the_context() -> None:
    longrope = parameters(
        kind="longrope",
        factor=2.0,
        original_context=32,
        short_factor=(1.0,) * 4,
        long_factor=(2.0,) * 4,
    )
    short, _ = inverse_frequencies(longrope, 32)
    long, _ = inverse_frequencies(longrope, 33)
    torch.testing.assert_close(long, short / 2)


def test_given_attention_factor_replaces_the_derived_one() -> None:
    for kind in ("yarn", "longrope"):
        values = {"kind": kind, "factor": 2.0, "short_factor": (1.0,) * 4, "long_factor": (1.0,) * 4}
        assert inverse_frequencies(parameters(**values), 64)[1] > 1.01
        assert inverse_frequencies(parameters(**values, attention_factor=0.5), 64)[1] == 0.5


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="spiral"):
        inverse_frequencies(parameters(kind="spiral"), 64)


def test_table_reaches_the_last_position_of_the_context() -> None:
    rope = Rope(parameters(), 100, select(), torch.device("cpu"))
    assert rope.table.shape == (100, 8)
    q = torch.ones(1, 1, 8)
    assert rope(q, q, at([99]))[0].isfinite().all()


def test_partial_rotation_leaves_the_rest_of_each_head() -> None:
    rope = Rope(parameters(dim=4), 10, select(), torch.device("cpu"))
    q = torch.randn(1, 2, 8)
    turned, _ = rope(q, q, at([5]))
    assert torch.equal(turned[..., 4:], q[..., 4:])
    assert not torch.equal(turned[..., :4], q[..., :4])


def test_interleaved_sections_are_those_of_qwen3_vl() -> None:
    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [5, 2, 1]}
    config = Qwen3VLTextConfig(hidden_size=32, num_attention_heads=2, head_dim=16, rope_parameters=rope_parameters)
    axes = torch.stack([torch.arange(9), torch.arange(9) * 2, 20 - torch.arange(9)])
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), axes[:, None])
    found = {}
    for interleaved in (True, False):
        parts = parameters(dim=16, sections=(5, 2, 1), sections_interleaved=interleaved)
        rope = Rope(parts, 64, select(), torch.device("cpu"))
        found[interleaved] = rope._angles(axes)
    wanted = torch.cat([cos[0, :, :8], sin[0, :, :8]], dim=-1)
    torch.testing.assert_close(found[True], wanted)
    assert (found[False] - wanted).abs().max() > 0.1
