"""GGUF: llama.cpp's quantised blocks of 32 or 256 numbers along the inputs, each with its scales.

    Q4_0    half d, 16 bytes    weight = d * (q - 8); byte i holds numbers i (low) and 16 + i (high)
    Q4_1    half d, m, 16 bytes weight = d * q + m
    Q4_K    half d, dmin, 12 bytes of eight 6-bit scales and minima, 128 bytes    d * s * q - dmin * m
    IQ4_NL  like Q4_0, with q looked up in a table

Kinds in FORMS can stay quantised in memory; llama.cpp's `gguf` package dequantises all kinds. With NVFP4, NAME.scale
multiplies NAME.weight. Tensors are renamed as in the model's safetensors files. Three changes of llama.cpp's
converter are undone: the rows of q and k in interleaved pairs (Llama), norm weights plus 1 (Gemma), and gate and up in
one tensor. Source: ggml-quants.h, convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ops.matmul.grouped import E2M1, GroupedWeight, GroupForm
from runtime.config.fields import Fields
from runtime.config.gguf_header import GgufHeader, GgufTensor, read_header
from runtime.errors import CheckpointError
from runtime.loading.formats.bits import power_of_two
from runtime.loading.formats.stored import Derived, Read, Stored
from runtime.loading.tensors import Cut, Cuts, FileBytes, Take, give_parts

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_TABLE = tuple(map(float, IQ4))
FORMS = {  # kinds that can stay quantised in memory; codes of Q2_K and Q3_K are widened to 4 bits
    "Q4_0": GroupForm(32, shifted=False),
    "Q4_1": GroupForm(32),
    "Q5_0": GroupForm(32, 5, shifted=False),
    "Q5_1": GroupForm(32, 5),
    "Q8_0": GroupForm(32, 8, shifted=False),
    "Q2_K": GroupForm(16),
    "Q3_K": GroupForm(16, shifted=False),
    "Q4_K": GroupForm(32),
    "Q5_K": GroupForm(32, 5),
    "Q6_K": GroupForm(16, 6, shifted=False),
    "IQ4_NL": GroupForm(32, table=_IQ4_TABLE, shifted=False),
    "IQ4_XS": GroupForm(32, table=_IQ4_TABLE, shifted=False),
    "MXFP4": GroupForm(32, table=E2M1, shifted=False, powers=True),
}

_WHOLE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = {
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_FAMILY_PARTS = {"gemma2": _GEMMA, "gemma3": _GEMMA, "gpt-oss": _GPT_OSS, "phi3": _PHI3}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GATE_UP = "ffn_gate_up_exps"
_ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)")  # name of a single expert's tensor in files from 2023
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(.+)\.(weight|bias)")


class GgufFiles:
    """Tensors of a memory-mapped GGUF file; quantised tensors as bytes [..., rows, bytes per row]."""

    def __init__(self, path: Path) -> None:
        self.header = read_header(path, texts=False)
        self._files: dict[Path, FileBytes] = {}
        tensors = self.header.tensors
        self.shapes: Mapping[str, tuple[int, ...]] = {name: _stored_shape(each) for name, each in tensors.items()}
        self.dtypes: Mapping[str, torch.dtype] = {
            name: PLAIN.get(each.kind.name, torch.uint8) for name, each in tensors.items()
        }

    def read(self, name: str, cut: Cut = ()) -> Tensor:
        """Return one memory-mapped tensor, or the part of it that `cut` selects.

        The file is read when the tensor's values are used.
        """
        tensor = self.header.tensors[name]
        content = self._files.setdefault(tensor.file, FileBytes(tensor.file)).read(tensor.begin, tensor.end)
        if tensor.begin % 4:
            content = content.clone()
        return content.view(self.dtypes[name]).view(_stored_shape(tensor))[cut]

    def release(self) -> None:
        """Release the pages that were read."""
        for file in self._files.values():
            file.release()

    def read_all(self, take: Take, cuts: Cuts, num_threads: int = 1) -> None:
        """Like `TensorFiles.read_all`, on this thread."""
        for name in cuts:
            give_parts(take, cuts, name, self.read(name))
            self.release()


def _stored_shape(tensor: GgufTensor) -> tuple[int, ...]:
    *rows, size = tensor.shape
    return tensor.shape if tensor.kind.name in PLAIN else (*rows, size // tensor.kind.numbers * tensor.kind.bytes)


def derive(stored: Stored, fields: Fields) -> Derived:
    """Return how the model's tensors are computed from the stored tensors (see `runtime.loading.formats`)."""
    if not isinstance(stored, GgufFiles):
        raise CheckpointError(f"{fields.path}quant_method gguf requires a .gguf file. Set --model-path to the file.")
    header, derived = stored.header, Derived()
    architecture = header.architecture
    parts = _PARTS | _FAMILY_PARTS.get(architecture, {})
    if header.values.get("llama.expert_count"):
        parts |= _MIXTRAL
    for name in header.tensors:
        if name.startswith(("rope_freqs.", "rope_factors_")) or name.endswith((".scale", ".input_scale")):
            derived.used.add(name)  # a scale is read together with its weight
        elif f".{_GATE_UP}." in name:
            for half, part in enumerate(("ffn_gate_exps", "ffn_up_exps")):
                ours = _our_name(name.replace(_GATE_UP, part), parts)
                _add(derived, name, str(ours), header, 0, half)
        elif (ours := _our_name(name, parts)) is not None:
            _add(derived, name, ours, header, _heads_in_pairs(stored, name, architecture))
    return derived


def _our_name(name: str, parts: Mapping[str, str]) -> str | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, suffix = match.groups()
    if one := _ONE_EXPERT.fullmatch(part):
        ours = parts[f"{one[1]}_exps"].format(one[2])
        return f"model.layers.{layer}.{ours}.{suffix}"
    ours = _WHOLE_MODEL.get(part) if layer is None else parts.get(part)
    prefix = "" if layer is None else f"model.layers.{layer}."
    if ours is not None and ours.endswith(".sinks"):
        return f"{prefix}{ours}"
    return None if ours is None else f"{prefix}{ours}.{suffix}"


def _heads_in_pairs(stored: GgufFiles, name: str, architecture: str) -> int:
    """Return the number of heads of a tensor whose rows are stored in interleaved pairs; 0 if rows are in order."""
    if architecture != "llama" or not re.search(r"\.attn_[qk]\.", name):
        return 0
    values = stored.header.values
    heads = values.get("llama.attention.head_count") or 0
    heads = heads if ".attn_q." in name else values.get("llama.attention.head_count_kv") or heads
    rows = stored.header.tensors[name].shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise CheckpointError(f"{stored.header.path}: the {rows} rows of {name} do not fit {heads} heads.")
    return heads


def _add(derived: Derived, name: str, ours: str, header: GgufHeader, pairs: int, half: int | None = None) -> None:
    """Add the model's tensor, or one per expert; `half` selects gate or up of a combined tensor."""
    tensor, architecture, scale = (
        header.tensors[name],
        header.architecture,
        f"{name.removesuffix('weight')}scale",
    )
    scale = scale if scale in header.tensors else None
    kind, shape = tensor.kind.name, tensor.shape
    if ours.endswith("shared_expert_gate.weight"):
        shape = (1, *shape[-1:])
    offset = 1.0 if architecture.startswith("gemma") and ours.endswith("norm.weight") else 0.0
    if kind in PLAIN and shape == tensor.shape and "{}" not in ours and not pairs and not offset and not scale:
        derived.renamed[name] = ours
        return
    experts = shape[0] if "{}" in ours else None
    if scale and prod(header.tensors[scale].shape) != (experts or 1):
        raise CheckpointError(f"{header.path}: {scale} must have {experts or 1} numbers, one per weight.")
    inner = shape if experts is None else shape[1:]
    inner = inner if half is None else (inner[0] // 2, *inner[1:])

    def add(ours: str, expert: int | None) -> None:
        def rows(read: Read) -> Tensor:
            part = read(name)
            part = part if expert is None else part[expert]
            part = part if half is None else part[half * inner[0] :][: inner[0]]
            if pairs:
                part = part.unflatten(0, (pairs, -1, 2)).transpose(1, 2).flatten(0, 2)
            return part

        def make_rows(read: Read, selected: slice) -> Tensor:
            numbers = dequantise(rows(read)[selected], kind) - offset
            return numbers if scale is None else numbers * read(scale).flatten()[expert or 0]

        def make(read: Read) -> Tensor:
            return make_rows(read, slice(None)).view(inner)

        def make_grouped(read: Read, selected: slice) -> GroupedWeight:
            return in_groups(rows(read)[selected], kind)

        kept = kind in FORMS and len(inner) == 2 and scale is None
        grouped, form = (make_grouped, FORMS[kind]) if kept else (None, None)
        # With `pairs` (queries and keys of Llama), consecutive rows of the model are not consecutive in the file. Such
        # a tensor is small enough to be made as a whole.
        by_rows = make_rows if len(inner) == 2 and len(tensor.shape) > 1 and not pairs else None
        derived.add(ours, inner, [name], make, grouped, form, by_rows)

    for expert in [None] if experts is None else range(experts):
        add(ours.format(expert), expert)


def dequantise(rows: Tensor, kind: str) -> Tensor:
    """Dequantise stored rows, bytes [..., B], to float32 [..., I]."""
    if kind in PLAIN:
        return rows.float()
    import gguf

    flat = rows.contiguous().view(prod(rows.shape[:-1]), -1).numpy()
    numbers = gguf.dequantize(flat, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(numbers).view(*rows.shape[:-1], -1)


def in_groups(rows: Tensor, kind: str) -> GroupedWeight:
    """Return stored rows, bytes [O, B] of a kind in FORMS, as codes, scales and shifts per group."""
    form = FORMS[kind]
    codes, scales, shifts = _GROUPS[kind](rows)
    shifts = None if shifts is None else shifts.flatten(1)
    return GroupedWeight(codes.flatten(1), scales.flatten(1), shifts, form.table, bits=form.bits, powers=form.powers)


_Groups = tuple[Tensor, Tensor, Tensor | None]  # [O, blocks, ...] each


def _four_bits(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 18))
    return _nibbles(blocks[..., 2:]), _halves(blocks[..., :2]), None


def _four_bits_shifted(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 20))
    scales = _halves(blocks[..., :2])
    return _nibbles(blocks[..., 4:]), scales, 8 * scales + _halves(blocks[..., 2:4])


def _five_bits(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 22))
    return _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4, _halves(blocks[..., :2]), None


def _five_bits_shifted(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 24))
    scales, codes = _halves(blocks[..., :2]), _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return codes, scales, 16 * scales + _halves(blocks[..., 2:4])


def _floats_of_4_bits(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 17))
    return _nibbles(blocks[..., 1:]), power_of_two(blocks[..., 0]), None


def _eight_bits(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 34))
    return blocks[..., 2:] ^ 128, _halves(blocks[..., :2]), None


def _table_of_blocks(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 136))  # 136 bytes for 256 numbers
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], dim=-1).flatten(-2)
    high = _pieces(blocks[..., 2:4], 2)
    scales = _halves(blocks[..., :2]).unsqueeze(-1) * ((low | high << 4).float() - 32)
    return _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))), scales, None


def _two_bits_k(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 84))
    scale, least = _halves(blocks[..., 80:82]), _halves(blocks[..., 82:84])
    scales = scale.unsqueeze(-1) * (blocks[..., :16] & 15).float()
    minima = least.unsqueeze(-1) * (blocks[..., :16] >> 4).float()
    return _in_turn(blocks[..., 16:80], 32, 2) + 8, scales, -minima


def _three_bits_k(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 110))
    packed = blocks[..., 96:108]  # 16 scales of 6 bits: first the low four bits of all scales, then the high two bits
    low = torch.cat([packed[..., :8] & 15, packed[..., :8] >> 4], dim=-1)
    high = torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scales = _halves(blocks[..., 108:]).unsqueeze(-1) * ((low | high << 4).float() - 32)
    upper = _in_turn(blocks[..., :32], 32, 1)
    return (_in_turn(blocks[..., 32:96], 32, 2) | upper << 2) + 4, scales, None


def _four_bits_k(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 144))
    scales, minima = _scales_and_minima(blocks)
    return _in_turn(blocks[..., 16:], 32, 4), scales, 8 * scales - minima


def _five_bits_k(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 176))
    scales, minima = _scales_and_minima(blocks)
    codes = _in_turn(blocks[..., 48:], 32, 4) | _in_turn(blocks[..., 16:48], 32, 1) << 4
    return codes, scales, 16 * scales - minima


def _six_bits_k(rows: Tensor) -> _Groups:
    blocks = rows.unflatten(1, (-1, 210))
    scales = _halves(blocks[..., 208:]).unsqueeze(-1) * blocks[..., 192:208].view(torch.int8).float()
    return _in_turn(blocks[..., :128], 64, 4) | _in_turn(blocks[..., 128:192], 32, 2) << 4, scales, None


_GROUPS: Mapping[str, Callable[[Tensor], _Groups]] = {
    "Q4_0": _four_bits,
    "Q4_1": _four_bits_shifted,
    "Q5_0": _five_bits,
    "Q5_1": _five_bits_shifted,
    "Q8_0": _eight_bits,
    "Q2_K": _two_bits_k,
    "Q3_K": _three_bits_k,
    "Q4_K": _four_bits_k,
    "Q5_K": _five_bits_k,
    "Q6_K": _six_bits_k,
    "IQ4_NL": _four_bits,
    "IQ4_XS": _table_of_blocks,
    "MXFP4": _floats_of_4_bits,
}


def _nibbles(packed: Tensor) -> Tensor:
    """Split bytes [..., n] to [..., 2n]: all lower halves, then all upper halves."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _in_turn(packed: Tensor, size: int, bits: int) -> Tensor:
    """Unpack each block of `size` bytes: first the lowest bits of all its bytes, then their next bits, and so on."""
    parts = packed.unflatten(-1, (-1, size))
    return torch.stack([parts >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-2).flatten(-3)


def _pieces(packed: Tensor, bits: int) -> Tensor:
    """Unpack numbers of `bits` bits, the lowest bits of a byte first."""
    return torch.stack([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-1).flatten(-2)


def _bits(packed: Tensor) -> Tensor:
    return _pieces(packed, 1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack scales and minima [..., 8] of blocks of 256 numbers: half d, dmin, 12 bytes of 6-bit numbers."""
    scale, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)  # [..., 4] each
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1)
    return scale.unsqueeze(-1) * scales.float(), least.unsqueeze(-1) * minima.float()


def _halves(pairs: Tensor) -> Tensor:
    """Convert float16 bytes [..., 2] to float32 [...]."""
    return pairs.contiguous().view(torch.float16).squeeze(-1).float()
