"""What a configuration says about rotary position embedding. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """The angles' base and how they are scaled beyond the trained context."""

    theta: float
    dim: int  # leading dimensions of each head that are rotated
    max_position: int  # max_position_embeddings
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0  # trained context; 0: max_position
    attention_factor: float | None = None  # yarn, longrope: multiplies cosines and sines
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    sections: tuple[
        int, ...
    ] = ()  # pairs that turn with the time, height and width of a position; (): one axis

    @property
    def trained_context(self) -> int:
        return self.original_context or self.max_position

    @property
    def context_length(self) -> int:
        """The context that these parameters are meant for.

        A factor without a trained context counts from max_position; "dynamic" and "llama3" change nothing
        within max_position.
        """
        if self.kind in ("linear", "yarn") and not self.original_context:
            return int(self.max_position * self.factor)
        return self.max_position
