"""`just fuzz` and `just slow-clients` in their short forms."""

from __future__ import annotations

import random

import pytest

from bench import fuzz, slow_clients
from serve.server.app import ROUTES


def test_hostile_requests_are_made_anew_from_their_seed_and_reach_every_route() -> None:
    made = [fuzz.hostile(random.Random(seed))[0] for seed in range(1500)]
    assert made == [fuzz.hostile(random.Random(seed))[0] for seed in range(1500)]
    assert len(set(made)) > 1400
    for spec in ROUTES:
        path = spec.path.replace("{response_id}", "resp_1").replace("{model:path}", "x/y")
        assert any(f" {path} ".encode() in raw for raw in made), path


def test_hostile_requests_harm_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--requests", "120"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "neighbours changed 0 of" in said
    assert "neighbours changed 0 of 0" not in said
    assert "200: " in said
    assert "400: " in said


@pytest.mark.slow
def test_slow_clients_are_connected_and_healthy_ones_are_served(capsys: pytest.CaptureFixture[str]) -> None:
    slow_clients.main(["--clients", "20", "--seconds", "1", "--rounds", "1"])
    said = capsys.readouterr().out
    assert "R10 40 slow clients" in said
    assert "nan" not in said
    assert "prompts: p99" in said
    assert "answered [400]" in said
