"""The operands of the kernels as ctypes sees them: the structures mirror those in `source/`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p


class Step(Structure):
    """Where each row of a step stands (`step.h`)."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("page_table", c_void_p),
        ("table_width", c_int64),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("query_starts", c_void_p),
        ("page_size", c_int64),
        ("given_ids", c_void_p),
        ("sequence_indices", c_void_p),
        ("last_tokens", c_void_p),
        ("num_samples", c_int64),
        ("sample_rows", c_void_p),
    )


class GraphNode(Structure):
    """A kernel and its operands (`step.h`)."""

    _fields_ = (("kernel", c_void_p), ("operands", c_void_p))


class Embed(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("out", c_void_p),
        ("size", c_int64),
        ("scale", c_float),
        ("places", c_void_p),
        ("type", c_void_p),
    )


class Norm(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("lines", c_int64),
        ("stride", c_int64),
        ("size", c_int64),
        ("weight_stride", c_int64),
        ("centred", c_int64),
        ("eps", c_float),
        ("offset", c_float),
    )


class Add(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("gate", c_void_p),
        ("tokens", c_int64),
        ("size", c_int64),
        ("scale", c_float),
    )


class Rotate(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("table", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("size", c_int64),
        ("interleaved", c_int64),
    )


class Store(Structure):
    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_pool", c_void_p),
        ("v_pool", c_void_p),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("slot_mapping", c_void_p),
        ("type", c_int64),
        ("k_steps", c_float),
        ("v_steps", c_float),
    )


class RotateStore(Structure):
    _fields_ = (("rotate", Rotate), ("store", Store))


class Gate(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("gated", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("x_stride", c_int64),
        ("gated_stride", c_int64),
        ("size", c_int64),
        ("kind", c_int64),
    )


class Attend(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("k_pool", c_void_p),
        ("v_pool", c_void_p),
        ("out", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
        ("chunked", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
        ("slopes", c_void_p),
        ("parts", c_void_p),
        ("num_parts", c_int64),
        ("page_table", c_void_p),
        ("type", c_int64),
        ("v_scale", c_float),
        ("below", c_int64),
    )


class AttendTexts(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
        ("reach", c_int64),
        ("scale", c_float),
    )


class Pack(Structure):
    _fields_ = (("weight", c_void_p), ("packed", c_void_p), ("in_size", c_int64), ("out_size", c_int64))


class Product(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("activation", c_int64),
    )


class Pack8(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("in_size", c_int64),
        ("out_size", c_int64),
    )


class Product8(Structure):
    _fields_ = (
        ("plain", Product),
        ("scales", c_void_p),
        ("rounded", c_void_p),
    )


class Product4(Structure):
    _fields_ = (
        ("plain", Product),
        ("table", c_void_p),
        ("group_sums", c_void_p),
        ("group", c_int64),
        ("shifted", c_int64),
        ("rounded", c_void_p),
        ("bits", c_int64),
    )


class Pack4(Structure):
    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("shifts", c_void_p),
        ("packed", c_void_p),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("group", c_int64),
        ("bits", c_int64),
    )


class Begin(Structure):
    _fields_ = (
        ("query_starts", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("page_table", c_void_p),
    )


class Last(Structure):
    _fields_ = (("hidden", c_void_p), ("out", c_void_p), ("size", c_int64))


class Choose(Structure):
    _fields_ = (
        ("best", c_void_p),
        ("ids", c_void_p),
        ("sound", c_void_p),
        ("max_samples", c_int64),
        ("product", Product8),
        ("product4", Product4),
    )


class Route(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("bias", c_void_p),
        ("weights", c_void_p),
        ("experts", c_void_p),
        ("tokens", c_int64),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("scoring", c_int64),
        ("renormalise", c_int64),
        ("num_groups", c_int64),
        ("top_groups", c_int64),
        ("group_scores", c_int64),
        ("scale", c_float),
    )


class PairTable(Structure):
    _fields_ = (("positions", c_void_p), ("starts", c_void_p), ("blocks", c_void_p))


class Dispatch(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("experts", c_void_p),
        ("weights", c_void_p),
        ("table", PairTable),
        ("rows", c_void_p),
        ("tokens", c_int64),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("size", c_int64),
    )


class Experts(Structure):
    _fields_ = (
        ("product", Product8),
        ("product4", Product4),
        ("table", PairTable),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("num_experts", c_int64),
        ("panels", c_int64),
        ("out_size", c_int64),
        ("kind", c_int64),
    )


class Combine(Structure):
    _fields_ = (
        ("results", c_void_p),
        ("positions", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("top_k", c_int64),
        ("size", c_int64),
    )


class Convolve(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("before", c_void_p),
        ("behind", c_void_p),
        ("pool", c_void_p),
        ("out", c_void_p),
        ("spans", c_void_p),
        ("tokens", c_int64),
        ("x_stride", c_int64),
        ("before_stride", c_int64),
        ("behind_stride", c_int64),
        ("channels", c_int64),
        ("kernel", c_int64),
    )


class Recur(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("rate", c_void_p),
        ("shift", c_void_p),
        ("skip", c_void_p),
        ("pool", c_void_p),
        ("out", c_void_p),
        ("spans", c_void_p),
        ("tokens", c_int64),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("a_stride", c_int64),
        ("b_stride", c_int64),
        ("groups", c_int64),
        ("heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("wide", c_int64),
        ("low", c_float),
        ("high", c_float),
    )


class ProductHeads(Structure):
    _fields_ = (
        ("product", Product),
        ("heads", c_int64),
        ("x_head", c_int64),
        ("out_stride", c_int64),
        ("out_head", c_int64),
        ("below", c_int64),
    )


class CopyHeads(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("size", c_int64),
        ("x_stride", c_int64),
        ("x_head", c_int64),
        ("out_stride", c_int64),
        ("out_head", c_int64),
    )


class EmbedGroups(Structure):
    _fields_ = (("weight", Product4), ("out", c_void_p), ("scale", c_float))


class Draw(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("skip", c_void_p),
        ("greedy", c_void_p),
        ("temperature", c_void_p),
        ("min_p", c_void_p),
        ("uniform", c_void_p),
        ("ids", c_void_p),
        ("sound", c_void_p),
        ("mask_of", c_void_p),
        ("masks", c_void_p),
        ("words", c_int64),
        ("rows", c_int64),
        ("vocab_size", c_int64),
    )


class PoolTexts(Structure):
    _fields_ = (
        ("hidden", c_void_p),
        ("out", c_void_p),
        ("size", c_int64),
        ("mean", c_int64),
        ("normalized", c_int64),
    )


class AttendExpanded(Structure):
    _fields_ = (
        ("plain", c_void_p),
        ("turned", c_void_p),
        ("plain_stride", c_int64),
        ("plain_head", c_int64),
        ("turned_stride", c_int64),
        ("turned_head", c_int64),
        ("pool", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        ("num_heads", c_int64),
        ("rank", c_int64),
        ("plain_dim", c_int64),
        ("turned_dim", c_int64),
        ("value_dim", c_int64),
        ("scale", c_float),
        ("type", c_int64),
        ("expand_from", c_int64),
    )


# In the order of STRUCTURE_SIZES in `library.cpp`.
STRUCTURES = (
    Step, GraphNode, Embed, Norm, Rotate, Store, Gate, Attend, Pack, Product, Pack8, Product8, Begin, Last, Choose,
    RotateStore, Add, Product4, Pack4, Route, PairTable, Dispatch, Experts, Combine, AttendTexts, Convolve, Recur,
    ProductHeads, CopyHeads, EmbedGroups, Draw, PoolTexts, AttendExpanded,
)  # fmt: skip
