from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

import tiny_tokenizers
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import TokenizerPlan
from runtime.errors import ConfigurationError, InvalidRequest
from runtime.tokenizer.backend import SlowBackend
from runtime.tokenizer.tokenizer import Tokenizer

SENTENCE = "Hello wörld,  你好 👩‍🚀 ok \n\n x. do not </s><|im_end|> 12345"


def load(path: Path, *, vocab_size: int = 512, mode: str = "auto", trust: bool = False) -> Tokenizer:
    plan = TokenizerPlan(
        tokenizer_path=str(path), mode=mode, trust_remote_code=trust, revision=None, chat_template=None
    )
    facts = ModelFacts(
        architecture="LlamaForCausalLM",
        path=str(path),
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        hidden_size=8,
        vocab_size=vocab_size,
        context_length=128,
        dtype="float32",
    )
    return Tokenizer.load(plan, facts)


def write(path: Path, kind: tiny_tokenizers.Kind = "byte_bpe", **changes: object) -> Path:
    """Write a tokenizer with some configuration keys changed; None removes a key."""
    tiny_tokenizers.write(path, kind)
    (path / "config.json").write_text('{"model_type": "llama"}')
    config = json.loads((path / "tokenizer_config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(kept))
    return path


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_loads_to_the_same_tokenizer_as_transformers(tmp_path, kind):
    ours, theirs = load(write(tmp_path, kind)), AutoTokenizer.from_pretrained(tmp_path)
    for special in (True, False):
        [ids] = ours.encode_batch([SENTENCE], add_special_tokens=special)
        assert ids == theirs(SENTENCE, add_special_tokens=special)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == {theirs.eos_token_id}
    assert ours.special_ids == {*range(4 if kind == "wordpiece" else 3)}
    assert ours.vocab_size == len(theirs)


def test_tokens_named_only_in_the_configuration_are_added(tmp_path):
    listed = {"512": {"content": "<think>", "special": False}, "513": {"content": "<tool>", "special": True}}
    write(tmp_path, added_tokens_decoder=listed, extra_special_tokens=["<more>"])
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<think>b<tool>c<more>"
    [ids] = ours.encode_batch([text])
    assert ids == theirs(text)["input_ids"]
    assert ours.vocab_size == 515
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<think>bc"


def test_special_tokens_come_from_the_legacy_file_too(tmp_path):
    write(tmp_path, added_tokens_decoder=None, eos_token=None)
    assert load(tmp_path).eos_ids == {AutoTokenizer.from_pretrained(tmp_path).eos_token_id}


def test_turn_end_of_the_template_ends_the_text_beside_eos(tmp_path):
    assert load(write(tmp_path, eos_token="<|endoftext|>")).eos_ids == {0, 2}
    assert load(write(tmp_path, eos_token="<|endoftext|>", chat_template=None)).eos_ids == {0}


def test_each_text_has_its_own_flag(tmp_path):
    tokenizer = load(write(tmp_path, "metaspace"))
    both = tokenizer.encode_batch(["one", "two", ""], add_special_tokens=[True, False, False])
    assert both[0] == tokenizer.encode_batch(["one"], add_special_tokens=True)[0]
    assert both[1] == tokenizer.encode_batch(["two"], add_special_tokens=False)[0]
    assert both[0][0] == tokenizer.bos_id
    assert both[2] == []


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path):
    write(tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    short, long = tokenizer.encode_batch(["a", SENTENCE])
    assert len(short) == 1
    assert tokenizer.decode(long, skip_special_tokens=False) == SENTENCE


def test_half_a_surrogate_pair_is_the_senders_mistake(tmp_path):
    with pytest.raises(InvalidRequest, match="surrogate"):
        load(write(tmp_path)).encode_batch(["a\ud83dz"])


def test_token_text_keeps_its_space_and_shows_broken_bytes(tmp_path):
    tokenizer = load(write(tmp_path, "metaspace"))
    [the] = tokenizer.encode_batch(["the"], add_special_tokens=False)[0]
    assert (tokenizer.token_text(the), tokenizer.token_bytes(the)) == (" the", b" the")
    byte = tokenizer.encode_batch(["é"], add_special_tokens=False)[0][-1]
    assert (tokenizer.token_text(byte), tokenizer.token_bytes(byte)) == ("\ufffd", b"\xa9")
    assert (tokenizer.token_text(9999), tokenizer.token_bytes(9999)) == ("", None)


def test_ids_beyond_the_vocabulary_are_no_text(tmp_path):
    tokenizer = load(write(tmp_path))
    [ids] = tokenizer.encode_batch(["ok"])
    assert tokenizer.decode([5000, *ids, 70000]) == "ok"


def test_slow_mode_goes_through_transformers(tmp_path):
    write(tmp_path)
    slow, fast = load(tmp_path, mode="slow"), load(tmp_path)
    assert slow.encode_batch([SENTENCE]) == fast.encode_batch([SENTENCE])
    assert slow.eos_ids == fast.eos_ids
    assert slow.template is not None


def test_tokenizer_written_in_python_is_used_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    tokenizer = load(tmp_path)
    assert isinstance(tokenizer.backend, SlowBackend)
    [ids] = tokenizer.encode_batch(["héllo 你好"])
    assert ids[-1] in tokenizer.eos_ids
    assert tokenizer.decode([*ids, 99999]) == "héllo 你好"
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_batch(["\ud83d"])


def test_tokenizer_of_a_larger_model_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(ConfigurationError, match=r"512 tokens, the model only 256.*another model"):
        load(tmp_path, vocab_size=256)


def test_broken_or_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="not a directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        load(tmp_path)
    (write(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        load(tmp_path)
    (write(tmp_path) / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json must hold a JSON object"):
        load(tmp_path)


def test_code_of_its_own_runs_only_when_trusted(tmp_path, caplog):
    write(tmp_path, auto_map={"AutoTokenizer": ["code.Slow", None]})
    assert load(tmp_path).vocab_size == 512
    assert "reads its tokenizer.json instead" in caplog.text
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match="--trust-remote-code"):
        load(tmp_path)


def test_loading_a_tokenizer_imports_neither_torch_nor_transformers(tmp_path):
    write(tmp_path)
    code = f"""
import sys
from runtime.tokenizer.files import read_tokenizer
from runtime.tokenizer import tokenizer
from runtime.config.plan import TokenizerPlan
read_tokenizer(TokenizerPlan(tokenizer_path={str(tmp_path)!r}, mode="auto", trust_remote_code=False, revision=None,
              chat_template=None))
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
