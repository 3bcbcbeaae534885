"""Training computes the same as Qwen3, separates documents, learns, and resumes where it stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from demo_model import export, vocabulary
from demo_model.conversation import Prose, render
from demo_model.corpus import Encoded, Mixture, documents, encode
from demo_model.network import Group, Network, Shape
from demo_model.training import Schedule, Trainer, orthogonalise

TINY = Shape(vocab=400, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp=64)
SHORT = Schedule(steps=30, tokens_per_step=512, learnt_per_step=256, matrix_lr=0.01, other_lr=0.01)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ("".join(text for text, _ in render(document)) for document in documents("tables", 1, 200))
    return vocabulary.train(texts, TINY.vocab)


@pytest.fixture(scope="module")
def encoded(tokenizer: Tokenizer) -> Encoded:
    return encode(tokenizer, documents("tables", 1, 100), 300)


def trainer(schedule: Schedule = SHORT) -> Trainer:
    torch.manual_seed(0)
    return Trainer(TINY, schedule, "cpu", compiled=False)


def test_exported_weights_compute_the_same_in_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoModelForCausalLM

    made = trainer()
    with torch.no_grad():
        for weight in made.network.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
            weight.copy_(weight.bfloat16())  # the precision of exported weights
    made.save(tmp_path / "checkpoint.pt")
    export.write(tmp_path / "checkpoint.pt", tokenizer, tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokens = torch.randint(0, TINY.vocab, (24,))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = made.network(tokens, torch.arange(24), [Group(1, 24)])
        logits = (hidden @ made.network.embed_tokens.weight.T).float()
        wanted = reference(tokens[None]).logits[0].float()
    assert (logits - wanted).abs().max() < 0.03 * wanted.abs().max()


def test_documents_of_one_step_do_not_see_each_other() -> None:
    network = Network(TINY)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    tokens = torch.randint(0, TINY.vocab, (48,))
    positions = torch.cat([torch.arange(16), torch.arange(16), torch.arange(16)])
    other = tokens.clone()
    other[:16] = torch.randint(0, TINY.vocab, (16,))
    with torch.autocast("cpu", torch.bfloat16):
        first = network(tokens, positions, [Group(3, 16)])
        second = network(other, positions, [Group(3, 16)])
    assert torch.equal(first[16:], second[16:])
    assert not torch.equal(first[:16], second[:16])


def test_a_step_holds_whole_documents_and_the_right_targets(encoded: Encoded) -> None:
    layout = Mixture({"tables": encoded}, {"tables": 1.0}, seed=3).step(1024, 512)
    assert sum(rows * length for rows, length in layout.groups) == 1024
    count = int((layout.targets >= 0).sum())
    assert 0 < count < 512
    learnt_index = layout.learnt_index[:count]
    assert np.array_equal(layout.tokens[learnt_index + 1], layout.targets[:count])
    assert np.array_equal(layout.positions[learnt_index] + 1, layout.positions[learnt_index + 1])


def test_only_answers_are_learnt(tokenizer: Tokenizer, encoded: Encoded) -> None:
    tokens, learnt = encoded.document(0)
    answer = tokenizer.decode(tokens[learnt].tolist(), skip_special_tokens=False)
    assert answer.endswith("<|im_end|>")
    assert "user" not in answer
    assert tokenizer.decode(tokens[~learnt].tolist(), skip_special_tokens=False).count("<|im_start|>") == 2


def test_loss_falls(encoded: Encoded) -> None:
    losses = list(trainer().run(Mixture({"tables": encoded}, {"tables": 1.0}, seed=1)))
    assert len(losses) == SHORT.steps
    assert sum(losses[-3:]) < 0.75 * sum(losses[:3])


def test_training_goes_on_where_it_stopped(tmp_path: Path, encoded: Encoded) -> None:
    first = trainer()
    losses = first.run(Mixture({"tables": encoded}, {"tables": 1.0}, seed=1))
    for _ in range(5):
        next(losses)
    first.save(tmp_path / "checkpoint.pt")
    second = trainer()
    second.restore(tmp_path / "checkpoint.pt")
    assert second.step == 5
    ours = next(first.run(Mixture({"tables": encoded}, {"tables": 1.0}, seed=9)))
    assert next(second.run(Mixture({"tables": encoded}, {"tables": 1.0}, seed=9))) == pytest.approx(ours, rel=1e-4)


def test_rate_rises_stays_and_falls_to_zero() -> None:
    schedule = Schedule(warm_up=0.1, decay=0.4)
    rates = [schedule.rate(progress) for progress in (0.0, 0.05, 0.3, 0.6, 0.8, 1.0)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5, 0.0], abs=0.02)


@pytest.mark.parametrize("size", [(3, 24, 48), (2, 48, 24)])
def test_orthogonalised_matrices_have_singular_values_near_one(size: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(size)).float())
    assert values.min() > 0.4
    assert values.max() < 1.5


def test_every_digit_is_a_token_and_text_survives(tokenizer: Tokenizer) -> None:
    text = "1234 + 56\n\n--page-size é <think>"
    encoding = tokenizer.encode(text)
    assert [token for token in encoding.tokens if any(sign.isdigit() for sign in token)] == list("123456")
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def test_an_answer_is_cut_into_the_same_tokens_alone_and_in_its_conversation(tokenizer: Tokenizer) -> None:
    prompt, answer = "<|im_start|>assistant\n<think>\n\n</think>\n\n", "The capital of France is Paris."
    apart = tokenizer.encode(prompt).ids + tokenizer.encode(answer).ids
    assert tokenizer.encode(prompt + answer).ids == apart


def test_prose_is_learnt_to_its_end(tokenizer: Tokenizer) -> None:
    made = encode(tokenizer, iter([Prose("Once upon a time.")]), 300)
    assert made.learnt.all()
    assert tokenizer.id_to_token(int(made.tokens[-1])) == "<|endoftext|>"
