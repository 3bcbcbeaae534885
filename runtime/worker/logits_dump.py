"""The logits of every step as files: `--debug-tensor-dump-output-folder`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from torch import Tensor

from runtime.batch import Batch
from runtime.errors import EngineFailure


class LogitsDump:
    """Writes `step-N.npz` for each step that samples, N counted from 0: waits for the device, so steps become slow.

    `logits` is float32 [R, V] before penalties, biases and grammars, `positions` int64 [R] where each row's new token
    will stand in its sequence, `rids` [R] the names of the requests. Raises `EngineFailure` where the folder cannot be
    made.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._num_steps = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineFailure(f"--debug-tensor-dump-output-folder {folder} cannot be made.") from error

    def write(self, logits: Tensor, batch: Batch) -> None:
        """`logits` are those of the rows of `batch` that sample."""
        if batch.sampling is None:
            raise ValueError("No row of this batch is sampled.")
        rows = batch.sampling.rows
        path = self._folder / f"step-{self._num_steps:06d}.npz"
        unfinished = path.with_suffix(".new")
        with unfinished.open("wb") as file:
            np.savez(
                file,
                logits=logits.cpu().numpy(),
                positions=(batch.starts[rows] + batch.counts[rows]).astype(np.int64),
                rids=np.array([batch.sequences[row].request.label for row in rows]),
            )
        os.replace(unfinished, path)  # who looks finds whole files
        self._num_steps += 1
