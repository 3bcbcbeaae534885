from __future__ import annotations

import json

from runtime.request import Logprobs
from runtime.text.logprobs import with_texts

LOGPROBS = Logprobs([(None, 1), (-0.5, 2)], [None, [(-0.5, 2), (-1.0, 3)]], [])


def test_every_pair_gets_its_text():
    found = with_texts(LOGPROBS, lambda token_id: f"t{token_id}")
    assert found.chosen == [(None, 1, "t1"), (-0.5, 2, "t2")]
    assert found.top == [None, [(-0.5, 2, "t2"), (-1.0, 3, "t3")]]
    assert found.picked == []


def test_without_texts_the_third_element_is_null():
    assert json.dumps(with_texts(LOGPROBS, None).chosen) == "[[null, 1, null], [-0.5, 2, null]]"
