"""The engine's tokenizer, with method names of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest
from runtime.tokenizer.tokenizer import Tokenizer
from serve.python.arguments import as_json
from serve.python.results import Fields

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


class TokenizerView:
    """Converts text to token ids and back, with the engine's own tokenizer."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self._core = core
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        template = "with" if self.has_chat_template else "without"
        return f"<{type(self).__name__} of {self.vocab_size} tokens, {template} a chat template>"

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-text token, or None if the tokenizer has none."""
        name = self._tokenizer.special.get("eos_token")
        return None if name is None else self._tokenizer.backend.token_id(name)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning-of-text token, or None if the tokenizer has none."""
        return self._tokenizer.bos_id

    @property
    def eos_token(self) -> str | None:
        """The text of the end-of-text token, or None if the tokenizer has none."""
        return self._tokenizer.special.get("eos_token")

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens, in ascending order."""
        return sorted(self._tokenizer.special_ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, which `apply_chat_template` needs."""
        return self._tokenizer.template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises `InvalidRequest` if the text is not valid Unicode."""
        if not isinstance(text, str):
            raise InvalidRequest(f"encode takes a text, not {type(text).__name__}.", param="text")
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids: a list, an array or tensor with one dimension, or a single id."""
        ids = as_json(ids)
        return self._tokenizer.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token."""
        return self._tokenizer.token_text(token_id)

    def convert_ids_to_tokens(self, ids: Any) -> list[str | None]:
        """Return the raw vocabulary entry of each id, or None for an unknown id."""
        return [self._tokenizer.backend.token(each) for each in as_json(ids)]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a raw vocabulary entry, or None if the vocabulary has no such entry."""
        return self._tokenizer.backend.token_id(token)

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Fields:
        """Return a dict with `input_ids`: a list of token ids for one text, or a list of lists for several texts."""
        texts = [text] if isinstance(text, str) else list(text)
        ids = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return Fields({"input_ids": ids[0] if isinstance(text, str) else ids})

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """Return the prompt of a chat as token ids, or as a text if `tokenize` is False.

        `options` are further fields of /v1/chat/completions that affect the prompt, for example `tools`. Raises
        `InvalidRequest` if the model has no chat template.
        """
        from serve.python import chat  # slow to import: loads all chat parsers

        body = {**options, "add_generation_prompt": add_generation_prompt}
        text = chat.prompt_of(self._core, messages, body)
        return self.encode(text, add_special_tokens=False) if tokenize else text
