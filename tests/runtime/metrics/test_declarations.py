"""Every metric is declared once, and every name of the original is served or absent for a reason."""

from __future__ import annotations

import importlib
import re

import pytest

import surface_metrics
from runtime.metrics.declarations import ABSENT, BY_NAME, METRICS, Metric


def test_every_name_of_the_original_is_served_or_absent_for_a_reason() -> None:
    assert len(surface_metrics.KINDS) == 55
    assert set(surface_metrics.KINDS) - set(BY_NAME) == set(ABSENT)
    assert not set(ABSENT) & set(BY_NAME)
    assert all(reason and not reason.endswith(".") for reason in ABSENT.values())


def test_what_is_served_is_of_the_kind_of_the_original() -> None:
    kinds = {name: BY_NAME[name].kind for name in surface_metrics.KINDS if name in BY_NAME}
    assert kinds == {name: surface_metrics.KINDS[name] for name in kinds}


def test_names_are_ours_or_the_original_s_and_unique() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"(sglang|penstock):[a-z0-9_]+", metric.name), metric.name
        assert metric.kind != "counter" or not metric.name.endswith("_total"), metric.name
        assert metric.help[0].isupper(), metric.name
        assert metric.help.endswith("."), metric.name


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_where_it_is_observed_exists(metric: Metric) -> None:
    for place in metric.observed.split(", "):
        parts = place.split(".")
        split = next(at for at, part in enumerate([*parts, "A"]) if part[0].isupper() or part == "watch_loop")
        prefix = "" if parts[0] == "serve" else "runtime."
        found = importlib.import_module(prefix + ".".join(parts[:split]))
        for part in parts[split:]:
            found = getattr(found, part)
