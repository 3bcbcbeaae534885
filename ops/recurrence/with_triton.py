"""Recurrent layers in Triton: short convolutions, the gated delta rule, the selective scan."""

from __future__ import annotations

from ops.recurrence.triton_convolve import convolve
from ops.recurrence.triton_delta import delta_rule
from ops.recurrence.triton_scan import scan

__all__ = ["convolve", "delta_rule", "scan"]
