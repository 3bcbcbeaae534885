"""Classifiers and encoders of transformers: each text is computed whole, and nothing of it is kept."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ops.attention.native import split_rows
from runtime.errors import CheckpointError
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.pooler import Pooler
from runtime.layers.sharding import Stage
from runtime.models.by_transformers.attention import body
from runtime.models.decoder import Decoder

TRIED = 5  # tokens of the text that is tried before serving
PADDED = ("albert", "deberta", "deberta-v2", "electra")  # whose texts a mask keeps from padding, as tested
MAX_TOGETHER = 2**12  # tokens of texts that are filled up to one length: scores grow with its square

logger = logging.getLogger("penstock.core")


class WholeTexts(Decoder):
    """Texts in transformers' own pass: hidden states of their tokens, or a classifier's scores.

    Texts of similar length are computed together by models of the kinds `PADDED`, one after the other by all others.
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
        self._pads = config.model_type in PADDED
        self._fill = config.pad_token_id or 0
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
        counts = list(batch.attention.counts_host)
        types = [None] * len(counts) if batch.token_types is None else batch.token_types.split(counts)
        texts = list(zip(batch.token_ids.split(counts), types, strict=True))
        groups = [[row] for row in range(len(texts))]
        if self._pads:
            groups = split_rows([(count, row) for row, count in enumerate(counts)], MAX_TOGETHER)
        found: dict[int, Tensor] = {}
        for rows in groups:
            found |= zip(rows, self._computed([texts[row] for row in rows]), strict=True)
        return torch.cat([found[row] for row in range(len(texts))])

    def _computed(self, texts: list[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """[T, E] of each text. One that cannot be computed is found by computing those beside it alone."""
        try:
            return [self._text(*texts[0])] if len(texts) == 1 else self._together(texts)
        except Exception as error:  # its own code, of which anything may come
            if len(texts) > 1:
                return [alone for text in texts for alone in self._computed([text])]
            ids = texts[0][0]
            logger.error("A text of %d tokens cannot be computed by transformers: %s", len(ids), error)
            nothing = torch.full((len(ids), self.hidden_size), torch.nan, dtype=self.dtype)
            return [nothing.to(ids.device)]

    def _together(self, texts: list[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """[T, E] of each of several texts, filled up to the longest and masked."""
        ids = pad_sequence([text for text, _ in texts], batch_first=True, padding_value=self._fill)
        mask = pad_sequence([torch.ones_like(text) for text, _ in texts], batch_first=True)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        types = [of_text for _, of_text in texts if of_text is not None]
        if types and self._reads_types:
            given["token_type_ids"] = pad_sequence(types, batch_first=True)
        output = self._called(**given)
        if self._num_labels:
            return [self._at_last(scores, len(text)) for scores, (text, _) in zip(output.logits, texts)]
        return [states[: len(text)] for states, (text, _) in zip(output.last_hidden_state, texts)]

    def _at_last(self, scores: Tensor, count: int) -> Tensor:
        """[T, labels] of a text of so many tokens."""
        lines = scores.new_zeros(count, self._num_labels)
        lines[-1] = scores.view(self._num_labels)
        return lines

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
        return self._at_last(output.logits, count)

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
