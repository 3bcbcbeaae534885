"""A model folder that cannot be served is refused at the start, with a message that names the problem."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
import tiny_tokenizers
from runtime.config.plan import TokenizerPlan
from runtime.errors import CheckpointError, ConfigurationError
from runtime.loading.facts import read_facts
from runtime.tokenizer.files import read_tokenizer
from serve.python.sync_engine import SyncEngine

Header = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid model with a tokenizer."""
    path = Path(shutil.copytree(tiny_checkpoints.cached(vocab_size=600), tmp_path / "model"))
    tiny_tokenizers.write(path)
    return path


def refusal(folder: Path, **options: Any) -> str:
    """Return the error of an engine that cannot start with this folder."""
    with (
        pytest.raises(ConfigurationError) as caught,
        SyncEngine(str(folder), max_total_tokens=256, **options),
    ):
        pass
    return str(caught.value)


def change(folder: Path, file: str = "config.json", **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_header(folder: Path, edit: Callable[[Header], None]) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header: Header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def overlap(header: Header) -> None:
    first, second = sorted(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])[:2]
    _, end = header[second]["data_offsets"]
    size = header[first]["data_offsets"][1] - header[first]["data_offsets"][0]
    header[first]["data_offsets"] = [end - size, end]


def test_without_a_tokenizer_the_engine_does_not_start(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    said = refusal(folder)
    assert "has no tokenizer" in said
    assert "--skip-tokenizer-init" in said
    assert "sentencepiece" not in said
    for file in folder.glob("*token*"):
        file.unlink()
    change(folder, model_type="qwen2")  # transformers creates a tokenizer without tokens for it
    assert "has no tokenizer" in refusal(folder)
    with SyncEngine(str(folder), max_total_tokens=256, skip_tokenizer_init=True) as engine:
        assert engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})["output_ids"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"chat_template": 7},
        {"chat_template": [{"name": "x"}]},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"5": {"special": True}}},
        {"added_tokens_decoder": {"5": None}},
    ],
)
def test_damaged_configuration_of_a_tokenizer(folder: Path, wrong: Header) -> None:
    plan = TokenizerPlan(
        tokenizer_path=str(folder), mode="auto", trust_remote_code=False, revision=None, chat_template=None
    )
    change(folder, "tokenizer_config.json", **wrong)
    with pytest.raises(ConfigurationError, match="tokenizer_config.json is not a valid"):
        read_tokenizer(plan)


@pytest.mark.parametrize("mmap", [True, False])
def test_damaged_weights(folder: Path, mmap: bool) -> None:
    whole = (folder / "model.safetensors").read_bytes()

    def edited(edit: Callable[[Header], None]) -> str:
        (folder / "model.safetensors").write_bytes(whole)
        change_header(folder, edit)
        return refusal(folder, weight_loader_disable_mmap=not mmap)

    def with_dtype(dtype: Any) -> str:
        return edited(lambda header: header["model.norm.weight"].update(dtype=dtype))

    assert "overlaps" in edited(overlap) or "gap" in edited(overlap)
    assert "model.norm.weight (F64, 32) needs 256 bytes and has 128" in with_dtype("F64")
    assert "has the dtype X9" in with_dtype("X9")
    assert "has the dtype [1]" in with_dtype([1])
    assert "an invalid shape" in edited(lambda header: header["model.norm.weight"].update(shape=[-32]))
    assert "an invalid shape" in edited(lambda header: header["model.norm.weight"].update(shape=["32"]))
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refusal(folder, weight_loader_disable_mmap=not mmap)


def test_what_cannot_fit_is_refused_before_memory_is_taken(folder: Path) -> None:
    change(folder, max_position_embeddings=10**9)
    assert "set a smaller --context-length" in refusal(folder)
    change(folder, max_position_embeddings=256, hidden_size=65536, vocab_size=2**20, intermediate_size=2**20)
    assert "GiB of memory are free" in refusal(folder, load_format="dummy")


def test_little_address_space_is_a_sentence(folder: Path) -> None:
    pytest.importorskip("resource")
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)); from serve.__main__ import main; "
        "import sys; sys.exit(main(sys.argv[1:]))"
    )
    change(folder, hidden_size=8192, intermediate_size=65536, num_hidden_layers=8, head_dim=64)
    words = ["--model-path", str(folder), "--load-format", "dummy", "--port", "0"]
    ended = subprocess.run([sys.executable, "-c", limited, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode in (1, 2)
    assert "memory" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_ends_of_text_that_the_model_cannot_write(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9999]}))
    assert read_facts(str(folder)).eos_ids == {2}
    assert "9999" in caplog.text
    change(folder, eos_token_id=600)
    (folder / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="eos_token_id 600 is beyond the vocabulary of 600 tokens"):
        read_facts(str(folder))


def test_preferences_of_the_model_that_are_no_numbers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    generation = folder / "generation_config.json"
    for wrong in ({"temperature": "hot"}, {"top_p": True}, {"top_k": 2.5}, {"repetition_penalty": []}):
        generation.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=f"generation_config.json: {next(iter(wrong))} must be"):
            read_facts(str(folder))
    generation.write_text(json.dumps({"temperature": -3, "top_k": 0, "top_p": 0.5}))
    assert read_facts(str(folder)).preferred_sampling == {"top_k": 0, "top_p": 0.5}
    assert "temperature must be" in caplog.text


def test_a_context_of_one_token_has_no_room(folder: Path) -> None:
    assert "--context-length must be at least 2" in refusal(folder, context_length=1)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("LlamaForCausalLm", "LlamaForCausalLM"),
        ("Qwen3ForCausalML", "Qwen3ForCausalLM"),
        ("LlammaForCausalLM", "LlamaForCausalLM"),
        ("Gemma3ForCausalLM", None),
        ("Gemma9ForCausalLM", None),
        ("DeepseekV9ForCausalLM", None),
        ("Qwen2ExtraForCausalLM", None),
    ],
)
def test_another_architecture_is_no_misspelling(folder: Path, asked: str, meant: str | None) -> None:
    change(folder, architectures=[asked])
    if meant is None:
        try:
            read_facts(str(folder))
        except CheckpointError as error:
            assert "Did you mean" not in str(error)
        return
    with pytest.raises(CheckpointError, match=rf"Did you mean {meant}\?"):
        read_facts(str(folder))
