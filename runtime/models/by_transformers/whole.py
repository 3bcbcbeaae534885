"""Classifiers and encoders of transformers: each text is computed whole and alone, and nothing of it is kept."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.pooler import Pooler
from runtime.layers.sharding import Stage
from runtime.models.by_transformers.attention import body
from runtime.models.decoder import Decoder

TRIED = 5  # tokens of the text that is tried before serving

logger = logging.getLogger("penstock.core")


class WholeTexts(Decoder):
    """Texts one after the other, in transformers' own pass: hidden states of their tokens, or a classifier's scores.

    Scores stand in the place of the last token's hidden state. Models of an encoder and a decoder look for the token
    that ends a text, which is put behind texts without it.
    """

    def __init__(self, model: Any, num_labels: int) -> None:
        """`num_labels` of a classifier, 0 of a model that gives hidden states. Raises CheckpointError for a model that
        does not take tokens alone.
        """
        nn.Module.__init__(self)
        self.model = model
        self.embedding = self.norm = self.head = None
        self.layers = nn.ModuleList()
        self.pooler, self.scorer = Pooler(), None
        self.cache_specs = {}
        config = model.config.get_text_config()
        self.hidden_size = num_labels or config.hidden_size
        self._num_labels = num_labels
        self._called = (
            model if num_labels or not type(model).__name__.endswith("ForMaskedLM") else body(model)
        )
        self._takes = set(inspect.signature(self._called.forward).parameters)
        self._reads_types = (
            "token_type_ids" in self._takes and (getattr(config, "type_vocab_size", 0) or 0) > 1
        )
        ends = model.config.eos_token_id if getattr(model.config, "is_encoder_decoder", False) else None
        self._end: int | None = ends[0] if isinstance(ends, list) else ends
        self._try(type(model).__name__, config.vocab_size)

    def keep(self, stage: Stage) -> None:
        if not (stage.first and stage.last):
            raise CheckpointError("A model that transformers computes has no stages (--pp-size 1).")

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, E], or scores [T, labels] of which only those of last tokens are any. Every row must be a
        whole text. A text that transformers' code cannot compute gets what is no number.
        """
        if batch.input_embeds is not None or batch.positions.dim() > 1:
            raise RuntimeError("A model that transformers computes takes ids at positions of one axis.")
        counts, found = list(batch.attention.counts_host), []
        types = [None] * len(counts) if batch.token_types is None else batch.token_types.split(counts)
        for ids, of_ids in zip(batch.token_ids.split(counts), types, strict=True):
            try:
                found.append(self._text(ids, of_ids))
            except Exception as error:  # its own code, of which anything may come
                logger.error("A text of %d tokens cannot be computed by transformers: %s", len(ids), error)
                nothing = torch.full((len(ids), self.hidden_size), torch.nan, dtype=self.dtype)
                found.append(nothing.to(ids.device))
        return torch.cat(found)

    def _text(self, token_ids: Tensor, types: Tensor | None) -> Tensor:
        """[T, E] of one text, given alone."""
        count = len(token_ids)
        if self._end is not None and not bool((token_ids == self._end).any()):
            token_ids = torch.cat([token_ids, token_ids.new_tensor([self._end])])
        given: dict[str, Any] = {"input_ids": token_ids[None]}
        if "attention_mask" in self._takes:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        if "use_cache" in self._takes:
            given["use_cache"] = False
        if types is not None and self._reads_types:
            given["token_type_ids"] = types[None]
        output = self._called(**given)
        if not self._num_labels:
            return output.last_hidden_state[0, :count]
        scores = output.logits.new_zeros(count, self._num_labels)
        scores[-1] = output.logits.view(self._num_labels)
        return scores

    def _try(self, name: str, vocab_size: int) -> None:
        ids = torch.arange(3, 3 + TRIED, device=next(self.model.parameters()).device) % vocab_size
        try:
            with torch.inference_mode():
                shape = tuple(self._text(ids, None).shape)
        except Exception as error:  # its own code, of which anything may come
            raise CheckpointError(f"{name} cannot be served by transformers' code: {error}") from error
        if shape != (TRIED, self.hidden_size):
            raise CheckpointError(f"{name} cannot be served by transformers' code: it gives {shape}.")

    def embed(self, batch: ForwardBatch) -> Tensor:
        raise RuntimeError("A model that transformers computes has no stages.")

    def logits(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("A classifier or an encoder writes no tokens.")
