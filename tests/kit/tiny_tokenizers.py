"""Tiny tokenizers, trained in milliseconds, written as a real checkpoint would hold them.

    tiny = tiny_tokenizers.write(directory, kind="byte_bpe", vocab_size=512)
    config["vocab_size"] = tiny.vocab_size

Kinds
    byte_bpe     byte-level BPE, every byte in the vocabulary (as GPT-2, Llama 3 and Qwen); ends turns with
                 <|im_end|>, which is also the end of text
    metaspace    BPE with byte fallback, word borders as "▁", <s> before every text (as Llama 2 and Mistral)
    wordpiece    WordPiece with "##" continuations, [CLS] and [SEP] around every text (as BERT)

All of them load with `transformers.AutoTokenizer` whatever the model type of the directory's config.json is.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Kind = Literal["byte_bpe", "metaspace", "wordpiece"]
KINDS: tuple[Kind, ...] = ("byte_bpe", "metaspace", "wordpiece")

TEXT = """
Once upon a time a small engine lived beside a quiet river. Every morning the engine woke, listened to the
water, and waited for the first question of the day. "What is the weather like in Paris?" asked the miller.
"It is sunny, and the wind comes from the north," the engine answered. The miller thanked it and went away.
Then came the teacher: "How many pages are in the book, and how many tokens are on a page?" The engine counted
slowly, one, two, three, and said that there were 128 pages of 16 tokens, 2048 in all. Nobody had asked it.
In the evening the children told stories about dragons, ships and stars; the engine wrote them down, word for
word, and kept the beginnings, because many stories begin in the same way. When somebody left in the middle of
a sentence, the engine put the pages back where they belonged. It never forgot a page and never lost a word.
You are a helpful assistant. Call a function with {"name": "get_weather", "arguments": {"city": "Berlin"}}.
def add(left: int, right: int) -> int: return left + right  # a function that adds two whole numbers
for index in range(10): print(index, "squared is", index * index)
Ein kleiner Ofen wärmt die große Küche; à bientôt, señor, où est la gare? Привет, мир! Как дела сегодня?
你好，世界。今天天气很好。 こんにちは、世界。ありがとう。 안녕하세요 세계.
مرحبا بالعالم. नमस्ते दुनिया। 🙂 🚀 👩‍🚀 ❤️
"""

_WORDS = (  # Qwen's pattern, so that transformers' class for that family builds the same tokenizer
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- 'BEGINsystem\\n' -}}
{%- if messages[0].role == 'system' -%}{{- text_of(messages[0].content) + '\\n\\n' -}}{%- endif -%}
{{- 'You may call these functions:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- 'END\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- 'BEGINsystem\\n' + text_of(messages[0].content) + 'END\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{- raise_exception('The system message must be the first.') -}}{%- endif -%}
{%- elif message.role in ('user', 'tool') -%}
{{- 'BEGIN' + message.role + '\\n' + text_of(message.content) + 'END\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- 'BEGINassistant\\n' -}}
{%- generation -%}
{{- text_of(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- 'END\\n' -}}
{%- endgeneration -%}
{%- else -%}
{{- raise_exception('Unknown role ' + message.role + '.') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'BEGINassistant\\n' -}}{%- endif -%}
"""


class TinyTokenizer(NamedTuple):
    """The written tokenizer. A model for it needs at least `vocab_size` rows of embeddings."""

    path: Path
    vocab_size: int
    bos_id: int | None
    eos_id: int


def write(directory: Path | str, kind: Kind = "byte_bpe", vocab_size: int = 512) -> TinyTokenizer:
    """Train a tokenizer with exactly `vocab_size` tokens, and add its files to `directory`.

    Deterministic. Raises ValueError if the built-in text does not yield this number of tokens.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    backend, special = build(kind, vocab_size)
    backend.save(str(path / "tokenizer.json"))
    (path / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    config = {
        **special,
        "added_tokens_decoder": {
            str(token_id): {"content": token.content, "special": token.special}
            for token_id, token in backend.get_added_tokens_decoder().items()
        },
        "chat_template": chat_template(kind),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))
    bos = special.get("bos_token")
    (eos_id,) = backend.encode(special["eos_token"], add_special_tokens=False).ids
    return TinyTokenizer(path, vocab_size, backend.token_to_id(bos) if bos else None, eos_id)


def build(kind: Kind, vocab_size: int = 512) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer and its special tokens by name, without writing files."""
    backend, special = {"byte_bpe": _byte_bpe, "metaspace": _metaspace, "wordpiece": _wordpiece}[kind](vocab_size)
    if backend.get_vocab_size() != vocab_size:
        raise ValueError(f"The text yields {backend.get_vocab_size()} {kind} tokens, not {vocab_size}.")
    return backend, special


def chat_template(kind: Kind) -> str:
    """Return a template for system, user, assistant and tool messages, with tools and lists of parts."""
    begin, end = {
        "byte_bpe": ("<|im_start|>", "<|im_end|>"),
        "metaspace": ("<s>", "</s>"),
        "wordpiece": ("[CLS]", "[SEP]"),
    }[kind]
    return _CHAT_TEMPLATE.replace("BEGIN", begin).replace("END", end)


def _byte_bpe(vocab_size: int) -> tuple[Tokenizer, dict[str, str]]:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(TEXT.splitlines(), trainer)
    return backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def _metaspace(vocab_size: int) -> tuple[Tokenizer, dict[str, str]]:
    specials = ["<unk>", "<s>", "</s>"]
    leading = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = sorted({character for character in TEXT if character.isascii() and character.isprintable()} | {"▁"})
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(leading),
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),  # all other characters fall back to bytes
    )
    learner.train_from_iterator(TEXT.splitlines(), trainer)
    state: dict[str, Any] = json.loads(learner.to_str())["model"]
    learned = sorted(state["vocab"], key=state["vocab"].__getitem__)
    backend = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(leading + learned)},
            merges=[(left, right) for left, right in state["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(specials)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _wordpiece(vocab_size: int) -> tuple[Tokenizer, dict[str, str]]:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    normalizer = normalizers.BertNormalizer(lowercase=False)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words = [word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(TEXT))]
    letters = sorted(set("".join(words)))
    pieces = [*specials, *letters, *(f"##{letter}" for letter in letters)]
    endings = Counter(f"##{word[-length:]}" for word in words for length in (2, 3) if len(word) > length)
    pieces += [piece for piece, _ in (endings + Counter(word for word in words if len(word) > 1)).most_common()]
    vocab = {piece: piece_id for piece_id, piece in enumerate(pieces[:vocab_size])}
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(specials)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend, {
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
    }
