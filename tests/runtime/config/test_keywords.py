"""Options from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.config import Args
from runtime.errors import ConfigurationError


def refusals(**keywords: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        Args.of(**keywords)
    return list(caught.value.refusals)


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"page_sze": 16}, "page_sze is not an option; did you mean page_size?"),
        ({"page_size": "16"}, "--page-size must be a whole number, not '16'."),
        ({"page_size": True}, "--page-size must be a whole number, not true."),
        ({"page_size": 1.0}, "--page-size must be a whole number, not 1.0."),
        ({"port": None}, "--port must be a whole number, not None."),
        ({"disable_radix_cache": 1}, "--disable-radix-cache must be true or false, not 1."),
        ({"model_path": 3}, "--model-path must be text, not 3."),
        ({"lora_paths": "a"}, "--lora-paths must be a list, each text, not 'a'."),
        ({"cuda_graph_bs": []}, "--cuda-graph-bs needs at least one value."),
        ({"json_model_override_args": 3}, "--json-model-override-args must be a JSON object, not 3."),
        ({"tp_size": 1, "tensor_parallel_size": 1}, "tp_size and tensor_parallel_size are the same option"),
    ],
)
def test_mistake_is_explained(keywords: dict[str, Any], sentence: str) -> None:
    assert refusals(**keywords)[0].startswith(sentence)


def test_all_mistakes_are_said_at_once() -> None:
    assert len(refusals(page_sze=1, port="x", dtype="int3")) == 3


def test_paths_mappings_and_whole_numbers_are_taken() -> None:
    args = Args.of(model=Path("m"), json_model_override_args='{"a": 1}', watchdog_timeout=3, lora_paths=[{"x": 1}])
    assert args.model.model_path == "m"
    assert args.model.json_model_override_args == {"a": 1}
    assert args.schedule.watchdog_timeout == 3.0
    assert args.lora.lora_paths == ('{"x": 1}',)


def test_none_is_said_where_it_is_allowed() -> None:
    args = Args.of(page_size=None)
    assert args.cache.page_size is None
    assert args.explicitly_set == {"page_size"}
