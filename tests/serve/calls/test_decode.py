"""Decoding of bodies from their declarations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.sampling_params import APIS, NOT_BUILT, Api, parameters
from serve.calls.chat_completions.schema import ChatBody, CompletionBody
from serve.calls.decode import MAX_DEPTH, Length, NotBuilt, Range, decode
from serve.calls.generate.schema import GenerateBody
from serve.calls.sampling import read_sampling, sampling_params
from serve.native.tokens import DetokenizeBody, TokenizeBody, TokenizeChatBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    name: str
    weights: dict[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    prompt: str | list[str] | list[int]
    count: Annotated[int, Range(1, 5)] = 1
    ratio: float = 0.5
    limit: int | None = 16
    flag: bool = False
    mode: Literal["fast", "slow"] = "fast"
    inner: Inner | None = None
    inners: list[Inner] | None = None
    tags: Annotated[list[str], Length(1, 2)] | None = None
    anything: Any = None
    later: NotBuilt = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    closed: ClassVar[bool] = True
    temperature: float = 1.0


def refusal(value: Any, cls: type = Body) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        decode(cls, value)
    return caught.value.param, caught.value.message


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        ([], None, "The body must be an object, not a list."),
        ({}, "prompt", "prompt is required."),
        ({"prompt": None}, "prompt", "prompt is required."),
        ({"prompt": 3}, "prompt", "prompt must be a string or a list, not an integer."),
        ({"prompt": ["a", 3]}, "prompt.1", "prompt.1 must be a string, not an integer."),
        ({"prompt": "", "count": "3"}, "count", "count must be an integer, not a string."),
        ({"prompt": "", "count": True}, "count", "count must be an integer, not true."),
        ({"prompt": "", "count": 1.5}, "count", "count must be an integer, not a number."),
        ({"prompt": "", "count": 6}, "count", "count must be in [1, 5]."),
        ({"prompt": "", "count": 1e300}, "count", "count is too large."),
        ({"prompt": "", "ratio": 10**30}, "ratio", "ratio is too large."),
        ({"prompt": "", "ratio": float("nan")}, "ratio", "ratio must be a number, not nan."),
        ({"prompt": "", "ratio": False}, "ratio", "ratio must be a number, not false."),
        ({"prompt": "", "flag": 1}, "flag", "flag must be true or false, not an integer."),
        ({"prompt": "", "mode": "odd"}, "mode", 'mode must be "fast" or "slow".'),
        ({"prompt": "", "mode": ["fast"]}, "mode", 'mode must be "fast" or "slow".'),
        ({"prompt": "", "inner": {}}, "inner.name", "inner.name is required."),
        (
            {"prompt": "", "inners": [{"name": "a"}, {"name": "b", "weights": {"x": "y"}}]},
            "inners.1.weights.x",
            "inners.1.weights.x must be a number, not a string.",
        ),
        ({"prompt": "", "tags": []}, "tags", "tags must not be empty."),
        ({"prompt": "", "tags": ["a", "b", "c"]}, "tags", "tags must have 1 to 2 items, not 3."),
        ({"prompt": "", "later": {"a": 1}}, "later", "later is not supported yet; leave it out."),
    ],
)
def test_refusal_names_the_culprit(value: Any, param: str | None, words: str) -> None:
    assert refusal(value) == (param, words)


def test_path_stands_before_the_culprit() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(Body, {"prompt": [1, "a"]}, "outer.0")
    assert caught.value.param == "outer.0.prompt.1"


def test_null_takes_the_default_unless_it_is_a_value_of_its_own() -> None:
    body = decode(Body, {"prompt": "a", "count": None, "flag": None, "limit": None, "mode": None})
    assert (body.count, body.flag, body.limit, body.mode) == (1, False, None, "fast")


def test_whole_numbers_may_carry_a_point() -> None:
    body = decode(Body, {"prompt": [1, 2.0], "count": 3.0, "ratio": 1})
    assert body.prompt == [1, 2]
    assert (type(body.count), type(body.ratio)) == (int, float)


def test_unknown_keys_are_ignored_where_the_body_is_open() -> None:
    assert decode(Body, {"prompt": "a", "other": {"deep": []}}).prompt == "a"


def test_unknown_keys_are_refused_with_a_hint_where_it_is_closed() -> None:
    assert refusal({"temperatur": 1}, Closed)[1] == "temperatur is not known; did you mean temperature?"
    assert refusal({"zzz": 1}, Closed) == ("zzz", "zzz is not known.")


@pytest.mark.parametrize("nothing", [None, False, "", [], {}, [None, None]])
def test_what_is_not_built_may_be_said_to_be_nothing(nothing: Any) -> None:
    assert decode(Body, {"prompt": "a", "later": nothing}).later is None


@pytest.mark.parametrize("something", [0, True, "x", [0], [None, "a"], {"a": None}])
def test_what_is_not_built_is_refused(something: Any) -> None:
    assert refusal({"prompt": "a", "later": something})[0] == "later"


def test_deep_values_are_refused() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH - 1):
        value = [{"a": value}]
    assert refusal({"prompt": "a", "anything": value})[0] == "anything"
    assert decode(Body, {"prompt": "a", "anything": {"a": [{"b": 1}]}}).anything == {"a": [{"b": 1}]}


def test_annotations_that_json_cannot_fill_are_a_mistake_of_ours() -> None:
    @dataclass
    class Odd:
        items: set[int]

    Odd.__annotations__["items"] = set[int]
    with pytest.raises(TypeError, match="cannot be decoded"):
        decode(Odd, {"items": []})


BODIES = [
    ChatBody,
    CompletionBody,
    GenerateBody,
    TokenizeBody,
    TokenizeChatBody,
    DetokenizeBody,
]
SAMPLING_KEYS = sorted({name for api in APIS for p in parameters() for name in p.names_in(api)} | {*NOT_BUILT})
KEYS = sorted({name for body in BODIES for name in body.__dataclass_fields__} | {*SAMPLING_KEYS})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS, "role", "content", "type", "text", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.sampled_from(BODIES), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6) | VALUES)
def test_any_json_is_decoded_or_refused(body: type, value: Any) -> None:
    try:
        assert isinstance(decode(body, value), body)
    except InvalidRequest as refused:
        assert refused.message.endswith((".", "?"))


@given(st.sampled_from(list(APIS)), st.dictionaries(st.sampled_from(SAMPLING_KEYS), VALUES, max_size=5))
def test_any_sampling_object_is_understood_or_refused_below_its_path(api: Api, value: dict[str, Any]) -> None:
    try:
        asked = read_sampling(api, value, "sampling_params")
        sampling_params(api, asked, {}, path="sampling_params")
    except InvalidRequest as refused:
        assert (refused.param or "").startswith("sampling_params.")
