"""Lets transformers import a torchvision that was built for another torch. Import this module before transformers.

The wheel on the index is built for CUDA and fails to import beside a torch for CPUs, because its operators are missing.
Its Python part, which is all that processors need, works if the operators are declared.
"""

from __future__ import annotations

import contextlib
import importlib.util

import torch

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
_operators = torch.library.Library("torchvision", "FRAGMENT") if HAS_TORCHVISION else None
if _operators is not None:
    for declaration in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        with contextlib.suppress(RuntimeError):  # they exist if torchvision fits this torch
            _operators.define(declaration)
