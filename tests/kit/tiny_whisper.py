"""Tiny random checkpoints of Whisper, with windows of two seconds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

import tiny_checkpoints
import tiny_tokenizers

SPECIAL = (
    "<|endoftranscript|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
NUM_TIMES = 101  # 0.00 to 2.00 s
VOCABULARY = 400


@cache
def cached(*, multilingual: bool = True) -> str:
    """Write a checkpoint once per process, and return its path."""
    path = Path(_scratch().name) / f"whisper-{multilingual}"
    tiny_tokenizers.write(path, "byte_bpe", VOCABULARY)
    backend, _ = tiny_tokenizers.build("byte_bpe", VOCABULARY)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(f"<|{index * 0.02:.2f}|>", normalized=False) for index in range(NUM_TIMES)])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "WhisperTokenizer", "eos_token": SPECIAL[0], "bos_token": SPECIAL[0],
                    "unk_token": SPECIAL[0], "pad_token": SPECIAL[0]})
    )  # fmt: skip
    ids: dict[str, int] = {token: backend.token_to_id(token) for token in SPECIAL}  # pyright: ignore
    common: dict[str, Any] = {
        "decoder_start_token_id": ids["<|startoftranscript|>"], "eos_token_id": ids["<|endoftranscript|>"],
        "pad_token_id": ids["<|endoftranscript|>"], "bos_token_id": ids["<|endoftranscript|>"],
    }  # fmt: skip
    config = WhisperConfig(
        vocab_size=backend.get_vocab_size(), num_mel_bins=16, encoder_layers=2, decoder_layers=2, d_model=32,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=100, max_target_positions=48, begin_suppress_tokens=None, suppress_tokens=None, **common,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    tiny_checkpoints.redraw(model, 3)
    model.save_pretrained(path)
    times = {"max_initial_timestamp_index": 50, "no_timestamps_token_id": ids["<|notimestamps|>"]}
    languages = {"is_multilingual": True, "lang_to_id": {name: ids[name] for name in ("<|en|>", "<|de|>", "<|fr|>")},
                 "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]}}  # fmt: skip
    more = languages if multilingual else {"is_multilingual": False}
    GenerationConfig(
        max_length=40, prev_sot_token_id=ids["<|startofprev|>"], return_timestamps=False, **times, **more, **common
    ).save_pretrained(path)
    WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(path)
    return str(path)


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tiny-whisper-")
