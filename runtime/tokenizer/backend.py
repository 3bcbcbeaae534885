"""The library objects that turn text into ids and back, and how a tokenizer's files become one.

A checkpoint with a tokenizer.json is read without transformers, to the same result as AutoTokenizer's general
class; importing and asking transformers costs 1.5 s more. Other formats (sentencepiece, tiktoken, code of
their own) and `--tokenizer-mode slow` go through AutoTokenizer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tokenizers

from runtime.config.gguf_header import is_gguf, read_header
from runtime.config.plan import TokenizerPlan
from runtime.config.template_files import read_json, read_templates
from runtime.errors import ConfigurationError, ContextOverflow
from runtime.models.checkpoint import lfs_hint

logger = logging.getLogger("penstock.tokenizer")


# What holds the tokens, in any of the formats; without one of these transformers may make a tokenizer of none.
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
WITHOUT_FILES = (
    "ByT5Tokenizer",
    "CanineTokenizer",
    "PerceiverTokenizer",
)  # whose tokens are bytes or characters


class EncodedPair(NamedTuple):
    """Two texts with the special tokens between and around them."""

    ids: list[int]
    types: list[int]  # 1 where a token is marked as one of the second text; not all tokenizers do that
    second: int  # where the second text begins, marked or not


class Backend(Protocol):
    """What a tokenizer needs of the library below it. Methods are safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    @property
    def base_size(self) -> int:
        """The same without the added tokens."""
        ...

    @property
    def added(self) -> Mapping[str, int]:
        """Ids of the added tokens."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are left out of a text on request."""
        ...

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Raises TypeError when a text holds half a surrogate pair, ContextOverflow when one has more tokens."""
        ...

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Raises TypeError when a text holds half a surrogate pair."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Ids beyond the vocabulary count as nothing."""
        ...

    def token(self, token_id: int) -> str | None: ...

    def token_id(self, token: str) -> int | None: ...


class FastBackend:
    """A `tokenizers.Tokenizer`. Encoding releases the GIL."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        library.no_truncation()
        library.no_padding()
        tokens = library.get_added_tokens_decoder()
        self.library = library
        self.base_size: int = library.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max(self.base_size, 1 + max(tokens, default=-1))
        self.added = {token.content: token_id for token_id, token in tokens.items()}
        self.special_ids = frozenset(token_id for token_id, token in tokens.items() if token.special)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        # The single-text calls of the library keep the GIL; the batch calls release it.
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        _require_no_more(encodings, max_tokens)  # first: making lists of millions of ids keeps the GIL
        return [encoding.ids for encoding in encodings]

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        [encoding] = self.library.encode_batch_fast([(first, second)])
        return EncodedPair(encoding.ids, encoding.type_ids, _begin_of_second(encoding.sequence_ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self.library.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self.library.token_to_id(token)


class SlowBackend:
    """A tokenizer of transformers that has no `tokenizers.Tokenizer` inside. Encoding keeps the GIL."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.added = dict(library.get_added_vocab())
        self.base_size = int(library.vocab_size)
        self.vocab_size = max(self.base_size, len(library), 1 + max(self.added.values(), default=-1))
        self.special_ids = frozenset(library.all_special_ids)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        for text in texts:
            if not text.isascii():
                _refuse_half_pairs(text)
        found = [list(self.library.encode(text, add_special_tokens=add_special_tokens)) for text in texts]
        _require_no_more(found, max_tokens)
        return found

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        _refuse_half_pairs(first + second)
        found = self.library(first, second, return_token_type_ids=True)
        alone = self.library.encode(second, add_special_tokens=False)
        ids, types = list(found["input_ids"]), list(found["token_type_ids"])
        return EncodedPair(ids, types, types.index(1) if 1 in types else max(len(ids) - len(alone) - 1, 0))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self.library.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token(self, token_id: int) -> str | None:
        return self.library.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        token_id = self.library.convert_tokens_to_ids(token)
        return token_id if self.token(token_id) == token else None


def _begin_of_second(sequence_ids: Sequence[int | None]) -> int:
    return sequence_ids.index(1) if 1 in sequence_ids else len(sequence_ids)


def _require_no_more(encodings: Sequence[Sized], max_tokens: int | None) -> None:
    longest = max(map(len, encodings), default=0)
    if max_tokens is not None and longest > max_tokens:
        raise ContextOverflow.of_input(longest, max_tokens, "text")


def _refuse_half_pairs(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TypeError("half a surrogate pair") from error


class TokenizerFiles(NamedTuple):
    """What a tokenizer's files hold."""

    backend: Backend
    special: Mapping[str, str]  # "eos_token" -> "</s>"
    templates: Mapping[str, str]  # "default", and perhaps "tool_use"


def read_tokenizer(plan: TokenizerPlan) -> TokenizerFiles:
    """Raises ConfigurationError saying which file is missing or broken."""
    if plan.tokenizer_path is None:
        raise ConfigurationError("There is no tokenizer to load: tokenizer_path is empty.")
    path = Path(plan.tokenizer_path)
    if is_gguf(path):
        return _read_gguf(path)
    if not path.is_dir():
        raise ConfigurationError(f"--tokenizer-path {path} is not a directory.")
    config = read_json(path / "tokenizer_config.json")
    own_code = _names_own_code(config)
    needs_files = not own_code and config.get("tokenizer_class") not in WITHOUT_FILES
    if needs_files and not any(any(path.glob(pattern)) for pattern in VOCABULARIES):
        raise ConfigurationError(
            f"{path} has no tokenizer (no tokenizer.json, tokenizer.model or vocabulary file). Add its files, name "
            "another folder with --tokenizer-path, or serve token ids alone with --skip-tokenizer-init."
        )
    has_json = (path / "tokenizer.json").is_file()
    if own_code and not plan.trust_remote_code:
        if not has_json:
            raise ConfigurationError(
                f"The tokenizer in {path} is Python code of its own: read it, then pass --trust-remote-code."
            )
        logger.warning("%s names tokenizer code of its own; its tokenizer.json is used instead.", path)
        own_code = False
    if has_json and not own_code and plan.mode != "slow":
        return _read_directly(path, config)
    return _read_with_transformers(path, plan)


def _read_directly(path: Path, config: dict[str, Any]) -> TokenizerFiles:
    try:
        library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigurationError(
            f"{path / 'tokenizer.json'} cannot be read: {error}.{lfs_hint(path / 'tokenizer.json')}"
        ) from error
    library.encode_special_tokens = bool(config.get("split_special_tokens", False))
    try:
        special = _special_tokens(path, config, library)
        return TokenizerFiles(FastBackend(library), special, read_templates(path, config))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path / 'tokenizer_config.json'} is not as a tokenizer's configuration is ({error!r})."
        ) from error


def _special_tokens(path: Path, config: dict[str, Any], library: tokenizers.Tokenizer) -> dict[str, str]:
    """The special tokens by name; whatever the configuration names is in the library afterwards."""
    named = dict(config)
    if "added_tokens_decoder" not in config:
        named |= read_json(path / "special_tokens_map.json")
    special = {
        key: text
        for key, value in named.items()
        if key.endswith("_token") and (text := _token_text(value)) is not None
    }
    _add_tokens(library, config.get("added_tokens_decoder") or {}, [*special.values(), *_extra_tokens(named)])
    return special


def _add_tokens(library: tokenizers.Tokenizer, listed: Mapping[str, Any], special: list[str]) -> None:
    """Add what the configuration names and tokenizer.json lacks, in the order of the configuration's ids."""
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


def _read_gguf(path: Path) -> TokenizerFiles:
    """The tokenizer within a GGUF file, as transformers converts it."""
    header = read_header(path)
    if not isinstance(header.values.get("tokenizer.ggml.model"), str):
        raise ConfigurationError(f"{path} holds no tokenizer; name one with --tokenizer-path.")
    from transformers import PreTrainedTokenizerFast

    try:
        library = PreTrainedTokenizerFast.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
    except Exception as error:  # of many kinds, for vocabularies that it does not expect
        raise ConfigurationError(
            f"transformers cannot read the tokenizer in {path}: {error}. Name another with --tokenizer-path."
        ) from error
    return _of_library(library)


def _names_own_code(config: dict[str, Any]) -> bool:
    auto_map = config.get("auto_map")
    return isinstance(auto_map, list) or (isinstance(auto_map, dict) and "AutoTokenizer" in auto_map)


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = extra.values() if isinstance(extra, dict) else extra
    return [text for value in values if (text := _token_text(value)) is not None]


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
