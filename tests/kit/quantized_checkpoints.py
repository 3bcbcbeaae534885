"""Quantised checkpoints, each written by its format's library, and the values that the library dequantises.

The tools of GPTQ and AWQ need a GPU, so their formats are packed here value by value, by their published layouts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_checkpoints
from ops.matmul.grouped import E2M1

Tensors = dict[str, Tensor]
MATRIX = re.compile(r".*\.(\w+_proj)\.weight")
# Range of all NVFP4 weights with rounded inputs, and their common scale. Tools give fused weights the same scale.
SHARED_RANGE, SHARED_SCALE = (torch.tensor(-0.5), torch.tensor(0.5)), 2e-4
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
MOE_SHAPE = {**SHAPE, "moe_intermediate_size": 64}


def write(directory: Path, form: str, family: str = "llama", **options: Any) -> tuple[str, str]:
    """Write a quantised checkpoint, and an ordinary checkpoint with the values that its library reads. Return both
    paths.
    """
    source = tiny_checkpoints.cached(family, **(MOE_SHAPE if "moe" in family else SHAPE))
    return convert(Path(source), directory, form, **options)


def write_mxfp4(source: Path, target: Path) -> None:
    """Write MXFP4 like published gpt-oss checkpoints; transformers needs a GPU for it."""
    stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        groups = tensor.transpose(1, 2).unflatten(2, (-1, 32))  # [X, O, G, 32]
        exponents = groups.abs().amax(-1).log2().floor() - 2
        numbers = groups / 2.0 ** exponents.unsqueeze(-1)
        codes = (numbers.unsqueeze(-1) - torch.tensor(E2M1)).abs().argmin(-1).to(torch.uint8)
        stored[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    config = json.loads((source / "config.json").read_text())
    ours = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": ours}))
    save_file(stored, target / "model.safetensors", {"format": "pt"})


def convert(source: Path, directory: Path, form: str, **options: Any) -> tuple[str, str]:
    """Like `write`, for a given checkpoint in one file."""
    quantize, settings = FORMS[form](**options)
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if MATRIX.fullmatch(name) is None:
            stored[name] = plain[name] = tensor
        else:
            parts, plain[name] = quantize(tensor.float())
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.{part}": each.contiguous() for part, each in parts.items()}
    for name, tensors, extra in (
        ("quantized", stored, {"quantization_config": settings}),
        ("plain", plain, {}),
    ):
        made = directory / name
        made.mkdir(parents=True)
        for file in source.glob("*.json"):
            shutil.copy(file, made)
        config = json.loads((source / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(config | extra))
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, made / "model.safetensors")
    return str(directory / "quantized"), str(directory / "plain")


Quantize = Callable[[Tensor], tuple[Tensors, Tensor]]


def compressed_tensors(preset: str, *, symmetric: bool = True, g_idx: bool = False) -> tuple[Quantize, dict]:
    """Use one of the library's preset schemes, for example W4A16, with groups of 32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme(preset, ["Linear"])
    args: Any = scheme.weights
    args.symmetric = symmetric
    if args.group_size == 128:
        args.group_size = 32
    form = infer_module_format(torch.nn.Linear, scheme)
    scheme.format = form
    compressor: Any = BaseCompressor.get_value_from_registry(getattr(form, "value", form))

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        low, high = ranges(weight, args)
        extra = {}
        if str(args.strategy).endswith("tensor_group"):
            from compressed_tensors.quantization.utils import generate_gparam

            low_end, high_end = (weight.min(), weight.max()) if scheme.input_activations is None else SHARED_RANGE
            extra = {"weight_global_scale": generate_gparam(low_end, high_end)}
        scale, zero = calculate_qparams(
            low, high, args, **({"global_scale": extra["weight_global_scale"]} if extra else {})
        )
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero, **extra}
        stored = dict(compressor.compress(state, scheme))
        if extra and scheme.input_activations is not None:
            stored["input_global_scale"] = 1 / input_scale(weight).reshape(1)
        plain = compressor.decompress(dict(stored), scheme)["weight"].float()
        if not g_idx or "weight_packed" not in stored:
            return stored, plain
        # As if columns were sorted by activation: column i has the scale of group order[i].
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(7)) // args.group_size
        numbers = compressor.decompress({**stored, "weight_scale": torch.ones_like(scale)}, scheme)["weight"].float()
        return {**stored, "weight_g_idx": order.int()}, numbers * scale.float()[:, order]

    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=getattr(form, "value", form),
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    return quantize, config.to_dict()


def input_scale(weight: Tensor) -> Tensor:
    """Return a scale of a weight's inputs, as calibration data would give. Each weight has a different scale."""
    return 2e-3 + 1e-2 * weight[0, 0].abs()


def ranges(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "block":
        rows, columns = args.block_structure
        parts = [each.split(columns, 1) for each in weight.split(rows)]
        low, high = (
            torch.stack([torch.stack([bound(part) for part in row]) for row in parts])
            for bound in (torch.min, torch.max)
        )
        return low, high
    groups = weight.unflatten(1, (-1, args.group_size if "group" in strategy else weight.shape[1]))
    return groups.amin(-1), groups.amax(-1)


def bitsandbytes(kind: str, *, nested: bool = False) -> tuple[Quantize, dict]:
    """Use the library for nf4, fp4 or int8."""
    import bitsandbytes.functional as bnb

    def four(weight: Tensor) -> tuple[Tensors, Tensor]:
        packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        stored = {
            "weight": packed,
            **{f"weight.{name}": each for name, each in state.as_dict(packed=True).items()},
        }
        return stored, bnb.dequantize_4bit(packed, state).float()

    def eight(weight: Tensor) -> tuple[Tensors, Tensor]:
        rounded, scale, _ = bnb.int8_vectorwise_quant(weight.half())
        stored = {"weight": rounded, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return stored, bnb.int8_vectorwise_dequant(rounded, scale).float()

    return (eight if kind == "int8" else four), {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
        "bnb_4bit_quant_type": kind,
    }


def gptq(
    *,
    bits: int = 4,
    group_size: int = 32,
    order: bool = False,
    version: int = 1,
    by_gptqmodel: bool = False,
    planes: bool = False,
) -> tuple[Quantize, dict]:
    """Pack like AutoGPTQ, value by value; like GPTQModel's conversion of the second version to the first; or like
    GPTQModel in planes, with the zeros of the second version.
    """
    pack, version = (planar_words, 2) if planes else (words, version)

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        out_size, in_size = weight.shape
        size = in_size if group_size == -1 else group_size
        group = torch.arange(in_size) // size
        if order:
            group = group[torch.randperm(in_size, generator=torch.Generator().manual_seed(3))]
        num_groups, top = in_size // size, 2**bits - 1
        scales, zeros = (
            torch.empty(num_groups, out_size),
            torch.empty(num_groups, out_size, dtype=torch.int64),
        )
        for each in range(num_groups):
            part = weight[:, group == each]
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales[each] = ((high - low) / top).half().float()
            zeros[each] = (-low / scales[each]).round().clamp(int(version == 1), top)
        if by_gptqmodel:
            zeros[:, ::3] = 0
        numbers = (weight.T / scales[group] + zeros[group]).round().clamp(0, top).long()  # [I, O]
        plain = ((numbers - zeros[group]) * scales[group]).T
        stored = {
            "qweight": pack(numbers.T, bits).T,
            "qzeros": _without_ones(zeros, bits) if by_gptqmodel else pack(zeros - int(version == 1), bits),
            "scales": scales.half(),
            "g_idx": group.int(),
        }
        return stored, plain

    return quantize, {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": order,
        "checkpoint_format": "gptq_p" if planes else "gptq" if version == 1 else "gptq_v2",
    }


def _without_ones(zeros: Tensor, bits: int) -> Tensor:
    """Subtract 1 from every number in each word, as one operation on the word; for 3 bits from each zero separately."""
    if bits == 3:
        return words((zeros - 1) % 8, bits)
    return (words(zeros, bits).to(torch.int64) - sum(1 << place for place in range(0, 32, bits))).to(torch.int32)


def planar_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack rows of numbers in planes: of each 32 first the lowest 4 bits (2 bits for 3-bit numbers), then the next 2
    and the last.
    """
    planes = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}.get(bits, (bits,))
    blocks = []
    for block in numbers.split(32, dim=1):
        place = 0
        for width in planes:
            blocks.append(words(block >> place & ((1 << width) - 1), width))
            place += width
    return torch.cat(blocks, dim=1)


def words(numbers: Tensor, bits: int) -> Tensor:
    """Pack rows of numbers into dense int32 words, lowest bits first, with Python's integers."""
    packed = []
    for row in numbers.tolist():
        whole = sum(number << (index * bits) for index, number in enumerate(row))
        packed.append([whole >> (32 * word) & 0xFFFFFFFF for word in range(-(-len(row) * bits // 32))])
    return torch.tensor(packed, dtype=torch.int64).to(torch.int32)


def awq(
    *, group_size: int = 32, zero_point: bool = True, bits: int = 4, version: str = "gemm"
) -> tuple[Quantize, dict]:
    """Pack like AutoAWQ for its gemm or gemv kernel. Without zeros each zero is 8."""

    def interleaved(numbers: Tensor) -> Tensor:
        places = [0, 2, 4, 6, 1, 3, 5, 7]
        if bits != 4:
            return words(numbers, bits)
        return words(torch.cat([part[:, places] for part in numbers.split(8, dim=1)], dim=1), 4)

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = weight.T.unflatten(0, (-1, group_size))  # [G, g, O]
        low, high = groups.amin(1).clamp_max(0), groups.amax(1).clamp_min(0)
        if not zero_point:
            low, high = -(groups.abs().amax(1)), groups.abs().amax(1)
        top = 2**bits - 1
        scales = ((high - low) / top).half().float()
        zeros = (-low / scales).round().clamp(0, top).long() if zero_point else torch.full_like(low, 8).long()
        numbers = (groups / scales[:, None] + zeros[:, None]).round().clamp(0, top).long()
        plain = ((numbers - zeros[:, None]) * scales[:, None]).flatten(0, 1).T
        if version == "gemv":
            width = -(-len(scales) // 8) * 8 + 8  # more entries than groups
            scales, zeros = (torch.nn.functional.pad(each.T, (0, width - len(each))) for each in (scales, zeros))
            parts = {"qweight": words(numbers.flatten(0, 1).T, 4), "qzeros": words(zeros, 4)}
            return {**parts, "scales": scales.half()}, plain
        stored = {
            "qweight": interleaved(numbers.flatten(0, 1)),
            "scales": scales.half(),
        }
        return stored | ({"qzeros": interleaved(zeros)} if zero_point else {}), plain

    return quantize, {
        "quant_method": "awq",
        "bits": bits,
        "group_size": group_size,
        "zero_point": zero_point,
        "version": version,
    }


def fp8(*, scope: str = "block", static: bool = False) -> tuple[Quantize, dict]:
    """Write fp8 like DeepSeek (blocks of 128 x 128 with inverse scales) or AutoFP8 (one scale per tensor)."""
    top = torch.finfo(torch.float8_e4m3fn).max

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = {"block": (48, 32), "channel": (1, weight.shape[1]), "tensor": weight.shape}[scope]
        scale = torch.empty(-(-len(weight) // rows), -(-weight.shape[1] // columns))
        rounded, plain = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        for i, j in _pairs(scale):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[place].abs().max() / top
            rounded[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn)
            plain[place] = rounded[place].float() * scale[i, j]
        name = "weight_scale_inv" if scope == "block" else "weight_scale"
        stored = {"weight": rounded, name: scale.reshape(()) if scope == "tensor" else scale}
        return stored | ({"input_scale": torch.tensor(0.5)} if static else {}), plain

    settings = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    return quantize, settings | ({"weight_block_size": [48, 32]} if scope == "block" else {})


def modelopt(kind: str, *, before: bool = False) -> tuple[Quantize, dict]:
    """Export like NVIDIA's ModelOpt: 4 bits with two outputs per byte, nvfp4, mxfp4, or fp8 in blocks; `before` scales
    the inputs.
    """

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        factor = torch.linspace(0.5, 2.0, weight.shape[1]).bfloat16() if before else torch.ones(1)
        stored, plain = by_kind(weight / factor.float())
        return stored | ({"pre_quant_scale": factor} if before else {}), plain * factor.float()

    def by_kind(weight: Tensor) -> tuple[Tensors, Tensor]:
        if kind == "mxfp4":
            return by_exponents(weight, 4)
        if kind == "nvfp4":
            scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 / SHARED_SCALE).to(torch.float8_e4m3fn)
            spread = (scales.float() * SHARED_SCALE).repeat_interleave(16, 1).clamp_min(1e-12)
            codes = ((weight / spread).unsqueeze(-1) - torch.tensor(E2M1)).abs().argmin(-1).to(torch.uint8)
            stored = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
            stored |= {"weight_scale_2": torch.tensor(SHARED_SCALE), "input_scale": input_scale(weight)}
            return stored, torch.tensor(E2M1)[codes.int()] * spread
        if kind == "fp8_pb_wo":
            stored, plain = fp8(scope="block")[0](weight)
            scale = stored["weight_scale_inv"]
            return {"weight": stored["weight"], "weight_scale": scale[:, None, :, None]}, plain
        groups = weight.unflatten(1, (-1, 32))
        scale = groups.abs().amax(2) / 7
        numbers = (groups / scale[:, :, None]).round().flatten(1).to(torch.int8)
        stored = {
            "weight": ((numbers[::2] & 15) | numbers[1::2] << 4).view(torch.uint8),
            "weight_scale": scale,
        }
        return stored | {"weight_scale_2": scale.max()}, numbers * scale.repeat_interleave(32, 1)

    block = {"weight_block_size": [48, 32]} if kind == "fp8_pb_wo" else {}
    return quantize, {"quant_method": "modelopt", "quant_algo": kind, **block}


def quark(dtype: str, *, reorder: bool = True) -> tuple[Quantize, dict]:
    """Export like AMD's Quark: 4-bit integers (signed or unsigned, in AWQ's order or in order), e2m1, or e2m3 with
    exponents.
    """

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        if dtype.startswith("fp"):
            return by_exponents(weight, int(dtype[2]))
        parts, plain = awq(zero_point=dtype == "uint4")[0](weight)
        packed = {"weight": parts["qweight"], "weight_zero_point": parts.get("qzeros")}
        if packed["weight_zero_point"] is None:  # every zero is 8, which for signed numbers is the highest bit
            packed["weight"] = packed["weight"] ^ torch.tensor(-0x77777778, dtype=torch.int32)
            packed["weight_zero_point"] = torch.zeros_like(parts["scales"][:, ::8], dtype=torch.int32)
        if not reorder:
            places = [4 * place for place in (0, 4, 1, 5, 2, 6, 3, 7)]
            packed = {
                name: torch.stack([(part >> place & 15) << 4 * i for i, place in enumerate(places)]).sum(0).int()
                for name, part in packed.items()
            }
        return {**packed, "weight_scale": parts["scales"]}, plain

    weight = {"dtype": dtype, "qscheme": "per_group", "group_size": 32}
    export = {"pack_method": "reorder" if reorder else "order", "weight_format": "real_quantized"}
    return quantize, {"quant_method": "quark", "global_quant_config": {"weight": weight}, "export": export}


def by_exponents(weight: Tensor, bits: int) -> tuple[Tensors, Tensor]:
    """Write e2m1 or e2m3, packed densely, lowest bits first, with a power of two per 32 inputs."""
    steps, half = (2, 8) if bits == 4 else (8, 32)
    numbers = [(i / steps if i < steps else 2.0 ** (i // steps - 1) * (1 + i % steps / steps)) for i in range(half)]
    table = torch.tensor(numbers)
    groups = weight.unflatten(1, (-1, 32))
    exponents = groups.abs().amax(2).log2().floor() - 2
    scaled = groups / 2.0 ** exponents[:, :, None]
    codes = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1)
    plain = table[codes] * scaled.sign() * 2.0 ** exponents[:, :, None]
    dense = words((codes + half * (scaled < 0)).flatten(1), bits).view(torch.uint8)
    return {"weight": dense, "weight_scale": (exponents + 127).to(torch.uint8)}, plain.flatten(1)


def torchao(kind: str) -> tuple[Quantize, dict]:
    """Use torchao's tensors, flattened as for safetensors. Its 4-bit tensors need a GPU, so they are packed here."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4Tensor,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    configs: dict[str, Any] = {
        "int8": Int8WeightOnlyConfig(),
        "int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
        "fp8": Float8WeightOnlyConfig(),
    }

    def four_bits(weight: Tensor) -> tuple[Any, Tensor]:
        groups = weight.float().unflatten(1, (-1, 32))
        least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = (most - least) / 15
        signed = ((groups - least) / scale).round().clamp(0, 15) - 8
        zero, pairs = least + 8 * scale, signed.flatten(1).to(torch.int8)
        packed = (pairs[:, 1::2] << 4) | (pairs[:, ::2] & 15)
        scales, zeros = (each.squeeze(2).T.contiguous() for each in (scale, zero))
        return Int4Tensor(packed, scales, zeros, [1, 32], weight.shape), (signed * scale + zero).flatten(1)

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        if kind == "int4":
            made, plain = four_bits(weight)
        else:
            layer = torch.nn.Linear(*weight.shape[::-1], bias=False)
            layer.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
            quantize_(layer, configs[kind])
            made: Any = layer.weight.data
            plain = made.dequantize()
        flat, _ = flatten_tensor_state_dict({"x.weight": made})
        return {name.removeprefix("x."): part for name, part in flat.items()}, plain

    return quantize, {"quant_method": "torchao", "quant_type": {"default": {"_type": "Any", "_data": {}}}}


def _pairs(grid: Tensor) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(grid.shape[0]) for j in range(grid.shape[1]))


FORMS: dict[str, Callable[..., tuple[Quantize, dict]]] = {
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "gptq": gptq,
    "awq": awq,
    "fp8": fp8,
    "modelopt": modelopt,
    "quark": quark,
    "torchao": torchao,
}
