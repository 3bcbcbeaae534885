"""AMD Quark's checkpoints: the tensors that `scaled` reads, and packed weights of 4 and 6 bits.

    weight uint8 [O, I / 2] or [O, 3 I / 4]   e2m1 or e2m3, weight_scale uint8 [O, I / 32] with exponents
    weight int32 [I, O / 8]                   integers in AWQ's order (`pack_method` reorder) or in order
    weight_scale float [G, O], weight_zero_point int32 [G, O / 8] packed like the weight, or floats [G, O]

Source: `quark/torch/utils/pack.py` of amd-quark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.loading.formats import scaled
from runtime.loading.formats.awq import Parts, add, in_awq_order
from runtime.loading.formats.bits import unpack
from runtime.loading.formats.stored import Derived, Read, Stored, require

DTYPES = ("fp4", "fp6_e2m3", "fp8_e4m3", "int4", "int8", "uint4")
ADVICE = "Export the model in one of the schemes fp8, ptpc_fp8, int8, int4, uint4, mxfp4 or mxfp6_e2m3."


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    dtypes = set(_dtypes(fields))
    derived = scaled.derive(stored, fields)
    export = fields.values.get("export")
    reorder = not isinstance(export, Mapping) or export.get("pack_method", "reorder") == "reorder"
    for name, dtype in stored.dtypes.items():
        if dtype == torch.uint8 and f"{name}_scale" in stored.shapes:
            scaled.add_floats(derived, stored, name, name, scaled.Schemes())
        elif dtype == torch.int32 and f"{name}_scale" in stored.shapes:
            if dtypes >= {"int4", "uint4"}:
                raise CheckpointError(f"{fields.path[:-1]} has layers in int4 and in uint4. {ADVICE}")
            _add_integers(derived, stored, name, signed="int4" in dtypes, reorder=reorder)
    return derived


def _dtypes(fields: Fields) -> Iterator[str]:
    """Yield the weight dtype of every kind of layer. Raises CheckpointError for unsupported dtypes."""
    values = fields.values
    export = values.get("export")
    if isinstance(export, Mapping) and export.get("weight_format", "real_quantized") != "real_quantized":
        raise CheckpointError(f"{fields.path}export.weight_format must be real_quantized.")
    if values.get("quant_mode", "eager_mode") != "eager_mode":
        raise fields.wrong("quant_mode", "eager_mode")
    settings: list[Any] = [values.get("global_quant_config")]
    for part in ("layer_quant_config", "layer_type_quant_config"):
        more = values.get(part)
        settings += more.values() if isinstance(more, Mapping) else ()
    for setting in settings:
        weight = setting.get("weight") if isinstance(setting, Mapping) else None
        if weight is None:
            continue
        dtype = weight.get("dtype") if isinstance(weight, Mapping) else None
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{fields.path[:-1]} has weights of {dtype or 'two stages'}, which is not supported. {ADVICE}"
            )
        yield dtype


def _add_integers(derived: Derived, stored: Stored, name: str, *, signed: bool, reorder: bool) -> None:
    scale, zero = f"{name}_scale", f"{name}_zero_point"
    require(stored, zero)
    words, grid = stored.shapes[name], stored.shapes[scale]
    if len(words) != 2 or len(grid) != 2 or words[1] != -(-grid[1] // 8) or not grid[0] or words[0] % grid[0]:
        raise CheckpointError(f"{name} and {scale} do not match.")
    in_size, (groups, out_size) = words[0], grid
    if stored.shapes[zero] != (grid if stored.dtypes[zero].is_floating_point else (groups, words[1])):
        raise CheckpointError(f"{zero} and {scale} do not match.")

    def codes(words: Tensor) -> Tensor:
        """Unpack words to codes [n, O]. Codes of signed numbers are offset by 8."""
        numbers = unpack(words, 4, 8 * words.shape[1])
        numbers = (in_awq_order(numbers) if reorder else numbers)[:, :out_size]
        return numbers ^ 8 if signed else numbers

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
