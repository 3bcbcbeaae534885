"""The coordinates of a rank in the mesh. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

AXES = ("tp", "pp", "ep", "dp", "stage")


class Coordinate(NamedTuple):
    """A rank's coordinate on an axis: number `rank` among the `size` ranks of group number `group`."""

    rank: int
    size: int
    group: int


class Stage(NamedTuple):
    """The layers that a pipeline stage computes. The first stage also has the embedding and the LM head."""

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The number of a rank and the sizes of the mesh axes, which determine the rank's coordinates.

    The ranks of a pipeline stage have consecutive numbers and share the stage's layers. `dp_size` attention groups
    attend to different sequences, and the `tp_size` ranks of a group split every layer. Experts are divided among
    `ep_size` parts of a stage's ranks. The ranks of a part have consecutive numbers and hold the same experts. The axis
    "stage" contains all ranks of a stage.
    """

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    head_by_group: bool = False  # whether each attention group has a whole LM head; otherwise the stage shares one
    whole_dense: bool = False  # whether each rank has whole dense MLPs in a mixture-of-experts model

    def __post_init__(self) -> None:
        if self.stage_size % self.ep_size:
            raise ValueError(f"ep_size {self.ep_size} does not divide the {self.stage_size} ranks of a stage.")

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def cache_rank(self) -> int:
        """Number among the ranks that share the cache of a sequence: the ranks of all stages in one attention group."""
        return self.stage * self.tp_size + self.tp_rank

    @property
    def stage(self) -> int:
        return self.rank // self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks that share the layers of a stage."""
        return self.tp_size * self.dp_size

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp_size

    def coordinate(self, axis: str) -> Coordinate:
        """Return the coordinate on an axis of AXES. Ranks of one group have equal `group` and count from 0."""
        size = getattr(self, f"{axis}_size")
        # Difference between the numbers of neighbouring ranks on the axis.
        step = {"tp": 1, "dp": self.tp_size, "pp": self.stage_size, "ep": self.stage_size // self.ep_size, "stage": 1}[
            axis
        ]
        block, within = divmod(self.rank, step * size)
        return Coordinate(within // step, size, block * step + within % step)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank's stage has the embedding and the LM head."""
        return self.stage == 0

    @property
    def drafts(self) -> bool:
        """Whether this rank has the draft model or head: the first rank of each attention group in the first stage."""
        return self.is_first_stage and self.tp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp_size - 1

    def stage_layers(self, num_layers: int) -> Stage:
        """Return this rank's stage. If the layers do not divide evenly, later stages have one more layer."""
        first, end = (num_layers * stage // self.pp_size for stage in (self.stage, self.stage + 1))
        return Stage(range(first, end), self.is_first_stage, self.is_last_stage)
