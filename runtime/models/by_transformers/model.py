"""A causal language model that runs transformers' modules and has the interface of `Decoder`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ops.attention import AttentionOptions
from ops.select import Kernels
from runtime.batch import ADAPTER
from runtime.config.model_facts import ModelFacts
from runtime.errors import CheckpointError
from runtime.layers.batch_reads import BatchReads
from runtime.layers.forward_batch import ForwardBatch, LayerSpec
from runtime.layers.lm_head import NOT_ADAPTED
from runtime.layers.pooler import Pooler
from runtime.mesh.rank_info import Stage
from runtime.modeling.decoder import Decoder
from runtime.modeling.spellings import text_part
from runtime.models.by_transformers import attention
from runtime.models.by_transformers.facts import LAYER_EMBEDDINGS, MUTUAL_IN_WINDOWS, model_sizes
from runtime.models.by_transformers.tower import NUM_AXES

# Argument of models with separate experts for images, int [1, T]: 1 for tokens of images, 0 for text.
VISUAL_TOKENS = "moe_mm_token_type_ids"


def fix_rope_scaling(model: nn.Module, context_length: int) -> None:
    """Make RoPE scalings that depend on the text's length ("dynamic", "longrope") always use the longest context.

    Native families do the same (`runtime.layers.rope`). Otherwise, the rotation of a cached key would depend on the
    other rows of its batch.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in list(by_layer.items()):
            prefix, options = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
            angles: Any = getattr(module, f"{prefix}inv_freq", None)
            if kind not in ("dynamic", "longrope") or not isinstance(angles, Tensor):
                continue
            config: Any = module.config
            fixed, _ = ROPE_INIT_FUNCTIONS[kind](config, angles.device, seq_len=context_length, **options)
            angles.copy_(fixed)
            if layer_type is None:
                setattr(module, "rope_type", "default")  # noqa: B010 - attributes of a module are untyped
            else:
                kinds[layer_type] = "default"


def check_row_values(batch: ForwardBatch) -> None:
    """Raise `RuntimeError` if rows have values that the model ignores: all except adapters, which hooks apply."""
    if not batch.row_values.keys() <= {ADAPTER}:
        raise RuntimeError("A model run by transformers reads no values of rows but adapters.")


class TransformersDecoder(Decoder):
    """Decoder that consists of transformers' modules. It runs on one device and without CUDA graphs."""

    def __init__(self, model: Any, attend: PagedAttention) -> None:
        nn.Module.__init__(self)
        self._set_model(model)
        self._attend = attend
        self.cache_specs = attend.cache_specs
        attention.set_attention(model, attend.attend)

    def _set_model(self, model: Any) -> None:
        """Split the model into its body and its LM head."""
        self.model = model
        # Slot of an adapter -> its tokens in the current call. For the hooks of `worker/adapter_modules.py`.
        self.adapted: dict[int, Tensor | slice] = {}
        self.num_adapted: int | None = None  # number of tokens of this call; None: every token has the adapter
        self.row_values = (ADAPTER,)
        rope: Any = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        # Number of position axes before the three media axes. On them, a token's position is its index (HunYuan-VL).
        self._more_axes = max(0, len(rope.get("mrope_section") or ()) - NUM_AXES)
        self._visual_ids: Tensor | None = (
            None  # ids of the tokens that begin and end media; None: no experts for images
        )
        self.embedding = self.norm = self.head = None
        self.layers = nn.ModuleList()
        self.pooler = Pooler()
        self.scorer = None
        self.hidden_size = model.config.get_text_config().hidden_size
        # A copy of the model in which a stub replaces the body, so that logits come from the model's own head code.
        self._stored_body = _StoredBody(attention.body(model))
        head = copy.copy(model)
        head._modules = {**model._modules, attention.body_name(model): self._stored_body}
        self._head = (head,)  # a tuple, so that the module does not register the model's parameters again

    def keep(self, stage: Stage) -> None:
        if not (stage.first and stage.last):
            raise CheckpointError("A model run by transformers does not support pipeline parallelism. Use --pp-size 1.")

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, E] after the final norm, and store the keys and values of all T tokens."""
        check_row_values(batch)
        self._attend.begin(batch)
        with self.with_adapters(batch.adapted, batch.num_tokens):
            if batch.media is not None or batch.position_axes is not None or self._visual_ids is not None:
                return self._text_model(batch)
            output = attention.body(self.model)(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False
            )
        return output.last_hidden_state[0]

    @contextmanager
    def with_adapters(
        self, adapted: Mapping[int, Tensor] | Mapping[int, slice], num_tokens: int | None = None
    ) -> Iterator[None]:
        """Let hooks apply adapters inside the context.

        `adapted` maps the slot of each adapter to its tokens in the next call, which has `num_tokens` tokens in total.
        """
        self.adapted.update(adapted)
        self.num_adapted = num_tokens
        try:
            yield
        finally:
            self.adapted.clear()

    def accept_media(self) -> None:
        """Allow vectors in place of token embeddings and, if the model uses them, positions on three axes."""
        axes = any(hasattr(module, "get_rope_index") for module in self.model.modules())
        self.reads = BatchReads(position_axes=axes, media_size=self.hidden_size)
        if VISUAL_TOKENS in inspect.signature(self._language_model().forward).parameters:
            names = [f"{kind}_{end}_token_id" for kind in ("image", "video") for end in ("start", "end")]
            ids = [getattr(self.model.config, name, None) for name in names]
            device = next(self.model.parameters()).device
            self._visual_ids = torch.tensor([each for each in ids if each is not None], device=device)

    def _text_model(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states [T, E] of a multimodal model's text part, called with embeddings instead of ids."""
        output = self._language_model()(use_cache=False, **self._embedded(batch, slice(None)))
        return output.last_hidden_state[0]

    def _language_model(self) -> Any:
        """Return the part of a multimodal model that takes embeddings: its language model without the LM head."""
        decoder = self.model.get_decoder()
        return attention.body(decoder) if type(decoder).__name__.endswith("ForCausalLM") else decoder

    def _embedded(self, batch: ForwardBatch, tokens: slice) -> dict[str, Any]:
        """Return the arguments of the language model for some consecutive tokens of the batch."""
        ids, more = batch.token_ids[tokens], {}
        mask = None if batch.embeds_mask is None else batch.embeds_mask[tokens]
        more |= self._layer_embeddings(ids, mask)
        if self._visual_ids is not None:
            visual = torch.isin(ids, self._visual_ids)
            more[VISUAL_TOKENS] = (visual if mask is None else visual | mask)[None].int()
        if mask is not None:
            ids = ids.masked_fill(mask, 0)  # placeholders may be beyond the vocabulary
        embeds = self.model.get_input_embeddings()(ids)
        if batch.input_embeds is not None and mask is not None:
            embeds = torch.where(mask.unsqueeze(1), batch.input_embeds[tokens].to(embeds.dtype), embeds)
            if batch.media_levels:
                more["visual_pos_masks"] = mask[None]
                more["deepstack_visual_embeds"] = [
                    level[tokens][mask].to(embeds.dtype) for level in batch.media_levels
                ]  # fmt: skip
        axes = batch.position_axes
        positions = batch.positions[None, tokens]
        if axes is not None:
            index = positions.expand(self._more_axes, 1, -1)
            positions = torch.cat((index, axes[:, None, tokens])) if self._more_axes else axes[:, None, tokens]
        return {"inputs_embeds": embeds[None], "position_ids": positions, **more}

    def _layer_embeddings(self, ids: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Return the argument with the per-layer embeddings of the tokens; {} if the model has none."""
        model = self._language_model()
        if not getattr(model.config, "hidden_size_per_layer_input", 0):
            return {}
        if mask is not None and not LAYER_EMBEDDINGS[model.config.model_type]:
            ids = ids.masked_fill(mask, model.embed_tokens.padding_idx or 0)
        return {"per_layer_inputs": model.get_per_layer_inputs(ids[None])}

    def embed(self, batch: ForwardBatch) -> Tensor:
        raise RuntimeError("A model run by transformers has no pipeline stages.")

    def logits(self, hidden: Tensor, adapted: Mapping[int, Tensor] = NOT_ADAPTED) -> Tensor:
        """Return float32 logits [R, V] of hidden states [R, E]."""
        self._stored_body.hidden = hidden[None]
        [head] = self._head
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with self.with_adapters(adapted, len(hidden)):
            return head(input_ids=ids, use_cache=False).logits[0].float()

    def reference_logits(self, token_ids: Tensor) -> Tensor:
        """Return float32 logits [T, V] of one text, computed with transformers' own attention."""
        self.model.set_attn_implementation("eager")
        try:
            return self.model(input_ids=token_ids[None], use_cache=False).logits[0].float()
        finally:
            self.model.set_attn_implementation(attention.NAME)


class _StoredBody(nn.Module):
    """A stub for the model's body that returns stored hidden states. Its other attributes are the real body's."""

    hidden: Tensor

    def __init__(self, real: Any) -> None:
        super().__init__()
        self._real = (real,)  # a tuple, so that it does not become a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"][0], name)

    @property
    def decoder(self) -> _StoredBody:
        """Return self, because some heads call `body.decoder` instead of the body."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self.hidden)  # pyright: ignore[reportArgumentType]


class _Output(BaseModelOutputWithPast):
    """Output of the stub. Fields that only some models return are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class PagedAttention:
    """Attention over the paged cache. The n-th attention call of a forward pass uses cache layer n.

    If keys and values of a layer have different head sizes, the shorter ones are padded with zeros, which do not change
    the scores.
    """

    def __init__(self, kernels: Kernels, facts: ModelFacts) -> None:
        self._kernels = kernels
        self._layers = model_sizes(facts.config).layers
        text = text_part(facts.config)
        self._mutual_in_windows = text.get("model_type") in MUTUAL_IN_WINDOWS
        self.cache_specs: dict[int, LayerSpec] = dict(enumerate(self._layers))
        self._batch: ForwardBatch | None = None
        self._causal: ForwardBatch | None = None
        self._calls = 0

    def begin(self, batch: ForwardBatch) -> None:
        self._batch, self._calls = batch, 0
        self._causal = batch
        if self._mutual_in_windows and batch.attention.mutual_spans:
            self._causal = replace(batch, attention=replace(batch.attention, mutual_spans=()))

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        batch, index = self._batch, self._calls
        if batch is None or self._causal is None or index >= len(self._layers):
            raise RuntimeError("Attention was called outside a step, or more often than in the trial pass.")
        self._calls += 1
        layer = self._layers[index]
        cache, scale = batch.cache[index], options.get("scaling", q.shape[-1] ** -0.5)
        sinks, size = options.get("s_aux"), v.shape[-1]
        q, k, v = (pad(x, (0, layer.head_dim - x.shape[-1])).contiguous() for x in (q, k, v))
        cache.store(self._kernels, k, v, batch, {})
        attention_options = AttentionOptions(
            scale=float(scale),
            window=layer.window,
            soft_cap=options.get("softcap"),
            sinks=None if sinks is None else sinks.reshape(-1).float(),
        )
        batch = self._causal if layer.window is None else batch
        return cache.attend(self._kernels, q, batch, {}, attention_options)[..., :size]
