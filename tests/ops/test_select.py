from __future__ import annotations

from dataclasses import fields

import pytest

from ops.attention import native
from ops.select import OPERATIONS, Kernels, select


def test_native_is_chosen_where_nothing_is_said() -> None:
    assert select().attend is native.attend
    assert select({"attention": "native"}).attend is native.attend


def test_every_kernel_comes_from_one_operation() -> None:
    provided = [name for names, _ in OPERATIONS.values() for name in names]
    assert sorted(provided) == sorted(field.name for field in fields(Kernels))


@pytest.mark.parametrize("choices", [{"attention": "magic"}, {"teleport": "native"}])
def test_what_does_not_exist_is_refused_by_name(choices) -> None:
    with pytest.raises(ValueError, match="magic|teleport"):
        select(choices)
