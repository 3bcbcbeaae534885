"""Write a training checkpoint as a folder that transformers and Penstock can load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo_model import vocabulary
from demo_model.network import Shape
from demo_model.training import shape_of

CONTEXT = 2048


def config(shape: Shape, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the config.json of a Qwen3 model of this shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": CONTEXT,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "torch_dtype": "bfloat16",
    }


def write(checkpoint: Path, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights, configuration and tokenizer files into `folder`."""
    shape = shape_of(checkpoint)
    vocabulary.save(tokenizer, folder, CONTEXT)
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["network"]
    tensors = {f"model.{name}": weight.to(torch.bfloat16).contiguous() for name, weight in state.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes the file readable only for its owner
    ends = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    generation = {
        "eos_token_id": ends,
        "pad_token_id": ends[1],
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }
    for name, content in (("config", config(shape, tokenizer)), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
