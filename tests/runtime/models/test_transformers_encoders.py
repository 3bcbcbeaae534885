"""Classifiers and encoders without a native family, computed by transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

import http_server
import tiny_encoders
import tiny_foreign
from ops.attention import AttentionMetadata
from runtime.errors import CheckpointError
from runtime.layers.forward_batch import ForwardBatch
from runtime.loading.facts import read_facts
from runtime.models.by_transformers.encoder import PADDED, TransformersEncoder
from runtime.models.registry import find
from serve import Engine
from serve.server.app import build_app
from tiny_checkpoints import redraw

IDS = [[3, 9, 4, 7, 5, 2], [8, 6, 2], [3 + 5 * index % 90 for index in range(30)] + [2]]  # each ends with EOS
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1, "log_level": "error"}
COMMON = {"bart": (), "deberta-v2": pytest.mark.slow, "gpt2": pytest.mark.slow}
OWN: dict[str, dict[str, Any]] = {  # fields of single kinds, which override those of `tiny_foreign`
    "deberta": {"relative_attention": True, "pos_att_type": "c2p|p2c"},
    "deberta-v2": {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16},
    "t5": {"decoder_start_token_id": 0},
}
NOT_SERVED = {
    "canine": "it reads characters, not tokens",
    "cohere_compass_text": "its configuration alone makes no model",
    "layoutlmv2": "it needs a page's picture, and a library of its own",
    "layoutlmv3": "it needs the places of words on a page",
    "lilt": "it needs the places of words on a page",
    "perceiver": "it reads bytes, not tokens",
}


@cache
def checkpoint(model_type: str, name: str, **own: Any) -> str:
    """Return a temporary checkpoint of this transformers class."""
    folder = str(Path(_scratch().name) / name)
    whole = {"is_decoder": False} if "is_decoder" in tiny_foreign.OWN.get(model_type, {}) else {}
    made = tiny_foreign.config(model_type, **whole, **OWN.get(model_type, {}), **own)
    model = getattr(transformers, name)(made)
    redraw(model, seed=0)
    model.save_pretrained(folder)
    return folder


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="classifiers-")


def alone(path: str, name: str) -> Any:
    return getattr(transformers, name).from_pretrained(path, dtype=torch.float32).eval()


async def vectors(path: str, texts: list[list[int]]) -> list[torch.Tensor]:
    async with Engine(path, **OPTIONS) as engine:
        return [torch.tensor(each["embedding"]) for each in await engine.encode(input_ids=texts)]


FOREIGN = [
    kind
    for kind, name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.items()
    if isinstance(name, str) and find(name) is None
]


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(kind, marks=COMMON.get(kind, pytest.mark.long)) for kind in FOREIGN if kind not in NOT_SERVED],
)
async def test_scores_are_those_of_transformers(model_type: str) -> None:
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[model_type]
    path = checkpoint(model_type, name, num_labels=3)
    facts = read_facts(path)
    assert len(facts.labels) == 3
    longest = [3 + index % 90 for index in range(min(300, facts.context_length) - 1)] + [2]
    texts = [*IDS, longest]
    found, model = await vectors(path, texts), alone(path, name)
    for scores, ids in zip(found, texts, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "model_type", ["electra", *(pytest.param(kind, marks=pytest.mark.slow) for kind in PADDED[:3])]
)
def test_texts_of_a_step_are_filled_up_and_masked(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of similar length are computed in one padded pass, with the results of single texts. If it fails, each
    text is computed alone.
    """
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[model_type]
    model = alone(checkpoint(model_type, name, num_labels=3), name)
    counts = [23, 26, 24, 27]
    texts = [torch.tensor([*(3 + (5 * at + count) % 90 for at in range(count - 1)), 2]) for count in counts]
    batch = ForwardBatch(
        token_ids=torch.cat(texts),
        positions=torch.cat([torch.arange(count) for count in counts]),
        attention=AttentionMetadata.build([0] * 4, counts, np.arange(4, dtype=np.int32)[:, None], 32),
        cache={},
    )
    whole = TransformersEncoder(model, 3)
    with torch.inference_mode():
        wanted = torch.cat([model(text[None]).logits for text in texts])
        with monkeypatch.context() as patch:
            patch.setattr(TransformersEncoder, "_text", None)
            found = whole(batch)
        monkeypatch.setattr(TransformersEncoder, "_together", None)
        again = whole(batch)
    last = torch.tensor(counts).cumsum(0) - 1
    torch.testing.assert_close(found[last], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again[last], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["albert", "deberta-v2"])
async def test_vectors_are_those_of_transformers(model_type: str) -> None:
    name = MODEL_MAPPING_NAMES[model_type]
    path = checkpoint(model_type, name)
    found, model = await vectors(path, IDS), alone(path, name)
    for vector, ids in zip(found, IDS, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(vector, F.normalize(states.mean(0), dim=0), atol=1e-5, rtol=0)


async def test_texts_are_classified_over_http_and_one_that_fails_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, cls, sep = "ElectraForSequenceClassification", tiny_encoders.CLS, tiny_encoders.SEP
    path = checkpoint("electra", name, num_labels=3)
    tiny_encoders.save_tokenizer(Path(path))
    text = TransformersEncoder._text

    def failing(self: TransformersEncoder, ids: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        if len(ids) == 4:
            raise IndexError("out of range")
        return text(self, ids, types)

    ids, types = torch.tensor([[cls, 9, 8, sep, 7, sep]]), torch.tensor([[0, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        wanted = alone(path, name)(ids, token_type_ids=types).logits[0].tolist()
    pair = {"text": "w9 w8", "text_pair": "w7"}
    async with (
        Engine(path, log_level="error") as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        good = await client.post("/classify", json=pair)
        monkeypatch.setattr(TransformersEncoder, "_text", failing)
        bad = await client.post("/classify", json={"text": "w9 w8"})
        again = await client.post("/classify", json=pair)
    assert good.json()["embedding"] == pytest.approx(wanted, abs=1e-4)
    assert bad.status_code == 500
    assert again.json()["embedding"] == good.json()["embedding"]


def test_what_is_no_text_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ViTModel"], "model_type": "vit"}')
    with pytest.raises(CheckpointError, match="no causal language model, classifier or encoder with this name"):
        read_facts(str(tmp_path))


def test_classifiers_are_listed() -> None:
    """Classifiers without a native family are listed as served, or as not served with the reason."""
    document = (Path(__file__).parents[3] / "docs" / "embeddings.md").read_text(encoding="utf-8")
    served = ", ".join(f"`{kind}`" for kind in sorted({*FOREIGN} - NOT_SERVED.keys()))
    refused = "; ".join(f"`{kind}` ({why})" for kind, why in sorted(NOT_SERVED.items()))
    for listed in (served, refused):
        assert listed in document, listed
