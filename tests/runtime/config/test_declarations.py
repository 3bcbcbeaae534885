"""Properties of all options: names, help, round trips and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from option_values import other_value
from runtime.config import Args, Json, Option, Outcome, not_built, options, without_effect
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError
from surface_flags import FLAGS

SNAPSHOT = Path(__file__).with_name("command_line.txt")


def each_option(where: Callable[[Option], bool]) -> pytest.MarkDecorator:
    """Return a test case for each option for which `where` is true."""
    chosen = [option for option in options() if where(option)]
    return pytest.mark.parametrize("option", chosen, ids=lambda option: option.name)


def words(option: Option, value: Any) -> list[str]:
    """Return the value as words of a command line."""
    if value is False and option.negated_flag:
        return [option.negated_flag]
    if isinstance(value, bool):
        return [option.flag]
    if option.many:
        return [option.flag, *map(str, value)]
    return [option.flag, json.dumps(value) if option.type is Json else str(value)]


def no_file(option: Option) -> bool:
    return option.name != "config"  # its value is a file that must exist


@each_option(no_file)
def test_command_line_and_keywords_say_the_same(option: Option) -> None:
    value = other_value(option)
    parsed = Args.parse(words(option, value))
    assert parsed.get(option.name) == value
    assert parsed.explicitly_set == {option.name} | {name for name, _ in [option.spec.means or (option.name, None)]}
    assert Args.of(**parsed.keywords()) == parsed == Args.of(**{option.name: value})


@each_option(lambda option: len(option.keywords) > 1 and no_file(option))
def test_every_python_name_of_an_option_means_the_same(option: Option) -> None:
    value = other_value(option)
    assert len({repr(Args.of(**{keyword: value})) for keyword in option.keywords}) == 1


def test_every_flag_of_the_surface_is_known() -> None:
    assert set(FLAGS) - {flag for option in options() for flag in option.flags} == set()


def test_nothing_is_built_that_was_not_asked_for() -> None:
    assert not_built(Args.of()) == {}
    assert without_effect(Args.of()) == {}


@each_option(lambda option: option.spec.outcome is Outcome.REFUSED)
def test_option_that_never_works_is_refused_by_its_name(option: Option) -> None:
    value = other_value(option)
    refusals = not_built(Args.of(**{option.name: value}))
    if value in (option.spec.built or ()):
        assert refusals == {}
    else:
        assert refusals.keys() == {option.name}
        assert refusals[option.name].startswith(option.flag)
        assert f"is refused: {option.spec.reason}" in refusals[option.name]


@each_option(lambda option: option.spec.outcome is Outcome.RENAMED)
def test_an_old_spelling_is_its_successor(option: Option) -> None:
    assert option.spec.means is not None
    name, value = option.spec.means
    old, new = Args.of(**{option.name: True}), Args.of(**{name: value})
    assert old.get(name) == value
    assert not_built(old) == not_built(new)
    assert Args.of(**{option.name: False}).get(name) == Args.of().get(name)
    assert Args.of(**{option.name: True, name: value}) == old
    other = next(each for each in next(o for o in options() if o.name == name).spec.choices if each != value)
    with pytest.raises(ConfigurationError, match=f"{option.flag} is an old spelling of .*; give one of them"):
        Args.of(**{option.name: True, name: other})


@each_option(lambda option: option.spec.built is not None and option.spec.outcome is Outcome.WORKS)
def test_value_that_is_not_built_is_refused(option: Option) -> None:
    known = option.spec.choices or (other_value(option),)
    for value in known:
        works = value == option.default or value in (option.spec.built or ())
        refusals = not_built(Args.of(**{option.name: value}))
        assert refusals.keys() == (set() if works else {option.name})


@each_option(no_file)
def test_inert_option_is_accepted_and_says_why_it_does_nothing(option: Option) -> None:
    args = Args.of(**{option.name: other_value(option)})
    said = without_effect(args).get(option.name, "")
    assert bool(said) == (option.spec.outcome is Outcome.INERT)
    if said:
        assert option.spec.reason in said
        assert not_built(args) == {}


def test_help_is_made_of_sentences() -> None:
    for option in options():
        text = option.spec.help
        assert text[0].isupper() or text.startswith(("auto", "host:port")), option.name
        assert text.endswith("."), option.name
        assert "  " not in text, option.name


def test_defaults_are_allowed_by_their_declarations() -> None:
    for option in options():
        if option.default is None:
            assert option.optional, option.name
        elif option.name != "config":
            assert Args.of(**{option.name: option.default}).get(option.name) == option.default


def test_what_shows_an_option_is_a_field_of_the_plan() -> None:
    sections = get_type_hints(Plan)
    shown_by = {option.name: option.spec.plan for option in options() if option.spec.plan}
    assert len(shown_by) > 100
    for name, path in shown_by.items():
        section, _, field = path.partition(".")
        assert field in {each.name for each in fields(sections[section])} - {"reasons"}, name


def test_command_line_is_as_frozen() -> None:
    lines = [f"{' '.join(option.flags)} = {option.default!r} ({option.spec.outcome})" for option in options()]
    frozen = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    assert lines == frozen, f"if this is meant, write the new lines to {SNAPSHOT.name}"


def test_declared_twice_is_an_error() -> None:
    from runtime.config.option_table import Options

    table = Options(Args)
    with pytest.raises(TypeError, match="--port is declared twice"):
        table._add(table["port"])


def test_args_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Args.of().cache.page_size = 3  # type: ignore[misc]


def test_unknown_name_is_an_error_in_get() -> None:
    with pytest.raises(KeyError):
        Args.of().get("temperature")


def test_secret_is_in_no_representation() -> None:
    args = Args.of(api_key="hush-hush")
    assert args.get("api_key") == "hush-hush"
    assert "hush" not in repr(args)
    with pytest.raises(ConfigurationError) as caught:
        Args.of(api_key=["hush-hush"])
    assert "hush" not in str(caught.value)


def test_keyword_of_another_server_is_answered_with_ours() -> None:
    for keyword, ours in (("gpu_memory_utilization", "mem_fraction_static"), ("max_model_len", "context_length")):
        with pytest.raises(ConfigurationError, match=f"{keyword} is not an option; use {ours}"):
            Args.of(**{keyword: 1})
