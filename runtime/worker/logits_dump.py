"""Writes the logits of every step to files (`--debug-tensor-dump-output-folder`)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from torch import Tensor

from runtime.batch import Batch
from runtime.errors import EngineFailure


class LogitsDump:
    """Writes `step-N.npz` for each step that samples, with N from 0. Waits for the device, so steps become slow.

    `logits` is float32 [N, V], before penalties, biases and grammars. `positions` int64 [N] has the position of each
    new token in its sequence. `rids` [N] are the request labels. Raises `EngineFailure` if the folder cannot be
    created.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._num_steps = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineFailure(f"--debug-tensor-dump-output-folder {folder} cannot be created.") from error

    def write(self, logits: Tensor, batch: Batch) -> None:
        """Write the logits of the sampled positions of a batch."""
        if batch.sampling is None:
            raise ValueError("No row of this batch is sampled.")
        sampling, ends = batch.sampling, np.cumsum(batch.counts)
        rows = sampling.row_of
        path = self._folder / f"step-{self._num_steps:06d}.npz"
        unfinished = path.with_suffix(".new")
        with unfinished.open("wb") as file:
            np.savez(
                file,
                logits=logits.cpu().numpy(),
                positions=(batch.starts + batch.counts - ends)[rows] + sampling.positions + np.int64(1),
                rids=np.array([batch.sequences[row].request.label for row in rows]),
            )
        os.replace(unfinished, path)  # readers see only complete files
        self._num_steps += 1
