"""Show a record of the schedule (`record="FILE"`) in a notebook."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path

from runtime.replay.timeline import Lifetime, Step, as_svg, read_timeline


class Recording:
    """The timeline of a schedule record, a file that an engine with `record="run.record"` writes.

        Recording("run.record")

    A notebook shows the timeline as a plot: when each request waited, was prefilled and decoded, and how many tokens
    each step computed. `requests` and `steps` contain the times. The record is read once; for later entries, create a
    new `Recording`. Raises `ConfigurationError` if the file is not a record of this version, and
    `Difference` if the scheduler no longer makes the recorded decisions.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = fspath(path)
        self._timeline = read_timeline(self.path)

    @property
    def requests(self) -> list[Lifetime]:
        """The times of each output in the record, in order of arrival. A request with `n` has several outputs."""
        return self._timeline.requests

    @property
    def steps(self) -> list[Step]:
        """The times and token counts of the steps in the record, in order."""
        return self._timeline.steps

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plot to an SVG file."""
        Path(path).write_text(as_svg(self._timeline))

    def _repr_html_(self) -> str:
        return as_svg(self._timeline)

    def __repr__(self) -> str:
        return f"<Recording {self.path}: {len(self.requests)} outputs, {len(self.steps)} steps>"
