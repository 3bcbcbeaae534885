"""What a row of work costs at least on a machine with given limits. Pure arithmetic.

A step takes at least the time of its multiplications at the measured matmul rate, and at least the time of
reading each weight once, and the cache of each sequence once, at the measured bandwidth. Activations, norms,
embeddings and sampling count nothing. The rate is that of bfloat16: 8-bit products may exceed it.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.checkpoints import Shape
from bench.cpu import work

WEIGHT_BYTES = {"bf16": 2, "int8": 1}
CACHE_BYTES = 2  # of one number in the KV cache


class Limits(NamedTuple):
    """What the machine was measured to do."""

    bytes_per_s: float
    flops_per_s: float


class Cost:
    """Least times of a model in seconds."""

    def __init__(self, shape: Shape, weights: str, limits: Limits) -> None:
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        layer = shape.hidden * (2 * q + 2 * kv) + 3 * shape.hidden * shape.mlp
        self._shape = shape
        self._limits = limits
        self._body = shape.layers * layer  # weights of the layers
        self._head = shape.hidden * shape.vocab
        self._weight_bytes = WEIGHT_BYTES[weights] * (self._body + self._head)

    def step_s(self, rows: int, new: int, computed: int) -> float:
        """One step of `rows` sequences with `computed` tokens in the cache, `new` more in each.

        One row of logits for each sequence. A token attends to all before it and to itself: four
        multiply-adds' worth of operations for each query head, dimension and pair.
        """
        shape = self._shape
        pairs = new * computed + new * (new + 1) / 2
        attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
        flops = rows * (2 * self._body * new + 2 * self._head + attention)
        cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * CACHE_BYTES
        read = self._weight_bytes + rows * cached * (computed + new)
        return max(flops / self._limits.flops_per_s, read / self._limits.bytes_per_s)

    def request_s(self, rows: int, prompt: int, output: int, computed: int = 0) -> float:
        """`rows` requests at once, computed in one step and then token by token."""
        steps = (self.step_s(rows, 1, computed + prompt + i) for i in range(output - 1))
        return self.step_s(rows, prompt, computed) + sum(steps)

    def best(self, figure: str) -> float | None:
        """The figure that a machine at its limits would reach; None where no limit is known."""
        if figure.startswith("prefill"):
            length = int(figure.removeprefix("prefill").replace(",", ""))
            return length / self.step_s(1, length, 0)
        if figure.startswith("decode"):
            first = self.step_s(1, work.DECODE_PROMPT, 0)
            whole = self.request_s(1, work.DECODE_PROMPT, work.DECODE_TOKENS)
            return (work.DECODE_TOKENS - 1) / (whole - first)
        if figure.startswith("shared prefix"):
            seconds = self.request_s(work.SHARERS, work.OWN, work.SHARED_OUTPUT, work.PREFIX)
            if figure.endswith("cold"):
                seconds += self.step_s(1, work.PREFIX, 0)
            return work.SHARERS * work.SHARED_OUTPUT / seconds
        if figure.startswith("concurrency") or figure == work.STREAMED.name:
            number = work.STREAMS if figure == work.STREAMED.name else int(figure.split()[1])
            return number * work.OUTPUT / self.request_s(number, work.PROMPT, work.OUTPUT)
        return None
