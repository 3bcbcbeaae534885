"""Rules for the bounds of histograms."""

from __future__ import annotations

import pytest

from ops.machine import Machine
from runtime.config import Args, buckets
from runtime.config.buckets import token_bounds
from runtime.config.plan import ObservePlan
from runtime.config.resolve import ANY_MODEL, decide, resolve
from runtime.errors import ConfigurationError

CPU = Machine.named("cpu")


def plan(**options) -> ObservePlan:
    return resolve(Args.of(model_path="m", **options), CPU, ANY_MODEL).observe


def test_two_sided_exponential():
    assert token_bounds(["tse", "1000", "2", "8"]) == (984, 992, 996, 998, 1000, 1002, 1004, 1008, 1016)
    assert token_bounds(["tse", "10", "2", "8"]) == (0, 2, 6, 8, 10, 12, 14, 18, 26)
    assert token_bounds(["tse", "10", "3", "3"]) == (1, 7, 10, 13, 19)


def test_default_and_own_values():
    assert token_bounds(["default"]) == buckets.TOKENS
    assert token_bounds(["customer", "30", "10", "2.5"]) == (2.5, 10, 30)


@pytest.mark.parametrize(
    "rule",
    [
        "default 1",
        "tse",
        "tse 1000 2",
        "tse 1000 1 8",
        "tse 0 2 8",
        "tse 1000 2 0",
        "tse 1000 2 2.5",
        "tse 1000 2 100000",
        "tse 1e300 1e300 100",
        "tse a 2 8",
        "customer",
        "customer 1 1",
        "customer -1",
        "customer nan",
        "other 1",
    ],
)
def test_rule_that_means_nothing_is_refused_under_its_option(rule: str):
    with pytest.raises(ConfigurationError):
        token_bounds(rule.split())
    args = Args.of(model_path="m", prompt_tokens_buckets=rule.split())
    _, builder = decide(args, CPU, ANY_MODEL)
    assert list(builder.refusals) == ["prompt_tokens_buckets"]
    assert builder.refusals["prompt_tokens_buckets"].startswith("--prompt-tokens-buckets: ")


def test_bounds_reach_the_plan():
    made = plan(bucket_time_to_first_token=[2, 1, 1], bucket_e2e_request_latency=[3])
    assert (made.ttft_bounds, made.e2e_bounds) == ((1, 2), (3,))
    assert made.itl_bounds == buckets.INTER_TOKEN_LATENCY
    assert made.prompt_bounds == made.output_bounds == ()
    made = plan(collect_tokens_histogram=True, generation_tokens_buckets=["customer", "5"])
    assert (made.prompt_bounds, made.output_bounds) == (buckets.TOKENS, (5,))


def test_too_many_bounds_are_refused():
    with pytest.raises(ConfigurationError, match="at most 200 bounds"):
        plan(bucket_inter_token_latency=[float(number) for number in range(1, 300)])


@pytest.mark.parametrize("labels", [["le"], ["model_name"], ["a b"], ["__x"], ["a", "a"]])
def test_label_that_cannot_be_one_is_refused(labels: list[str]):
    with pytest.raises(ConfigurationError, match="is not a valid label"):
        plan(tokenizer_metrics_allowed_customer_labels=labels)


def test_header_that_cannot_be_one_is_refused():
    with pytest.raises(ConfigurationError, match="not a valid header name"):
        plan(tokenizer_metrics_custom_labels_header="a b")
