"""A model's tokenizer: encodes text to token ids, and decodes token ids to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from runtime.config.model_facts import ModelFacts
from runtime.config.plan import TokenizerPlan
from runtime.errors import ConfigurationError, InvalidRequest
from runtime.tokenizer.backend import Backend, EncodedPair
from runtime.tokenizer.chat_template import ChatTemplate, load_template
from runtime.tokenizer.files import read_tokenizer
from runtime.tokenizer.incremental import IncrementalDecoder
from runtime.tokenizer.text_limit import text_limit_of
from runtime.tokenizer.token_bytes import TokenBytes, token_bytes_of

# Tokens with which chat models end a turn, even if their EOS token is another token.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
_CALL_END = "<|eom_id|>"  # Llama 3.1: the model waits for a tool's result


class Tokenizer:
    """A loaded tokenizer. Immutable except for caches; any thread may call its methods.

    `eos_ids` contains the tokenizer's EOS token and the end-of-turn tokens that its chat template writes. `bytes_of` is
    None if the bytes of a token depend on its neighbours.
    """

    def __init__(self, backend: Backend, special: Mapping[str, str], template: ChatTemplate | None = None) -> None:
        self.backend = backend
        self.special = special  # name -> special token, for example "eos_token" -> "</s>"
        self.bytes_of: TokenBytes | None = token_bytes_of(backend)
        self.text_limit = text_limit_of(backend)
        self.template = template
        self.vocab_size = backend.vocab_size
        self.special_ids = backend.special_ids
        self.bos_id = _named_id(backend, special, "bos_token")
        self.eos_ids = _eos_ids(backend, special, template)

    @classmethod
    def load(cls, plan: TokenizerPlan, facts: ModelFacts) -> Tokenizer:
        """Read the tokenizer that the plan names.

        Raises ConfigurationError if its files are missing or broken, or if it has more tokens than the model.
        """
        files = read_tokenizer(plan)
        if not files.backend.vocab_size:
            raise ConfigurationError(f"The tokenizer in {plan.tokenizer_path} has no tokens: its files are broken.")
        if files.backend.base_size > facts.vocab_size:
            raise ConfigurationError(
                f"The tokenizer in {plan.tokenizer_path} has {files.backend.base_size} tokens, the model "
                f"only {facts.vocab_size}: --tokenizer-path names the tokenizer of another model."
            )
        template = load_template(plan.chat_template, files.templates, files.special)
        return cls(files.backend, files.special, template)

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool | Sequence[bool] = True,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Return the ids of each text. Fast tokenizers release the GIL.

        `add_special_tokens` is one flag for all texts, or a list with one flag per text. Raises InvalidRequest if a
        text is not valid Unicode, and ContextOverflow if a text has more than `max_tokens` tokens.
        """
        flags = [add_special_tokens] * len(texts) if isinstance(add_special_tokens, bool) else add_special_tokens
        if len(flags) != len(texts):
            raise ValueError(f"{len(texts)} texts but {len(flags)} flags")
        encoded: list[list[int]] = [[] for _ in texts]
        for flag in {*flags}:
            chosen = [index for index, each in enumerate(flags) if each == flag]
            try:
                batch = self.backend.encode_batch([texts[index] for index in chosen], flag, max_tokens)
            except TypeError as error:
                raise InvalidRequest("The text has a lone surrogate (half of a UTF-16 pair).", param="text") from error
            for index, ids in zip(chosen, batch, strict=True):
                encoded[index] = ids
        return encoded

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return the ids of a pair of texts and the index at which the second text begins.

        Raises InvalidRequest if a text is not valid Unicode.
        """
        try:
            return self.backend.encode_pair(first, second)
        except TypeError as error:
            raise InvalidRequest("The text has a lone surrogate (half of a UTF-16 pair).", param="text") from error

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of the ids. It equals the joined text of a stream of the same ids.

        Ids beyond the vocabulary are ignored. Each invalid UTF-8 sequence becomes one replacement character.
        """
        if self.bytes_of is None:
            return self.backend.decode(ids, skip_special_tokens)
        decoder = self.decoder((), skip_special_tokens, spaces_between_special_tokens)
        return decoder.push(ids) + decoder.flush()

    def decoder(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown_special_ids: frozenset[int] = frozenset(),
    ) -> IncrementalDecoder:
        """Return an incremental decoder for the output of a sequence with this prompt."""
        return IncrementalDecoder(
            self.backend,
            self.bytes_of,
            prompt_ids,
            skip_special_tokens,
            spaces_between_special_tokens,
            shown_special_ids,
        )

    def ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of the texts that are added tokens. Other texts are omitted."""
        return {text: self.backend.added[text] for text in texts if text in self.backend.added}

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that the token adds after other text, including a leading space; None for an unknown id."""
        if self.backend.token(token_id) is None:
            return None
        if self.bytes_of is None:
            return self.backend.decode([token_id], False).encode()
        return self.bytes_of.rest[token_id]

    def token_text(self, token_id: int) -> str:
        """Return the token as text, with replacement characters for invalid UTF-8; '' for an unknown id."""
        return (self.token_bytes(token_id) or b"").decode(errors="replace")


def _named_id(backend: Backend, special: Mapping[str, str], name: str) -> int | None:
    token = special.get(name)
    return None if token is None else backend.token_id(token)


def _eos_ids(backend: Backend, special: Mapping[str, str], template: ChatTemplate | None) -> frozenset[int]:
    ids = {_named_id(backend, special, "eos_token"), backend.added.get(_CALL_END)}
    for token in _TURN_ENDS:
        token_id = backend.added.get(token)
        if token_id in backend.special_ids and template is not None and template.mentions(token):
            ids.add(token_id)
    return frozenset(token_id for token_id in ids if token_id is not None)
