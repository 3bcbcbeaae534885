"""Read a tokenizer from its files.

tokenizer.json is read with the library `tokenizers`. This gives the same tokenizer as AutoTokenizer, and saves the
1.5 s of importing transformers. AutoTokenizer reads other formats (sentencepiece, tiktoken, custom code) and, with
`--tokenizer-mode slow`, all formats. Custom code that only calls sentencepiece is not run; the sentencepiece model is
read directly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from runtime.config.gguf_header import is_gguf, read_header
from runtime.config.plan import TokenizerPlan
from runtime.config.template_files import read_json, read_templates
from runtime.errors import ConfigurationError
from runtime.loading.checkpoint import lfs_hint
from runtime.tokenizer.backend import Backend, FastBackend, SlowBackend
from runtime.tokenizer.pieces import PiecesBackend

logger = logging.getLogger("penstock.tokenizer")

# File patterns of vocabularies in all formats. If all these files are missing, transformers may return an empty
# tokenizer.
VOCABULARIES = (
    "tokenizer.json",
    "*.model*",
    "*.tiktoken",
    "vocab.*",
    "tekken.json",
    "*vocab*.json",
    "*.spm",
    "*.vocab",
)
# Tokenizers that need no vocabulary file, because their tokens are bytes or characters.
WITHOUT_FILES = (
    "ByT5Tokenizer",
    "CanineTokenizer",
    "PerceiverTokenizer",
)
PIECES = ("BaichuanTokenizer",)  # tokenizers whose custom code only calls sentencepiece
# Values of `tokenizer.ggml.pre` in GGUF files with byte-level tokens. The three groups differ in how texts are split
# before encoding: as transformers does for this name; as GPT-2 does (transformers' default); as GPT-2 does, but with
# each digit separate. Source: llama.cpp's llama-vocab.cpp.
SPLIT_BY_NAME = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "dbrx", "smaug-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2",
    "megrez", "qwen35", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2",
)  # fmt: skip
SPLIT_AS_GPT2 = (
    "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
    "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "mpt", "olmo", "jais", "trillion",
    "granite-docling",
)  # fmt: skip
DIGITS_APART = (
    "starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2",
)  # fmt: skip
# Chat template for `_read_pieces`. Each turn begins with a token whose id is in generation_config.json; the system
# prompt has no such token.
CHAT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}USER{% elif message['role'] == 'assistant' %}ASSISTANT{% endif %}"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}ASSISTANT{% endif %}"
)


class TokenizerFiles(NamedTuple):
    """The contents of a tokenizer's files."""

    backend: Backend
    special: Mapping[str, str]  # name -> special token, for example "eos_token" -> "</s>"
    templates: Mapping[str, str]  # jinja texts by name: "default" and, if the tokenizer has it, "tool_use"


def read_tokenizer(plan: TokenizerPlan) -> TokenizerFiles:
    """Read the tokenizer. Raises ConfigurationError, which names the missing or broken file."""
    if plan.tokenizer_path is None:
        raise ConfigurationError("There is no tokenizer to load: tokenizer_path is empty.")
    path = Path(plan.tokenizer_path)
    if is_gguf(path):
        return _read_gguf(path)
    if not path.is_dir():
        raise ConfigurationError(f"--tokenizer-path {path} is not a directory.")
    config = read_json(path / "tokenizer_config.json")
    custom_code = _names_custom_code(config)
    needs_files = not custom_code and config.get("tokenizer_class") not in WITHOUT_FILES
    if needs_files and not any(any(path.glob(pattern)) for pattern in VOCABULARIES):
        raise ConfigurationError(
            f"{path} has no tokenizer (no tokenizer.json, tokenizer.model or vocabulary file). Add its files, name "
            "another folder with --tokenizer-path, or serve token ids alone with --skip-tokenizer-init."
        )
    has_json = (path / "tokenizer.json").is_file()
    if custom_code and not plan.trust_remote_code:
        if not has_json and config.get("tokenizer_class") in PIECES and (path / "tokenizer.model").is_file():
            return _read_pieces(path, config)
        if not has_json:
            raise ConfigurationError(
                f"The tokenizer in {path} is custom Python code. Read it, then set --trust-remote-code."
            )
        logger.warning("%s names custom tokenizer code; Penstock reads its tokenizer.json instead.", path)
        custom_code = False
    if has_json and not custom_code and plan.mode != "slow":
        return _read_directly(path, config)
    return _read_with_transformers(path, plan)


def _read_directly(path: Path, config: dict[str, Any]) -> TokenizerFiles:
    try:
        library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # `tokenizers` raises no narrower type
        raise ConfigurationError(
            f"{path / 'tokenizer.json'} cannot be read: {error}.{lfs_hint(path / 'tokenizer.json')}"
        ) from error
    library.encode_special_tokens = bool(config.get("split_special_tokens", False))
    try:
        special = _special_tokens(path, config, library)
        return TokenizerFiles(FastBackend(library), special, read_templates(path, config))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path / 'tokenizer_config.json'} is not a valid tokenizer configuration ({error!r})."
        ) from error


def _special_tokens(path: Path, config: dict[str, Any], library: tokenizers.Tokenizer) -> dict[str, str]:
    """Return the special tokens by name, and add to `library` the tokens that only the configuration has."""
    named = dict(config)
    if "added_tokens_decoder" not in config:
        named |= read_json(path / "special_tokens_map.json")
    special = _named_tokens(named)
    _add_tokens(library, config.get("added_tokens_decoder") or {}, [*special.values(), *_extra_tokens(named)])
    return special


def _add_tokens(library: tokenizers.Tokenizer, listed: Mapping[str, Any], special: list[str]) -> None:
    """Add the tokens of the configuration that tokenizer.json lacks, in the order of their ids."""
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    for _, value in sorted(listed.items(), key=lambda item: int(item[0])):
        if value["content"] not in known:
            known.add(value["content"])
            library.add_tokens([tokenizers.AddedToken(**value)])
    for text in special:
        if text not in known:
            known.add(text)
            library.add_special_tokens([text])


def _read_with_transformers(path: Path, plan: TokenizerPlan) -> TokenizerFiles:
    from transformers import AutoTokenizer

    try:
        library = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=plan.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigurationError(f"transformers cannot load the tokenizer in {path}: {error}") from error
    return _of_library(library)


def _of_library(library: Any) -> TokenizerFiles:
    inner = getattr(library, "backend_tokenizer", None)
    backend = FastBackend(inner) if isinstance(inner, tokenizers.Tokenizer) else SlowBackend(library)
    found = getattr(library, "chat_template", None) or {}
    templates = {"default": found} if isinstance(found, str) else dict(found)
    return TokenizerFiles(backend, dict(library.special_tokens_map), templates)


def _read_pieces(path: Path, config: Mapping[str, Any]) -> TokenizerFiles:
    """Read the sentencepiece model `tokenizer.model` in a folder. Raises ConfigurationError if it cannot be used.

    If the folder has no chat template, the template is `CHAT`, which formats chats as the model's own code does.
    """
    named = _named_tokens({**read_json(path / "special_tokens_map.json"), **config})
    texts = {name: text for name, text in named.items() if text}
    generation = read_json(path / "generation_config.json")
    turns = [generation.get(name) for name in ("user_token_id", "assistant_token_id")]
    ids = [token_id for token_id in turns if isinstance(token_id, int)]
    begins, ends = config.get("add_bos_token", True), config.get("add_eos_token", False)
    backend = PiecesBackend(path / "tokenizer.model", texts, ids, begin=begins, end=ends)
    templates = read_templates(path, dict(config))
    if not templates and len(ids) == len(turns):
        user, assistant = (str(backend.token(token_id)) for token_id in ids)
        templates = {"default": CHAT.replace("USER", user).replace("ASSISTANT", assistant)}
    return TokenizerFiles(backend, texts, templates)


def _read_gguf(path: Path) -> TokenizerFiles:
    """Read the tokenizer of a GGUF file with transformers, and set the pre-tokenizer that the file names."""
    header = read_header(path)
    if not isinstance(header.values.get("tokenizer.ggml.model"), str):
        raise ConfigurationError(f"{path} holds no tokenizer; name one with --tokenizer-path.")
    from transformers import PreTrainedTokenizerFast

    try:
        library = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:  # transformers raises many types for unexpected vocabularies
        raise ConfigurationError(
            f"transformers cannot read the tokenizer in {path}: {error}. Name another with --tokenizer-path."
        ) from error
    _split(library.backend_tokenizer, header.values, path)
    return _of_library(library)


def _split(tokenizer: tokenizers.Tokenizer, values: Mapping[str, Any], path: Path) -> None:
    """Set the pre-tokenizer that a GGUF file names. Raises ConfigurationError if the name is unknown."""
    name = values.get("tokenizer.ggml.pre")
    if values["tokenizer.ggml.model"] != "gpt2" or name is None or name in (*SPLIT_BY_NAME, *SPLIT_AS_GPT2):
        return
    if name not in DIGITS_APART:
        raise ConfigurationError(
            f"{path} splits texts in a way that is not known ({name}): name the model's own tokenizer with "
            "--tokenizer-path."
        )
    parts = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = parts.Sequence(
        [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
    )  # pyright: ignore[reportAttributeAccessIssue]


def _names_custom_code(config: dict[str, Any]) -> bool:
    auto_map = config.get("auto_map")
    return isinstance(auto_map, list) or (isinstance(auto_map, dict) and "AutoTokenizer" in auto_map)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a configuration by name, for example {"eos_token": "</s>"}."""
    return {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = extra.values() if isinstance(extra, dict) else extra
    return [text for value in values if (text := _token_text(value)) is not None]


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
