from __future__ import annotations

import pytest

from bench.cpu.compare import Goal, Line, Ratio, by_figure, compare, disturbed, streamed_share, table
from bench.cpu.turns import Turn
from bench.cpu.work import FIGURES, START

PREFILL, FIRST = "prefill 512", "HTTP, first token p50"


def turns_of(figure: str, **values: list[float]) -> list[Turn]:
    return [Turn(name, figure, i, value) for name, found in values.items() for i, value in enumerate(found)]


def test_the_ratio_is_to_the_best_peer_pair_by_pair() -> None:
    values = by_figure(turns_of(PREFILL, ours=[90, 120, 100], vllm=[60, 60, 50], openvino=[50, 55, 58]))
    [line] = compare(values, {PREFILL: 400.0})
    assert line.medians == {"ours": 100, "vllm": 60, "openvino": 55}
    assert line.ratio == Ratio("vllm", 2.0, 1.5, 2.0)
    assert line.share == 0.25
    assert line.goals == [Goal("1.0", True), Goal("60%", False)]
    [line] = compare(values, {PREFILL: 400.0}, near_limits=False)
    assert line.goals == [Goal("1.0", True)]
    [line] = compare(values, {PREFILL: 400.0}, goals={PREFILL: (2.5, 0.25)})
    assert line.goals == [Goal("2.5", False), Goal("25%", True)]


def test_of_times_the_least_is_best_and_above_one_is_still_better() -> None:
    values = by_figure(turns_of(FIRST, ours=[20, 25], vllm=[40, 40], llamacpp=[80, 90]))
    [line] = compare(values, {})
    assert line.ratio == Ratio("vllm", 1.8, 1.6, 2.0)
    assert line.share is None
    assert line.goals == []


def test_a_missed_goal_is_said() -> None:
    [line] = compare(by_figure(turns_of("concurrency 8", ours=[110.0], vllm=[100.0])), {})
    assert line.ratio is not None
    assert line.ratio.median == pytest.approx(1.1)
    assert line.goals == [Goal("1.2", False)]


def test_a_figure_can_have_a_most() -> None:
    lines = compare(by_figure([Turn("ours", "loop lag p99", 0, 4.0), Turn("ours", START.name, 0, 6.0)]), {})
    assert [line.goals for line in lines] == [[Goal("at most 5", True)], [Goal("at most 5", False)]]


def test_without_ours_the_best_peer_is_set_against_the_limit() -> None:
    [line] = compare(by_figure(turns_of(PREFILL, vllm=[60.0], openvino=[50.0])), {PREFILL: 100.0})
    assert line.ratio is None
    assert line.share == 0.6


def test_without_peers_there_is_no_ratio() -> None:
    [line] = compare(by_figure(turns_of(PREFILL, ours=[60.0])), {PREFILL: 100.0})
    assert line.ratio is None
    assert line.share == 0.6


def test_rounds_keep_their_order_whatever_the_order_of_the_turns() -> None:
    backwards = list(reversed(turns_of(PREFILL, ours=[1.0, 2.0, 3.0])))
    assert by_figure(backwards)[PREFILL]["ours"] == [1, 2, 3]


def test_disturbed_turns_count_only_where_there_are_no_others() -> None:
    quiet, noisy = Turn("ours", PREFILL, 0, 90.0, 0.01), Turn("ours", PREFILL, 1, 9.0, 0.5)
    assert by_figure([quiet, noisy])[PREFILL]["ours"] == [90.0]
    assert by_figure([noisy])[PREFILL]["ours"] == [9.0]
    assert disturbed([quiet, noisy]) == set()
    assert disturbed([noisy]) == {("ours", PREFILL)}


def test_streams_are_set_against_the_same_engine_in_process() -> None:
    measured = turns_of("HTTP, 16 streams", ours=[45.0]) + turns_of("concurrency 16", ours=[50.0])
    assert streamed_share(by_figure(measured)) == 0.9
    assert streamed_share(by_figure(measured[:1])) is None


def test_a_line_has_everybodys_median_the_ratio_the_share_and_the_goal() -> None:
    figure = FIGURES["concurrency 8"]
    lines = [
        Line(figure, {"ours": 1234.5, "openvino": 1000.0}, Ratio("openvino", 1.23, 1.2, 1.3), 0.456),
        Line(FIGURES["peak memory"], {"openvino": 45.67}, None, None),
    ]
    assert table("S, bf16", lines).splitlines() == [
        "| row | S, bf16 | ours | openvino | ratio to the best peer | of the limit | goals |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| 3 | concurrency 8, tok/s | 1,234 | **1,000** | 1.23 (1.20 to 1.30) | 46% | 1.2 reached |",
        "| 6 | peak memory, MiB |  | 45.7 |  |  |  |",
    ]
