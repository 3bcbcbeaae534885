"""Classifiers and encoders that run transformers' code. They process whole texts without a cache."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ops.attention.native import split_rows
from runtime.batch import SECOND_START
from runtime.errors import CheckpointError
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.pooler import Pooler
from runtime.mesh.rank_info import Stage
from runtime.modeling.decoder import Decoder
from runtime.models.by_transformers.attention import body

TRIAL_TOKENS = 5  # length of the trial text
# Model types whose masks are tested to exclude padding.
PADDED = (
    "albert",
    "deberta",
    "deberta-v2",
    "electra",
)
MAX_TOGETHER = 2**12  # maximum number of tokens in a padded batch

logger = logging.getLogger("penstock.core")


class TransformersEncoder(Decoder):
    """Computes hidden states of whole texts, or a classifier's scores, with transformers' modules.

    Model types in `PADDED` compute texts of similar length in one padded batch; other models compute texts one by one.
    Scores are returned in place of the last token's hidden state. Encoder-decoder classifiers look for an EOS token, so
    one is appended to texts without it.
    """

    def __init__(self, model: Any, num_labels: int) -> None:
        """Try the model on a short text. `num_labels` is 0 if the model is not a classifier.

        Raises CheckpointError if the model does not accept token ids as its only input.
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
        self._called = model if num_labels or not type(model).__name__.endswith("ForMaskedLM") else body(model)
        self._takes = set(inspect.signature(self._called.forward).parameters)
        self._reads_types = "token_type_ids" in self._takes and (getattr(config, "type_vocab_size", 0) or 0) > 1
        ends = model.config.eos_token_id if getattr(model.config, "is_encoder_decoder", False) else None
        self._end: int | None = ends[0] if isinstance(ends, list) else ends
        self._pads = config.model_type in PADDED
        self._fill = config.pad_token_id or 0
        self._try(type(model).__name__, config.vocab_size)

    def keep(self, stage: Stage) -> None:
        if not (stage.first and stage.last):
            raise CheckpointError("A model run by transformers does not support pipeline parallelism. Use --pp-size 1.")

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, E], or scores [T, labels], which are valid only for the last token of each text.

        Every row must be a whole text. A text that transformers' code cannot compute gets NaN.
        """
        if batch.input_embeds is not None or batch.position_axes is not None:
            raise RuntimeError("A model run by transformers accepts only token ids and one-axis positions.")
        counts = list(batch.attention.counts_host)
        types: Sequence[Tensor | None] = [None] * len(counts)
        seconds = batch.values_of_tokens(SECOND_START)
        if seconds is not None:
            types = ((seconds > 0) & (batch.positions >= seconds)).long().split(counts)
        texts = list(zip(batch.token_ids.split(counts), types, strict=True))
        groups = [[row] for row in range(len(texts))]
        if self._pads:
            groups = split_rows([(count, row) for row, count in enumerate(counts)], MAX_TOGETHER)
        states: dict[int, Tensor] = {}
        for rows in groups:
            states |= zip(rows, self._computed([texts[row] for row in rows]), strict=True)
        return torch.cat([states[row] for row in range(len(texts))])

    def _computed(self, texts: list[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """Return the hidden states [T, E] of each text.

        If a group of texts fails, its texts are computed one by one, so that only the failing text gets NaN.
        """
        try:
            return [self._text(*texts[0])] if len(texts) == 1 else self._together(texts)
        except Exception as error:  # model code may raise any exception
            if len(texts) > 1:
                return [states for text in texts for states in self._computed([text])]
            ids = texts[0][0]
            logger.error("transformers failed to compute a text of %d tokens: %s", len(ids), error)
            invalid = torch.full((len(ids), self.hidden_size), torch.nan, dtype=self.dtype)
            return [invalid.to(ids.device)]

    def _together(self, texts: list[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """Return the hidden states or scores [T, E] of each text, computed in one padded and masked batch."""
        ids = pad_sequence([text for text, _ in texts], batch_first=True, padding_value=self._fill)
        mask = pad_sequence([torch.ones_like(text) for text, _ in texts], batch_first=True)
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        types = [of_text for _, of_text in texts if of_text is not None]
        if types and self._reads_types:
            arguments["token_type_ids"] = pad_sequence(types, batch_first=True)
        output = self._called(**arguments)
        if self._num_labels:
            return [self._at_last(scores, len(text)) for scores, (text, _) in zip(output.logits, texts)]
        return [states[: len(text)] for states, (text, _) in zip(output.last_hidden_state, texts)]

    def _at_last(self, scores: Tensor, count: int) -> Tensor:
        """Return zeros [count, labels], except for the scores in the last row."""
        rows = scores.new_zeros(count, self._num_labels)
        rows[-1] = scores.view(self._num_labels)
        return rows

    def _text(self, token_ids: Tensor, types: Tensor | None) -> Tensor:
        """Return the hidden states or scores [T, E] of one text."""
        count = len(token_ids)
        if self._end is not None and not bool((token_ids == self._end).any()):
            token_ids = torch.cat([token_ids, token_ids.new_tensor([self._end])])
        arguments: dict[str, Any] = {"input_ids": token_ids[None]}
        if "attention_mask" in self._takes:
            arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        if "use_cache" in self._takes:
            arguments["use_cache"] = False
        if types is not None and self._reads_types:
            arguments["token_type_ids"] = types[None]
        output = self._called(**arguments)
        if not self._num_labels:
            return output.last_hidden_state[0, :count]
        return self._at_last(output.logits, count)

    def _try(self, name: str, vocab_size: int) -> None:
        ids = torch.arange(3, 3 + TRIAL_TOKENS, device=next(self.model.parameters()).device) % vocab_size
        try:
            with torch.inference_mode():
                shape = tuple(self._text(ids, None).shape)
        except Exception as error:  # model code may raise any exception
            raise CheckpointError(f"{name} cannot be served by transformers' code: {error}") from error
        if shape != (TRIAL_TOKENS, self.hidden_size):
            raise CheckpointError(f"{name} cannot be served by transformers' code: it returns the shape {shape}.")

    def embed(self, batch: ForwardBatch) -> Tensor:
        raise RuntimeError("A model run by transformers has no pipeline stages.")

    def logits(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("A classifier or an encoder has no LM head.")
