"""Train a draft head for the demo model: one layer that proposes tokens for the model to verify (EAGLE-3).

Y. Li et al., 2025, arXiv 2503.01840. At position q, the head reads the model's states at q (the outputs of three of its
layers, concatenated and projected) and the token at q + 1, and predicts the token at q + 2. When it proposes several
tokens, its own output replaces the model's states. Training unrolls `UNROLLED` such steps over whole documents: in step
j, position q attends to the keys of step 1 up to q - j + 1, and to the key of each later step i at q - j + i.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from demo_model.corpus import Layout, Mixture
from demo_model.training import Muon, Schedule

UNROLLED = 3
LATER = 0.85  # weight of a step's loss, relative to the previous step
OUTPUTS_OF = (1, 3, 5)  # layers whose outputs the head reads
MLP = 512
SCHEDULE = Schedule(steps=300, learnt_per_step=4096)


class Shape(NamedTuple):
    """Sizes of a draft head. Width, heads and rotary base are those of its model."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    eps: float
    theta: float


class Norm(nn.Module):
    """RMS norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Head(nn.Module):
    """The head without embedding and LM head, which it shares with the model.

    Parameter names are those of published checkpoints.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, heads, kv_heads, size = shape.width, shape.heads, shape.kv_heads, shape.head_dim
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * width, heads * size, bias=False),
                        "k_proj": nn.Linear(2 * width, kv_heads * size, bias=False),
                        "v_proj": nn.Linear(2 * width, kv_heads * size, bias=False),
                        "o_proj": nn.Linear(heads * size, width, bias=False),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(width, shape.mlp, bias=False),
                        "up_proj": nn.Linear(width, shape.mlp, bias=False),
                        "down_proj": nn.Linear(shape.mlp, width, bias=False),
                    }
                ),
                **{
                    name: Norm(width, shape.eps)
                    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
                },
            }
        )
        self.norm = Norm(width, shape.eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def unrolled(self, states: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Return the normalised output [B, L, E] of each step.

        `states` [B, L, 3E] are the model's. `embedded` [B, L, E] has the embedding of token q + 1 at position q.
        """
        layer: Any = self.midlayer
        attention = layer["self_attn"]
        features, outputs = self.fc(states), []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(steps):
            joined = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](features)], -1)
            q, k, v = (self._heads(attention[f"{name}_proj"](joined), name != "v") for name in "qkv")
            keys.append(k)
            values.append(v)
            x = features + attention["o_proj"](self._attend(q, keys, values).transpose(1, 2).flatten(2))
            y, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
            x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
            outputs.append(self.norm(x))
            features = F.pad(x, (0, 0, 1, 0))[:, :-1]  # position q reads the output at q - 1
        return outputs

    def _heads(self, x: Tensor, turned: bool) -> Tensor:
        """Return [B, H, L, D], with each KV head repeated. With `turned`, apply the rotary embedding."""
        x = x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        if turned:
            half = self.shape.head_dim // 2
            angles = torch.outer(
                torch.arange(x.shape[2], device=x.device).float(),
                self.shape.theta ** (-torch.arange(half, device=x.device).float() / half),
            )
            first, second = x.float().chunk(2, -1)
            cos, sin = angles.cos(), angles.sin()
            x = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
        return x.repeat_interleave(self.shape.heads // x.shape[1], dim=1)

    def _attend(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        length, step = q.shape[2], len(keys) - 1
        scale = self.shape.head_dim**-0.5
        causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-step)
        scores = [(q @ keys[0].mT * scale).masked_fill(~causal, -1e9)]
        later = [_moved(k, step - number) for number, k in enumerate(keys) if number]
        scores += [(q * k).sum(-1, keepdim=True) * scale for k in later]
        weights = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
        out = weights[..., :length] @ values[0]
        for number, v in enumerate(values[1:]):
            out = out + weights[..., length + number, None] * _moved(v, step - number - 1)
        return out


def _moved(x: Tensor, count: int) -> Tensor:
    """Move [B, H, L, D] by `count` positions to the right, with zeros on the left."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]]


class Target:
    """The demo model: its states and its distributions."""

    def __init__(self, folder: Path, device: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.model.to(device)
        self.seen: dict[int, Tensor] = {}
        for index in OUTPUTS_OF:
            self.model.model.layers[index].register_forward_hook(self._keep(index))
        config = self.model.config
        self.shape = Shape(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            MLP,
            config.rms_norm_eps,
            float(json.loads((folder / "config.json").read_text())["rope_theta"]),
        )

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for tokens [B, L]: states [B, L, 3E], embedded [B, L, E] and final hidden states [B, L, E]."""
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        return torch.cat([self.seen[index] for index in OUTPUTS_OF], -1), self.embed(tokens), hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the token embeddings."""
        return self.model.model.embed_tokens(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        return F.linear(hidden, self.model.lm_head.weight)

    def _keep(self, index: int):
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self.seen[index] = output[0] if isinstance(output, tuple) else output

        return hook


def step_loss(head: Head, target: Target, layout: Layout, device: str) -> tuple[Tensor, list[float]]:
    """Return the loss of one step's documents, and the fraction of correct first choices of each unrolled step."""
    tokens = torch.from_numpy(layout.tokens).to(device)
    wanted = torch.zeros(len(tokens), dtype=torch.bool)
    wanted[torch.from_numpy(layout.learnt_index[layout.targets >= 0])] = True
    wanted, start = wanted.to(device), 0
    losses = [torch.zeros((), device=device) for _ in range(UNROLLED)]
    right, total = [0] * UNROLLED, [0] * UNROLLED
    for rows, length in layout.groups:
        own = slice(start, start + rows * length)
        start += rows * length
        ids, learnt = tokens[own].view(rows, length), wanted[own].view(rows, length)
        if length < 4 or not learnt.any():
            continue
        states, embedded, hidden = target.read(ids)
        outputs = head.unrolled(states[:, :-1], embedded[:, 1:], UNROLLED)
        for number, output in enumerate(outputs):
            # Position q must predict what the model predicts at q + 1, if the token after that is to be learnt.
            mask = learnt[:, 1:].clone()
            mask[:, :number] = False
            if not mask.any():
                continue
            goal = target.logits(hidden[:, 1:][mask]).float()
            logits = target.logits(output[mask]).float()
            losses[number] = losses[number] - (goal.softmax(-1) * logits.log_softmax(-1)).sum()
            right[number] += int((goal.argmax(-1) == logits.argmax(-1)).sum())
            total[number] += int(mask.sum())
    weights = [LATER**number for number in range(UNROLLED)]
    loss = sum(weight * each / max(count, 1) for weight, each, count in zip(weights, losses, total, strict=True))
    return torch.as_tensor(loss), [hit / max(count, 1) for hit, count in zip(right, total, strict=True)]


def train(head: Head, target: Target, mixture: Mixture, schedule: Schedule, device: str) -> None:
    """Train to the end of the schedule, by steps or by time, and print the progress."""
    matrices = [weight for weight in head.parameters() if weight.dim() == 2]
    others = [weight for weight in head.parameters() if weight.dim() != 2]
    muon = Muon(matrices, schedule.matrix_lr, 0.95, schedule.weight_decay)
    adam = torch.optim.AdamW(others, schedule.other_lr, betas=(0.9, 0.98), weight_decay=0.0)
    began, step, recent = time.monotonic(), 0, []
    while True:
        by_clock = (time.monotonic() - began) / (schedule.minutes * 60) if schedule.minutes else 0.0
        progress = max(step / schedule.steps, by_clock)
        if progress >= 1:
            return
        rate = schedule.rate(progress)
        for optimiser, peak in ((muon, schedule.matrix_lr), (adam, schedule.other_lr)):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
        layout = mixture.step(schedule.tokens_per_step, schedule.learnt_per_step)
        with torch.autocast(device, torch.bfloat16):
            loss, right = step_loss(head, target, layout, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimiser in (muon, adam):
            optimiser.step()
            optimiser.zero_grad()
        step += 1
        recent.append([loss.item(), *right])
        if step % 25 == 0:
            average = np.mean(recent, axis=0)
            print(f"step {step} {progress:.1%} loss {average[0]:.3f} right {average[1:].round(3)}", flush=True)
            recent.clear()


def write(head: Head, folder: Path, tokenizer: Tokenizer) -> None:
    """Write the head as a checkpoint in the published layout, without embedding and LM head."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "draft_vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": shape.width,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(OUTPUTS_OF), "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes the file readable only for its owner
