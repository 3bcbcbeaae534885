"""Write a checkpoint with rounded weights, in the format of compressed-tensors (round to nearest)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ops.matmul.grouped import round_to_float8, round_to_groups, smallest_scale
from runtime.errors import CheckpointError
from runtime.loading.checkpoint import DESCRIPTIONS, SAFETENSORS_INDEX, find_weights
from runtime.loading.facts import read_facts
from runtime.loading.tensors import TensorFiles

GROUP = 32
FILE_BYTES = 4 * 10**9  # size of an output file in bytes; memory use is about the same
# Routers, embeddings and LM heads stay unquantised.
MATRIX = re.compile(r".*\.(\w+_proj|fc1|fc2|w[123])\.weight")
IGNORE = ["lm_head", r"re:.*\.gate$", r"re:.*\.router$", r"re:.*embed.*"]

Rounded = dict[str, Tensor]


def _w4a16(weight: Tensor) -> Rounded:
    rounded = round_to_groups(weight, GROUP)
    words = torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.int64)
    for column in range(8):
        words |= rounded.codes[:, column::8].long() << (4 * column)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": packed, "weight_scale": rounded.scales.to(weight.dtype), "weight_shape": shape}


def _w8a8(weight: Tensor) -> Rounded:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    scale = scale.clamp_min(smallest_scale(weight.dtype)).to(weight.dtype)
    numbers = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": numbers, "weight_scale": scale}


def _fp8(weight: Tensor) -> Rounded:
    rounded = round_to_float8(weight)
    return {"weight": rounded.codes.view(torch.float8_e4m3fn), "weight_scale": rounded.scales.to(weight.dtype)}


def _scheme(form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> dict[str, Any]:
    base = {"symmetric": True, "dynamic": False}
    inputs = None if activations is None else {"symmetric": True, "dynamic": True, "strategy": "token", **activations}
    group = {"targets": ["Linear"], "weights": {**base, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": IGNORE,
    }


_INT8, _FLOAT8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
METHODS: Mapping[str, tuple[Callable[[Tensor], Rounded], dict[str, Any]]] = {
    "w4a16": (
        _w4a16,
        _scheme("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}, None),
    ),
    "w8a8": (_w8a8, _scheme("int-quantized", {**_INT8, "strategy": "channel"}, _INT8)),
    "fp8": (_fp8, _scheme("float-quantized", {**_FLOAT8, "strategy": "channel"}, _FLOAT8)),
}


def quantize_checkpoint(source: str, method: str, output: str) -> int:
    """Write the checkpoint in `source` to the new directory `output`, rounded by one of METHODS.

    Returns the size of the weights in bytes. Raises CheckpointError if `source` is not an unquantised checkpoint,
    `output` exists, or the length of a row is not a multiple of the group size.
    """
    facts, target = read_facts(source), Path(output)
    if facts.quantization is not None:
        raise CheckpointError(f"{source} is quantized already ({facts.quantization}).")
    if target.exists():
        raise CheckpointError(f"{output} exists already. Choose a new directory.")
    convert, settings = METHODS[method]
    tensors = TensorFiles(find_weights(Path(source)))
    matrices = {name for name, shape in tensors.shapes.items() if MATRIX.fullmatch(name) and len(shape) == 2}
    unfit = [name for name in matrices if method == "w4a16" and tensors.shapes[name][1] % GROUP]
    if not matrices or unfit:
        if unfit:
            reason = f"the rows of {unfit[0]} are not a multiple of {GROUP}"
        else:
            reason = "it has no linear layers"
        raise CheckpointError(f"{source} cannot be quantized to {method}: {reason}.")
    target.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    pending: Rounded = {}
    total = pending_bytes = 0
    for name in tensors.shapes:
        tensor = tensors.read(name)
        parts = {name: tensor.clone()}
        if name in matrices:
            layer = name.removesuffix(".weight")
            parts = {f"{layer}.{part}": each.contiguous() for part, each in convert(tensor).items()}
        pending |= parts
        size = sum(each.nbytes for each in parts.values())
        pending_bytes, total = pending_bytes + size, total + size
        if pending_bytes > FILE_BYTES:
            weight_map |= _save(target, pending, len(set(weight_map.values())))
            pending, pending_bytes = {}, 0
    weight_map |= _save(target, pending, len(set(weight_map.values())))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2))
    for pattern in DESCRIPTIONS:
        for file in Path(source).glob(pattern):
            if not file.name.endswith(".index.json") and file.name != "config.json":
                shutil.copy(file, target)
    config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": settings}, indent=2))
    return total


def _save(target: Path, tensors: Rounded, number: int) -> dict[str, str]:
    name = f"model-{number + 1:05d}.safetensors"
    if tensors:
        save_file(tensors, target / name, metadata={"format": "pt"})
    return dict.fromkeys(tensors, name)
