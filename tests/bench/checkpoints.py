"""`checkpoint`: write a random model of a known shape, for measurements without a download.

The weights are random, so outputs have no meaning, but every layer costs the same as in the real model. All tokens of
the vocabulary are ordinary tokens, so detokenization costs the same too.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import PROGRAM
from serve.bench import report
from serve.bench.options import new_parser

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

WEIGHT_STD = 0.02  # the usual standard deviation, with which activations stay finite at any depth used here
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a decoder like Llama, or like Qwen3 with `qk_norm`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    qk_norm: bool = False
    context: int = 8192
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    eps: float = 1e-5


SHAPES: Mapping[str, Shape] = {
    "T": Shape(hidden=288, layers=6, heads=6, kv_heads=6, head_dim=48, mlp=768, vocab=32_000, tied=False),
    "S": Shape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49_152, tied=True),
    "Q": Shape(
        hidden=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        mlp=3072,
        vocab=151_936,
        tied=True,
        qk_norm=True,
        context=40_960,
        rope_theta=1_000_000.0,
        eps=1e-6,
    ),
    "L": Shape(
        hidden=2560,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=9728,
        vocab=151_936,
        tied=True,
        qk_norm=True,
        context=40_960,
        rope_theta=1_000_000.0,
        eps=1e-6,
    ),
    "Q8": Shape(
        hidden=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=12_288,
        vocab=151_936,
        tied=False,
        qk_norm=True,
        context=40_960,
        rope_theta=1_000_000.0,
        eps=1e-6,
    ),
    "L8": Shape(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=14_336,
        vocab=128_256,
        tied=False,
        context=131_072,
        rope_theta=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}
ABOUT = {
    "T": "tiny Llama, 6 layers",
    "S": "SmolLM2-135M",
    "Q": "Qwen3-0.6B",
    "L": "Qwen3-4B",
    "Q8": "Qwen3-8B",
    "L8": "Llama-3.1-8B",
}


def parser() -> argparse.ArgumentParser:
    options = new_parser("checkpoint", "Write a random checkpoint of a known shape.", program=PROGRAM)
    shapes = ", ".join(f"{name} ({about})" for name, about in ABOUT.items())
    options.add_argument("--shape", choices=tuple(SHAPES), required=True, help=shapes)
    options.add_argument("--output", required=True, metavar="DIR")
    options.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--no-weights", action="store_true", help="for --load-format dummy: nothing large")
    return options


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    directory, size = Path(options.output), 0
    if options.no_weights:
        write_description(SHAPES[options.shape], directory, options.dtype, options.seed)
    else:
        size = write_checkpoint(SHAPES[options.shape], directory, options.dtype, options.seed)
    report.say(f"{options.output}: {size / 2**20:,.0f} MiB of weights")
    return 0


def write_checkpoint(shape: Shape, directory: Path, dtype: str = "bfloat16", seed: int = 0) -> int:
    """Write config, weights and tokenizer of a random model. Return the bytes of the weights."""
    import torch
    from safetensors.torch import save_file

    write_description(shape, directory, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _draw(size, name, getattr(torch, dtype), generator) for name, size in parameter_sizes(shape)}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def write_description(shape: Shape, directory: Path, dtype: str = "bfloat16", seed: int = 0) -> None:
    """Write config and tokenizer, without weights. Does not import torch."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", model_config(shape, dtype))
    write_json(directory / "generation_config.json", {"eos_token_id": [0, 2], "bos_token_id": 0})
    write_tokenizer(shape.vocab, directory, seed)


def parameter_sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return every parameter's size, under the names of published checkpoints."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (shape.hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (q, shape.hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, shape.hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, shape.hidden)
        yield f"{layer}.self_attn.o_proj.weight", (shape.hidden, q)
        if shape.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{layer}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (shape.mlp, shape.hidden)
        yield f"{layer}.mlp.up_proj.weight", (shape.mlp, shape.hidden)
        yield f"{layer}.mlp.down_proj.weight", (shape.hidden, shape.mlp)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def _draw(size: tuple[int, ...], name: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    import torch

    if "norm" in name:
        return torch.ones(size, dtype=dtype)
    return torch.empty(size, dtype=torch.float32).normal_(0, WEIGHT_STD, generator=generator).to(dtype)


def model_config(shape: Shape, dtype: str) -> dict[str, Any]:
    """Return config.json as transformers reads it."""
    return {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        **({"rope_scaling": dict(shape.rope_scaling)} if shape.rope_scaling else {}),
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def write_tokenizer(vocab: int, directory: Path, seed: int = 0) -> None:
    """Train and write a byte-level tokenizer with exactly `vocab` tokens, and a chat template."""
    tokenizer = train_tokenizer(vocab, seed)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def train_tokenizer(vocab: int, seed: int = 0) -> Tokenizer:
    """Train byte-pair encoding on invented words, whose number exceeds the needed merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # pyright: ignore[reportCallIssue]
    tokenizer.train_from_iterator(made_up_text(2 * vocab, seed), trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise RuntimeError(f"The tokenizer has {tokenizer.get_vocab_size()} tokens, not {vocab}.")
    return tokenizer


def made_up_text(num_words: int, seed: int) -> Iterator[str]:
    """Return `num_words` lower-case words of two to four syllables, in lines."""
    source = random.Random(seed)
    consonants, vowels = "bcdfghjklmnpqrstvwxz", "aeiouy"
    for _ in range(0, num_words, 100):
        words = []
        for _ in range(100):
            syllables = source.choices((2, 3, 4), (1, 3, 3))[0]
            words.append("".join(source.choice(consonants) + source.choice(vowels) for _ in range(syllables)))
        yield " ".join(words)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
