from __future__ import annotations

from runtime.modeling.entry import Entry
from runtime.modeling.spellings import FULL, LINEAR


def test_only_a_family_with_linear_layers_is_recurrent() -> None:
    assert Entry("own", layer_types=(LINEAR, FULL)).recurrent
    assert not Entry("own", layer_types=("chunked_attention", FULL)).recurrent
    assert not Entry("own").recurrent
