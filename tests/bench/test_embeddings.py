from __future__ import annotations

from bench.embeddings import table


def test_a_table_compares_each_engine_with_ours() -> None:
    vectors = [[0.5, 0.25]]
    ours = [{"seconds": seconds, "cpu_s": 3.0, "vectors": vectors} for seconds in (2.0, 1.0, 4.0)]
    theirs = [{"seconds": 3.0, "cpu_s": 4.5, "vectors": [[0.5, 0.75]]}]
    *_, first, second = table("float32", {"ours": ours, "openvino": theirs}, 256).splitlines()
    assert first == "| ours | 128 | 1.00 | 2.00 | 1.00 | 3.00 | 1.00 | 0.0e+00 |"
    assert second == "| openvino | 85 | 3.00 | 3.00 | 1.50 | 4.50 | 1.50 | 5.0e-01 |"
