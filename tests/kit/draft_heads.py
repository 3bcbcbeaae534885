"""Tiny random draft heads beside tiny models, and what they propose, computed with transformers' layers.

The reference follows the published definitions: entry q reads the model's state at q and the token at q + 1, and all
entries are computed at once without a cache.
"""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

import tiny_checkpoints
import tiny_tokenizers

NEXTN = {
    "NEXTN deepseek_v3": "deepseek_v3",
    "NEXTN glm4_moe": "glm4_moe",
    "NEXTN qwen3_next": "qwen3_next",
    "NEXTN mimo": "qwen2",
}
KINDS = ("EAGLE llama", "EAGLE qwen2", "EAGLE3 llama", "EAGLE3 small vocabulary", *NEXTN)
EPS = 1e-3


class TinyHead:
    """A tiny target with a random draft head of one kind, and the reference."""

    def __init__(self, folder: Path, kind: str, *, seed: int = 5, **shape: Any) -> None:
        self.kind, self.algorithm = kind, kind.split()[0]
        self.generator = torch.Generator().manual_seed(seed)
        self.target, self.full, self.head = folder / "target", folder / "full", folder / "head"
        family = NEXTN.get(kind, "qwen2" if "qwen2" in kind else "llama")
        for each in (self.target, self.full, self.head):
            each.mkdir()
        self.vocab_size = tiny_tokenizers.write(self.full).vocab_size
        layers: dict[str, Any] = {"num_hidden_layers": 4, **shape} if kind in NEXTN else shape
        if family == "qwen3_next":
            layers["layer_types"] = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
        tiny_checkpoints.write(
            self.full, family, vocab_size=self.vocab_size, max_position_embeddings=2048, seed=seed, **layers
        )
        shutil.copytree(self.full, self.target, dirs_exist_ok=True)
        self.config = json.loads((self.full / "config.json").read_text())
        self.size = self.config["hidden_size"]
        self.parts: dict[str, Tensor] = {}
        if kind in NEXTN:
            self._write_nextn(family)
        else:
            self._write_head(family)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the engine."""
        options: dict[str, Any] = {"model_path": str(self.target), "speculative_algorithm": self.algorithm}
        options["speculative_adaptive"] = {"enabled": False}  # drafts do not depend on measured times
        if self.algorithm != "NEXTN":
            options["speculative_draft_model_path"] = str(self.head)
        return options

    def _draw(self, name: str, *shape: int) -> Tensor:
        noise = torch.randn(*shape, generator=self.generator)
        self.parts[name] = 0.2 * noise if len(shape) > 1 or name.endswith("bias") else 1 + 0.3 * noise
        return self.parts[name]

    def _write_head(self, family: str) -> None:
        """Write a head in the layout of the published checkpoints of EAGLE or EAGLE-3."""
        size, inner, config = self.size, self.config["intermediate_size"], self.config
        wide = 2 * size if self.algorithm == "EAGLE3" else size
        layer = "midlayer." if self.algorithm == "EAGLE3" else "layers.0."
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or size // heads
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            self._draw(f"{layer}self_attn.{name}_proj.weight", rows * dim, wide)
            if family == "qwen2":
                self._draw(f"{layer}self_attn.{name}_proj.bias", rows * dim)
        self._draw(f"{layer}self_attn.o_proj.weight", size, heads * dim)
        for name in ("gate", "up"):
            self._draw(f"{layer}mlp.{name}_proj.weight", inner, size)
        self._draw(f"{layer}mlp.down_proj.weight", size, inner)
        self._draw(f"{layer}post_attention_layernorm.weight", size)
        own: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": self.vocab_size, "layer_types": None}
        if self.algorithm == "EAGLE":
            self._draw("fc.weight", size, 2 * size)
            self._draw("fc.bias", size)
            extra = {"embed_tokens.weight": torch.zeros(self.vocab_size, size)}  # a copy that is not read
        else:
            self._draw("fc.weight", size, 3 * size)
            for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
                self._draw(f"{name}.weight", size)
            count = self.vocab_size // 3 if "small" in self.kind else self.vocab_size
            own |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": count}
            self._draw("lm_head.weight", count, size)
            ids = torch.randperm(self.vocab_size, generator=self.generator)[:count].sort().values
            self.parts["d2t"] = ids - torch.arange(count)
            mask = torch.zeros(self.vocab_size, dtype=torch.bool)
            extra = {"t2d": mask.index_fill_(0, ids, True)}
        save_file({**self.parts, **extra}, self.head / "model.safetensors")
        (self.head / "config.json").write_text(json.dumps({**config, **own}))

    def _write_nextn(self, family: str) -> None:
        """Make the last of four layers the multi-token prediction layer of a model of three."""
        size = self.size
        if family == "qwen3_next":
            names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
        elif family == "qwen2":
            parts = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
            names = tuple(f"model.mtp_layers.0.{name}" for name in parts)
        else:
            names = tuple(f"model.layers.3.{name}" for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj"))
        for name in names[:3]:
            weight = self._draw(f"{name}.weight", size)
            if family == "qwen3_next":
                weight -= 1
        self._draw(f"{names[3]}.weight", size, 2 * size)
        self.names = names
        tensors = load_file(self.full / "model.safetensors")
        if family == "qwen3_next":
            tensors = {name.replace("model.layers.3.", "mtp.layers.0."): each for name, each in tensors.items()}
        elif family == "qwen2":
            tensors = {name.replace("model.layers.3.", "model.mtp_layers.0."): each for name, each in tensors.items()}
        else:
            for name in ("embed_tokens", "shared_head.head"):  # copies that are not read
                tensors[f"model.layers.3.{name}.weight"] = torch.zeros(self.vocab_size, size)
        save_file({**tensors, **self.parts}, self.target / "model.safetensors")
        values = {**self.config, "num_hidden_layers": 3, "num_nextn_predict_layers": 1}
        if family == "qwen2":
            values |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        for name in ("layer_types", "mlp_layer_types"):
            if values.get(name):
                values[name] = values[name][:3]
        (self.target / "config.json").write_text(json.dumps(values))

    # --- the reference ---

    @cached_property
    def model(self) -> Any:
        kept = {"dtype": torch.float32, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(self.full, **kept).eval()

    @torch.no_grad()
    def states(self, ids: list[int]) -> Tensor:
        """Return what the head reads of each token: [T, 3E] or [T, E]."""
        layers, seen = self.model.model.layers, {}
        count = 3
        rest = layers[count:]
        self.model.model.layers = layers[:count]
        self.model.config.num_hidden_layers = count
        hooks = [
            each.register_forward_pre_hook(
                lambda _module, args, kwargs, index=index: seen.update(
                    {index: args[0] if args else kwargs["hidden_states"]}
                ),
                with_kwargs=True,
            )
            for index, each in enumerate(self.model.model.layers)
        ]
        hidden = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        self.model.model.layers = nn.ModuleList([*layers[:count], *rest])
        if self.algorithm != "EAGLE3":
            return hidden[0]
        return torch.cat([seen[index][0] for index in (2, count // 2, count - 3)], -1)

    @torch.no_grad()
    def logits_of_drafts(self, ids: list[int], drafts: list[int]) -> Tensor:
        """Return the logits [n, V] from which each of the drafts is chosen after the known ids.

        Tokens that the head cannot propose have -inf.
        """
        states = self._projected(self.states(ids)[: len(ids) - 1])
        tokens, chain = ids[1:], states
        rows = []
        for number in range(len(drafts)):
            hidden, own = self._entries(torch.tensor(tokens), chain)
            rows.append(self._logits(hidden[-1]))
            tokens = [*tokens, drafts[number]]
            chain = torch.cat([chain, own[-1:]])
        return torch.stack(rows)

    def _projected(self, states: Tensor) -> Tensor:
        return states @ self.parts["fc.weight"].T if self.algorithm == "EAGLE3" else states

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.algorithm != "EAGLE3":
            return self.model.lm_head(hidden)
        small = hidden @ self.parts["lm_head.weight"].T
        ids = torch.arange(len(small)) + self.parts["d2t"]
        return torch.full((self.vocab_size,), -torch.inf).index_copy(0, ids, small)

    def _entries(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states for the LM head and the head's own states, [T, E] each."""
        embedded = self.model.model.embed_tokens(tokens)
        if self.algorithm == "EAGLE3":
            return self._eagle3(embedded, states)
        if self.algorithm == "EAGLE":
            x = torch.cat([embedded, states], -1) @ self.parts["fc.weight"].T + self.parts["fc.bias"]
            out = self._layer(self._eagle_layer, x)
            return out, out
        token_norm, state_norm, last_norm, projection = (self.parts[f"{name}.weight"] for name in self.names)
        pair = [self._rms(embedded, token_norm), self._rms(states, state_norm)]
        joined = torch.cat(pair[::-1] if "mimo" in self.kind else pair, -1)
        x = self._layer(self.model.model.layers[3], joined @ projection.T)
        out = self._rms(x, last_norm)
        return out, out

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        offset = 1 if "qwen3_next" in self.kind else 0
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight + offset)

    @cached_property
    def _eagle_layer(self) -> Any:
        kind = Qwen2DecoderLayer if "qwen2" in self.kind else LlamaDecoderLayer
        layer: Any = kind(self.model.config, 0)
        layer.input_layernorm = nn.Identity()
        prefix = "layers.0."
        layer.load_state_dict(
            {name.removeprefix(prefix): each for name, each in self.parts.items() if name.startswith(prefix)}
        )
        return layer

    def _layer(self, layer: Any, x: Tensor) -> Tensor:
        """Return the output of a decoder layer of transformers over entries [T, E], which see earlier entries."""
        out = layer(x[None], **self._places(x))
        return (out[0] if isinstance(out, tuple) else out)[0]

    def _places(self, x: Tensor) -> dict[str, Any]:
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), torch.finfo(torch.float32).min).triu(1)[None, None]
        return {
            "attention_mask": mask,
            "position_ids": positions,
            "position_embeddings": self.model.model.rotary_emb(x[None], positions),
        }

    def _eagle3(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        own = {name.removeprefix("midlayer."): each for name, each in self.parts.items()}
        joined = torch.cat(
            [
                self._rms(embedded, own["input_layernorm.weight"]),
                self._rms(states, own["hidden_norm.weight"]),
            ],
            -1,
        )
        attention = LlamaDecoderLayer(self.model.config, 0).self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = own[f"self_attn.{name}.weight"]
            projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            projection.weight.data = weight
            setattr(attention, name, projection)
        x = states + attention(joined[None], **self._places(embedded))[0][0]
        y = self._rms(x, own["post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + gated @ own["mlp.down_proj.weight"].T
        return self._rms(x, own["norm.weight"]), x
