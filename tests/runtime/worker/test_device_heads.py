"""Draft heads on a late device: they propose the ids of the CPU's drafter, and no token differs from plain decoding."""

from __future__ import annotations

from operator import eq
from random import Random

import pytest

import late_heads
from fake_device import LateDevice
from late_heads import Proposals, corrected
from late_steps import Steps
from runtime.config.resolve.graph_sizes import Buckets

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i, 11, 2 + i, 8, 6, 4, 13][: 1 + 4 * i % 11], 8 + 4 * i) for i in range(6)]
GREEDY = ({"temperature": 0.0},)
SIZES, PROMPT_SIZES = (4, 8), (16, 48)
RECURRENT = ("qwen3_next",)  # a graph of 24 tokens computes their larger steps with drafts
KINDS = [
    ("EAGLE3", "qwen3"),  # reads the inputs of three layers, and proposes a part of the vocabulary
    ("NEXTN", "deepseek_v3"),  # latent attention and experts
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("EAGLE", "qwen3"),
            ("EAGLE", "gpt_oss"),  # sliding windows
            ("EAGLE3", "gemma2"),
            ("EAGLE3", "deepseek_v2"),
            ("NEXTN", "glm4_moe"),
            ("MIMO", "qwen2"),
            ("NEXTN", "qwen3_next"),  # recurrent layers
        )
    ),
]


@pytest.mark.parametrize(("kind", "family"), KINDS)
def test_heads_propose_the_ids_of_the_cpu_and_change_no_token(kind: str, family: str) -> None:
    """The head's own entries, the states in graphs, and the rows whose starts only the device knows are right."""
    draft = late_heads.head(kind, family)
    sizes = (*SIZES, 24) if family in RECURRENT else SIZES
    sequences = late_heads.sequences_of(PROMPTS, GREEDY)
    plain = Steps(64, 4, family=family)
    expected, num_plain = late_heads.run(plain, sequences, depth=0, num_pages=64, chunk_tokens=None)
    known = late_heads.rights(sequences, expected)

    on_host, steps = Proposals(known), Steps(64, 4, family=family)
    steps.use_draft_model(draft)
    with corrected(on_host):
        sequences = late_heads.sequences_of(PROMPTS, GREEDY)
        found, num_steps = late_heads.run(steps, sequences, depth=0, num_pages=64, chunk_tokens=None)
    assert found == expected
    assert num_steps < 0.7 * num_plain  # runs of drafts are accepted

    for depth, num_pages, chunk_tokens in ((0, 64, None), (2, 18, 3)):
        device, proposed = LateDevice(Random(depth), haste=0.5 if depth else 1), Proposals(known)
        steps = Steps(num_pages, 4, device, family=family)
        steps.use_draft_model(draft, sizes, PROMPT_SIZES)
        steps.use_graphs(Buckets(sizes), PROMPT_SIZES)
        late_heads.capture_all(steps)
        with corrected(proposed):
            sequences = late_heads.sequences_of(PROMPTS, GREEDY)
            aborted = 1 if depth else 0
            found, _ = late_heads.run(
                steps, sequences, depth=depth, num_pages=num_pages, chunk_tokens=chunk_tokens, aborted=aborted
            )
        device.settle()
        proposed.read()
        assert found[aborted:] == expected[aborted:]
        assert all(own == right[: len(own)] for own, right in zip(found, expected, strict=True))
        if not depth:
            assert proposed.seen == on_host.seen
        pairs = [(ids, on_host.seen[place]) for place, ids in proposed.seen.items() if place in on_host.seen]
        same = [all(map(eq, *pair)) for pair in pairs]  # a row may have fewer drafts than on the CPU
        assert sum(same) > 0.9 * len(same) > 20
