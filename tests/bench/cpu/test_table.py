from __future__ import annotations

from bench.cpu.compare import Line, Ratio
from bench.cpu.table import table
from bench.cpu.work import FIGURES


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
