"""A causal language model of transformers as the decoder of a step."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ops.attention import AttentionOptions
from ops.select import Kernels
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.errors import CheckpointError
from runtime.layers.forward_batch import ForwardBatch, KVSpec, LayerSpec
from runtime.layers.pooler import Pooler
from runtime.layers.sharding import Stage
from runtime.models.by_transformers import attention
from runtime.models.by_transformers.facts import (
    TEXT_ALONE,
    auto_of,
    class_of,
    config_of,
    forget_padding,
    numbers,
    quiet,
)
from runtime.models.checkpoint import find_weights
from runtime.models.decoder import Decoder
from runtime.models.parameters import check_dtypes
from runtime.models.tensors import TensorFiles

DUMMY_SEED = 1234
MAX_NAMED = 20
SEEING_PARTS = re.compile(r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.")


def load(facts: ModelFacts, plan: ModelPlan, kernels: Kernels) -> Decoder:
    """The model on plan.device in plan.dtype, its weights read and converted by transformers.

    Raises CheckpointError for tensors that are missing, left over or misshapen.
    """
    from runtime.models.by_transformers.caches import HoldingDecoder
    from runtime.models.by_transformers.whole_texts import WholeTexts

    attention.register()
    made_by: Any = (class_of if facts.is_encoder else auto_of)(facts.architecture)
    implementation = _implementation(facts)
    config, dtype = config_of(facts.config), getattr(torch, plan.dtype)
    with quiet():
        if plan.load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(DUMMY_SEED)
                model = (
                    made_by._from_config(config, dtype=dtype)
                    if facts.is_encoder
                    else made_by.from_config(config, dtype=dtype, attn_implementation=implementation)
                )
        else:
            model = _read(facts, config, dtype, plan, made_by, implementation)
    model = model if facts.is_encoder else attention.writing_part(model)
    model.eval().requires_grad_(False).to(plan.device)
    fix_angles(model, plan.context_length)
    if facts.is_encoder:
        return WholeTexts(model, len(facts.labels))
    forget_padding(model.config)  # not before: transformers gives its embedding zeros
    if facts.recurrent:
        return HoldingDecoder(model)
    return TransformersDecoder(model, _Attention(kernels, facts))


def _implementation(facts: ModelFacts) -> str | None:
    """Whose attention: ours, transformers' plain one, or torch's for Falcon, whose plain one has ALiBi twice."""
    if facts.is_encoder:
        return None
    if facts.recurrent:
        return "sdpa" if facts.config.get("model_type") == "falcon" else "eager"
    return attention.NAME


def fix_angles(model: nn.Module, context_length: int) -> None:
    """Fix rotations that depend on how long a text has become ("dynamic", "longrope") by the longest context.

    As in families of ours (`runtime.layers.rope`): else the angles of a cached key, and those of a chunk, would depend
    on what else is computed with it.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in list(by_layer.items()):
            prefix, given = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
            angles: Any = getattr(module, f"{prefix}inv_freq", None)
            if kind not in ("dynamic", "longrope") or not isinstance(angles, Tensor):
                continue
            config: Any = module.config
            fixed, _ = ROPE_INIT_FUNCTIONS[kind](config, angles.device, seq_len=context_length, **given)
            angles.copy_(fixed)
            if layer_type is None:
                setattr(module, "rope_type", "default")  # noqa: B010 - a module's attributes are of any type
            else:
                kinds[layer_type] = "default"


def _read(
    facts: ModelFacts,
    config: Any,
    dtype: torch.dtype,
    plan: ModelPlan,
    made_by: Any,
    implementation: str | None,
) -> Any:
    files = TensorFiles(find_weights(Path(facts.path), plan.load_format))
    if not plan.any_dtype:
        weights = {name: dtype for name, dtype in files.dtypes.items() if name.endswith(".weight")}
        check_dtypes(weights, files.where)
    try:
        loaded: Any = made_by.from_pretrained(
            facts.path,
            config=config,
            dtype=dtype,
            attn_implementation=implementation,
            local_files_only=True,
            use_safetensors={"safetensors": True, "pt": False}.get(plan.load_format),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
        model, info = loaded
    except Exception as error:  # what its readers raise is of many kinds
        raise CheckpointError(f"transformers cannot load {facts.path}: {error}") from error
    if facts.config.get("model_type") in TEXT_ALONE:
        unexpected = info.get("unexpected_keys") or ()
        info["unexpected_keys"] = [name for name in unexpected if not SEEING_PARTS.match(str(name))]
    problems = [
        f"{len(found)} {what} ({', '.join(sorted(map(str, found))[:MAX_NAMED])})"
        for what, key in (
            ("missing", "missing_keys"),
            ("not of this model", "unexpected_keys"),
            ("of the wrong shape", "mismatched_keys"),
        )
        if (found := info.get(key))
    ]
    if problems:
        where = files.where([str(name) for key in info if key.endswith("_keys") for name in info[key] or ()])
        raise CheckpointError(f"The checkpoint does not fit the model: {'; '.join(problems)}{where}.")
    return model


class TransformersDecoder(Decoder):
    """Its parts are transformers' modules: no graph captures them, and they lie on one device."""

    def __init__(self, model: Any, attend: _Attention) -> None:
        nn.Module.__init__(self)
        self._hold(model)
        self._attend = attend
        self.cache_specs = attend.cache_specs
        attention.give(model, attend.attend)

    def _hold(self, model: Any) -> None:
        """The model as a body and a head."""
        self.model = model
        self.embedding = self.norm = self.head = None
        self.layers = nn.ModuleList()
        self.pooler = Pooler()
        self.scorer = None
        self.hidden_size = model.config.get_text_config().hidden_size
        # The same model with its body replaced by what the body gave: its head, whatever that does to logits.
        self._given = _Given(attention.body(model))
        head = copy.copy(model)
        head._modules = {**model._modules, attention.body_name(model): self._given}
        self._head = (head,)  # not a child: its parameters are the model's

    def keep(self, stage: Stage) -> None:
        if not (stage.first and stage.last):
            raise CheckpointError("A model that transformers computes has no stages (--pp-size 1).")

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, E] of the batch's tokens, the final norm applied. Writes the KV of all T."""
        if not batch.is_plain:
            raise RuntimeError("A model that transformers computes takes ids at positions of one axis.")
        self._attend.begin(batch)
        output = attention.body(self.model)(
            input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False
        )
        return output.last_hidden_state[0]

    def embed(self, batch: ForwardBatch) -> Tensor:
        raise RuntimeError("A model that transformers computes has no stages.")

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E], as `forward` gave them -> float32 [R, V]."""
        self._given.hidden = hidden[None]
        [head] = self._head
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return head(input_ids=ids, use_cache=False).logits[0].float()

    def by_itself(self, token_ids: Tensor) -> Tensor:
        """float32 logits [T, V] of one text, as transformers computes them without anything of ours."""
        self.model.set_attn_implementation("eager")
        try:
            return self.model(input_ids=token_ids[None], use_cache=False).logits[0].float()
        finally:
            self.model.set_attn_implementation(attention.NAME)


class _Given(nn.Module):
    """A body that gives the hidden states which it was told; what else a head reads of it is that of the real one."""

    hidden: Tensor

    def __init__(self, real: Any) -> None:
        super().__init__()
        self._real = (real,)  # not a child

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"][0], name)

    @property
    def decoder(self) -> _Given:
        """What some heads call instead of the body."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self.hidden)  # pyright: ignore[reportArgumentType]


class _Output(BaseModelOutputWithPast):
    """A body's output without what only some heads pass on, as None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Attention:
    """Stores keys and values in the cache and attends over it; calls of a pass are numbered as they come.

    The cache has one size of heads: shorter keys and values are filled up with zeros, which change no score.
    """

    def __init__(self, kernels: Kernels, facts: ModelFacts) -> None:
        self._kernels = kernels
        self._head_dim = facts.head_dim
        self._windows = numbers(facts.config).windows
        self.cache_specs: dict[int, LayerSpec] = {
            index: KVSpec(facts.num_kv_heads, facts.head_dim, window)
            for index, window in enumerate(self._windows)
        }
        self._batch: ForwardBatch | None = None
        self._calls = 0

    def begin(self, batch: ForwardBatch) -> None:
        self._batch, self._calls = batch, 0

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        batch, index = self._batch, self._calls
        if batch is None or index >= len(self._windows):
            raise RuntimeError("Attention was called outside a step, or more often than in the trial.")
        self._calls += 1
        cache, scale = batch.cache[index], options.get("scaling", q.shape[-1] ** -0.5)
        sinks, size = options.get("s_aux"), v.shape[-1]
        q, k, v = (pad(x, (0, self._head_dim - x.shape[-1])).contiguous() for x in (q, k, v))
        cache.store(self._kernels, k, v, batch, {})
        asked = AttentionOptions(
            scale=float(scale),
            window=self._windows[index],
            soft_cap=options.get("softcap"),
            sinks=None if sinks is None else sinks.reshape(-1).float(),
        )
        return cache.attend(self._kernels, q, batch, {}, asked)[..., :size]
