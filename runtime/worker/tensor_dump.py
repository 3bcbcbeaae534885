"""Writes the hidden states and logits of every step to files (`--debug-tensor-dump-output-folder`)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from runtime.batch import Batch
from runtime.errors import EngineFailure
from runtime.layers.forward_batch import ForwardBatch
from runtime.modeling.decoder import Decoder


class TensorDump:
    """Writes `step-N.safetensors` for each step, with N from 0. Waits for the device, so steps become slow.

    A step has T tokens and samples N tokens. A file has these tensors:

    - `input_ids`, `positions` (in the sequence) and `rows`, int64 [T]. The metadata `rids` lists the request labels of
      the rows as JSON.
    - `layers.I` [T, E], the sum of hidden states and residual after layer I, in the model's dtype.
    - `hidden` [T, E], the hidden states after the final norm.
    - `logits` float32 [N, V], before penalties, biases and grammars, and `sampled` int64 [N], the indices of their
      tokens in the step. Absent if the step samples nothing.
    """

    def __init__(self, folder: str, layers: Sequence[int] | None, model: Decoder) -> None:
        """Observe `layers` of the model (None: all). The model must run eagerly, without graphs.

        Raises `EngineFailure` if the folder cannot be created or the layers are not found.
        """
        self._folder = Path(folder)
        self._num_steps = 0
        self._tensors: dict[str, Tensor] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineFailure(f"--debug-tensor-dump-output-folder {folder} cannot be created.") from error
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)
        found = layers_of(model)
        for index in range(len(found)) if layers is None else layers:
            found[index].register_forward_hook(self._layer(f"layers.{index}"))

    def write(self, batch: Batch, logits: Tensor | None) -> None:
        """Write the file of a step whose forward pass has been enqueued."""
        tensors = {name: tensor.cpu() for name, tensor in self._tensors.items()}
        self._tensors = {}
        tensors["rows"] = torch.from_numpy(np.repeat(np.arange(len(batch.counts)), batch.counts))
        if logits is not None and batch.sampling is not None:
            tensors["logits"] = logits.cpu()
            tensors["sampled"] = torch.from_numpy(batch.sampling.positions.astype(np.int64))
        rids = json.dumps([sequence.request.label for sequence in batch.sequences])
        path = self._folder / f"step-{self._num_steps:06d}.safetensors"
        unfinished = path.with_suffix(".new")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, {"rids": rids})
        os.replace(unfinished, path)  # so that readers see only complete files
        self._num_steps += 1

    def _begin(self, model: nn.Module, inputs: tuple[ForwardBatch]) -> None:
        [batch] = inputs
        self._tensors = {"input_ids": batch.token_ids.clone(), "positions": batch.positions.clone()}

    def _end(self, model: nn.Module, inputs: tuple[ForwardBatch], hidden: Tensor) -> None:
        self._tensors["hidden"] = hidden.clone()

    def _layer(self, name: str) -> Any:
        def keep(layer: nn.Module, inputs: Any, output: Any) -> None:
            x, residual = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
            if isinstance(x, tuple):
                x = x[0]
            # A copy, because the next layer may overwrite both tensors.
            whole = x + residual if isinstance(residual, Tensor) and residual.shape == x.shape else x.clone()
            whole = whole.flatten(0, -2)
            # Exists if a module of transformers computes the rows of a step one by one.
            before = self._tensors.get(name)
            self._tensors[name] = whole if before is None else torch.cat([before, whole])

        return keep


def layers_of(model: Decoder) -> Sequence[nn.Module]:
    """Return the layers of a model. Raises `EngineFailure` if transformers' modules have no such list."""
    if len(model.layers):
        return list(model.layers)
    config: Any = getattr(getattr(model, "model", None), "config", None)
    count = config.get_text_config().num_hidden_layers if config is not None else 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count > 0:
            return list(module)
    raise EngineFailure("The layers of this model are not found, so --debug-tensor-dump-output-folder cannot be used.")
