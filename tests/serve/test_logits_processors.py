"""--logits-processors: functions of this machine, named by requests, change the logits before each token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigurationError
from serve import Engine, InvalidRequest

PARAMS: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
CODE = """
def force(logits, output_ids, params):
    kept = logits[params["ids"][len(output_ids)]].clone()
    logits.fill_(-float("inf"))
    logits[params["ids"][len(output_ids)]] = kept

def broken(logits, output_ids, params):
    raise RuntimeError("broken")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_processors.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_processors"


async def test_a_named_function_decides_beside_other_requests(module: str) -> None:
    ids = [7, 8, 9, 10, 11, 12, 13, 14]

    def forced(**more: Any) -> Mapping[str, Any]:
        return {**PARAMS, "custom_logit_processor": "steer", "custom_params": {"ids": ids}, **more}

    async with Engine(logits_processors=[f"steer={module}.force", f"{module}.broken"]) as engine:
        plain = await engine.generate("Hello", PARAMS)
        steered, beside, drawn = await engine.generate(["Hello"] * 3, [forced(), PARAMS, forced(temperature=1)])
        assert steered["output_ids"] == drawn["output_ids"] == ids
        assert beside["output_ids"] == plain["output_ids"]
        field = await engine.generate(
            "Hello", {**PARAMS, "custom_params": {"ids": ids}}, custom_logit_processor="steer"
        )
        assert field["output_ids"] == ids
        both = await engine.generate("Hello", forced(dry_multiplier=1, allowed_token_ids=ids))
        assert both["output_ids"] == ids
        failed, beside = await engine.generate(["Hello"] * 2, [{**PARAMS, "custom_logit_processor": "broken"}, PARAMS])
        assert failed["meta_info"]["finish_reason"]["type"] == "abort"
        assert beside["output_ids"] == plain["output_ids"]
        for params, named in (
            ({"custom_logit_processor": "def f(): ..."}, "custom_logit_processor"),
            ({"custom_params": {"a": 1}}, "custom_params"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await engine.generate("Hello", {**PARAMS, **params})
            assert (refused.value.param or "").endswith(named)


@pytest.mark.parametrize("path", ["no_such_module.f", "my_processors.none", "f", "my_processors.CODE"])
async def test_a_path_that_names_no_function_is_refused(module: str, path: str) -> None:
    with pytest.raises(ConfigurationError, match="--logits-processors"):
        async with Engine(logits_processors=[path]):
            pass
