"""When forced tokens are appended."""

from __future__ import annotations

import pytest

from fake_runner import Drive, make_plan, make_sequence
from late_host_data import LateForcedTokens, LateHostData
from runtime.constraint import Output
from runtime.scheduler.fast_forward import MIN_ROW_S


@pytest.mark.parametrize(("step_s", "are_appended"), [(None, True), (4.1 * MIN_ROW_S, True), (3.9 * MIN_ROW_S, False)])
def test_forced_tokens_are_appended_where_a_row_takes_longer_than_finding_them(
    step_s: float | None, are_appended: bool
) -> None:
    drive = Drive(make_plan(max_forced=8))
    drive.scheduler.note_step_time(step_s)
    late = LateHostData(drive.runner.vocab_size)

    def forced(choice: int, output: Output) -> tuple[int, ...]:
        return tuple(drive.expected(sequences[choice])[output.num_output :][:5])

    first = make_sequence([1, 2], max_new_tokens=20, n=4, constraint=LateForcedTokens(late, forced))
    sequences = [
        first,
        *(make_sequence([1, 2], index=index, seed=index, request=first.request) for index in range(1, 4)),
    ]
    drive.add(*sequences)
    drive.step()
    late.is_held = lambda output_ids: True
    drive.step()  # the first tokens have arrived, and the data after them is requested
    assert (drive.scheduler.awaited_masks is not None) is are_appended
    late.deliver_all()
    drive.run()
    assert [drive.output(sequence) for sequence in sequences] == [drive.expected(each) for each in sequences]
    assert (drive.scheduler.load.num_forced > 0) is are_appended
