"""AMD Quark's checkpoints: what `scaled` reads, and weights of 4 and 6 bits under the name of the weight itself.

    weight uint8 [O, I / 2] or [O, 3 I / 4]   e2m1 or e2m3, weight_scale uint8 [O, I / 32] with exponents
    weight int32 [I, O / 8]                   whole numbers in AWQ's order (`pack_method` reorder) or their own
    weight_scale float [G, O], weight_zero_point int32 [G, O / 8] likewise, or floats [G, O]

Source: `quark/torch/utils/pack.py` of amd-quark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.models.formats import scaled
from runtime.models.formats.awq import Parts, add, in_awq_order
from runtime.models.formats.bits import unpack
from runtime.models.formats.stored import Derived, Read, Stored, require

DTYPES = ("fp4", "fp6_e2m3", "fp8_e4m3", "int4", "int8", "uint4")
ADVICE = "export the model in one of the schemes fp8, ptpc_fp8, int8, int4, uint4, mxfp4 or mxfp6_e2m3."


def derive(stored: Stored, fields: Fields) -> Derived:
    """See `runtime.models.formats`."""
    dtypes = set(_dtypes(fields))
    derived = scaled.derive(stored, fields)
    export = fields.values.get("export")
    reorder = not isinstance(export, Mapping) or export.get("pack_method", "reorder") == "reorder"
    for name, dtype in stored.dtypes.items():
        if dtype == torch.uint8 and f"{name}_scale" in stored.shapes:
            scaled.add_floats(derived, stored, name, name, scaled.Schemes())
        elif dtype == torch.int32 and f"{name}_scale" in stored.shapes:
            if dtypes >= {"int4", "uint4"}:
                raise CheckpointError(f"{fields.path[:-1]} has layers in int4 and in uint4: {ADVICE}")
            _add_whole_numbers(derived, stored, name, signed="int4" in dtypes, reorder=reorder)
    return derived


def _dtypes(fields: Fields) -> Iterator[str]:
    """Of the weights of every kind of layer. Raises CheckpointError for those that are not read."""
    values = fields.values
    export = values.get("export")
    if isinstance(export, Mapping) and export.get("weight_format", "real_quantized") != "real_quantized":
        raise CheckpointError(f"{fields.path}export.weight_format must be real_quantized.")
    if values.get("quant_mode", "eager_mode") != "eager_mode":
        raise fields.wrong("quant_mode", "eager_mode")
    settings: list[Any] = [values.get("global_quant_config")]
    for of in ("layer_quant_config", "layer_type_quant_config"):
        more = values.get(of)
        settings += more.values() if isinstance(more, Mapping) else ()
    for setting in settings:
        weight = setting.get("weight") if isinstance(setting, Mapping) else None
        if weight is None:
            continue
        dtype = weight.get("dtype") if isinstance(weight, Mapping) else None
        if dtype not in DTYPES:
            raise CheckpointError(f"{fields.path[:-1]} has weights of {dtype or 'two stages'}: {ADVICE}")
        yield dtype


def _add_whole_numbers(derived: Derived, stored: Stored, name: str, *, signed: bool, reorder: bool) -> None:
    scale, zero = f"{name}_scale", f"{name}_zero_point"
    require(stored, zero)
    words, grid = stored.shapes[name], stored.shapes[scale]
    if len(words) != 2 or len(grid) != 2 or words[1] != -(-grid[1] // 8) or not grid[0] or words[0] % grid[0]:
        raise CheckpointError(f"{name} and {scale} do not fit each other.")
    in_size, (groups, out_size) = words[0], grid
    if stored.shapes[zero] != (grid if stored.dtypes[zero].is_floating_point else (groups, words[1])):
        raise CheckpointError(f"{zero} and {scale} do not fit each other.")

    def codes(words: Tensor) -> Tensor:
        """[n, O], the middle of their range at 8."""
        found = unpack(words, 4, 8 * words.shape[1])
        found = (in_awq_order(found) if reorder else found)[:, :out_size]
        return found ^ 8 if signed else found

    def zeros(read: Read) -> Tensor:
        stated = read(zero)
        if stated.is_floating_point():
            return stated.float() + (8 if signed else 0)
        return codes(stated).float()

    parts = Parts(
        out_size,
        in_size,
        groups,
        lambda read: codes(read(name)).T,
        lambda read: read(scale).float().T,
        lambda read: zeros(read).T,
    )
    add(derived, name, [name, scale, zero], parts, bits=4)
