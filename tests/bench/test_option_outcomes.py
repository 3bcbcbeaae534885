"""The outcomes in docs/arguments.md: what they say is what a start would do."""

from __future__ import annotations

import pytest

from bench.option_outcomes import counts, machines, outcome, refusals
from runtime.config import Args, Option, Outcome, options
from runtime.config.resolve import ANY_MODEL, decide
from surface_flags import FLAGS

BY_FLAG = {flag: option for option in options() for flag in option.flags}


def test_every_argument_of_the_surface_has_an_outcome() -> None:
    kinds = {"works", "refused", "always so", "no effect"}
    for flag in FLAGS:
        found = outcome(BY_FLAG[flag])
        assert found in kinds or found.startswith(("works; not ", "works on ")), flag
    assert sum(counts().values()) == len(options())


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--page-size", "works"),
        ("--cuda-graph-bs", "works on H100 and B200; not CPU"),
        ("--nccl-port", "works"),
        ("--enable-lmcache", "refused"),
        ("--enable-deepep-moe", "refused"),
        ("--enable-flashinfer-mla", "works on H100 and B200; not CPU"),
        ("--sleep-on-idle", "always so"),
        ("--return-token-ids", "no effect"),
        ("--sampling-backend", "works; not CPU: triton"),
    ],
)
def test_outcome_is_what_that_machine_allows(flag: str, expected: str) -> None:
    assert outcome(BY_FLAG[flag]) == expected


def test_attention_backends_need_their_gpus() -> None:
    option = BY_FLAG["--attention-backend"]
    refused = {title: bool(refusals(option, "fa3", machine)) for title, machine in machines().items()}
    assert refused == {"CPU": True, "H100": False, "B200": True}


@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_default_is_never_refused_when_it_is_said(option: Option, machine: str) -> None:
    if option.default is None or option.name == "config":
        return
    args = Args.of(model_path="some/model", **{option.name: option.default})
    _, builder = decide(args, machines()[machine], ANY_MODEL)
    assert builder.refusals == {}


def test_what_is_refused_everywhere_is_marked() -> None:
    """An option that is said to work is refused on no machine with every value, unless the table says so."""
    for option in options():
        if option.spec.outcome is Outcome.WORKS:
            assert not outcome(option).startswith("works on ;"), option.flag
