"""Changes that remove a declared feature from a model. Each of them must change the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.layers.attention import Attention
from runtime.layers.recurrent import GatedDeltaNet, Mamba2, ShortConvolution
from runtime.layers.rope import Rope
from runtime.layers.rope_parameters import RopeParameters
from runtime.modeling.decoder import Decoder

Mutate = Callable[[Decoder], object]


def each(name: str, change: Callable[[Any], object]) -> Mutate:
    """Apply a change to the submodule `name` of every layer."""
    return lambda model: [change(layer.get_submodule(name)) for layer in model.layers]


def put(name: str, **values: Any) -> Mutate:
    """Set attributes of the submodule `name` of every layer."""
    return each(name, lambda module: [setattr(module, key, value) for key, value in values.items()])


no_qkv_bias = each("attention.qkv", lambda linear: linear.bias.zero_())
no_out_bias = each("attention.out", lambda linear: linear.bias.zero_())
no_window = put("attention", window=None)
no_qk_norm = put("attention", q_norm=None, k_norm=None, _norms_heads=False)
plain_norm = each("attention_norm", lambda norm: norm.weight.fill_(1))
no_eps = put("mlp_norm", eps=0.0)
halves = put("attention.rope", interleaved=False)


def no_keys_of_long_rows(model: Decoder) -> None:
    """Break the expanded keys in all rows with several tokens."""
    put("attention", expand_from=2)(model)
    each("attention", lambda attention: attention.expanding.zero_())(model)


def route(**values: Any) -> Mutate:
    """Change the routing of every layer with experts."""

    def change(model: Decoder) -> None:
        for layer in model.layers:
            mlp: Any = layer.get_submodule("mlp")
            if hasattr(mlp, "routing"):
                mlp.routing = mlp.routing._replace(**values)

    return change


def uncorrected(model: Decoder) -> None:
    """Choose experts by their uncorrected scores."""
    for layer in model.layers:
        mlp: Any = layer.get_submodule("mlp")
        if hasattr(mlp, "correction"):
            mlp.correction = None


def unshared(model: Decoder) -> None:
    for layer in model.layers:
        mlp: Any = layer.get_submodule("mlp")
        if hasattr(mlp, "shared"):
            mlp.shared = None


def drop(name: str) -> Mutate:
    """Remove an attribute of every layer."""
    return lambda model: [setattr(layer, name, None) for layer in model.layers]


def no_post_norms(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention_norm = layer.mlp_norm = torch.nn.Identity()


def rotated(model: Decoder) -> None:
    """Rotate in the layers without rotary embedding too."""
    for layer in model.layers:
        attention: Any = layer.get_submodule("attention")
        attention.rope = attention.rope or model.layers[0].get_submodule("attention.rope")


def same_rope(model: Decoder, source: int, target: int) -> None:
    """Give one layer the rotary embedding of another."""
    attention: Any = model.layers[target].get_submodule("attention")
    attention.rope = model.layers[source].get_submodule("attention.rope")


def no_embedding_scale(model: Decoder) -> None:
    embedding: Any = model.embedding
    embedding.scale = None


def no_final_cap(model: Decoder) -> None:
    head: Any = model.head
    head.soft_cap = None


def turned_head(model: Decoder) -> None:
    embedding: Any = model.embedding
    embedding.head_weight = torch.nn.Parameter(embedding.weight.flip(0), requires_grad=False)


def nets(change: Callable[[GatedDeltaNet], object]) -> Mutate:
    """Apply a change to every gated delta net."""
    return lambda model: [change(each) for each in model.modules() if isinstance(each, GatedDeltaNet)]


def ungated(model: Decoder) -> None:
    """Remove the gate of attention's output."""
    for each in model.modules():
        if isinstance(each, Attention):
            each.kernels = replace(each.kernels, modulate=lambda x, gate, activation: x)


NETS = {
    "gate of attention": ungated,
    "convolution": nets(lambda net: net.convolution.weight[:-1].zero_()),
    "decay": nets(lambda net: net.rate.fill_(-9)),
    "step": nets(lambda net: net.shift.zero_()),
    "norm of outputs": nets(lambda net: net.norm.weight.fill_(1)),
    "1 + weight": put("attention_norm", unit_offset=False),
}


def mamba(change: Callable[[Any], object]) -> Mutate:
    """Apply a change to every Mamba layer."""
    return lambda model: [change(each) for each in model.modules() if isinstance(each, Mamba2)]


def rotated_as_llama(model: Decoder) -> None:
    """Rotate in attention layers without rotary embedding."""
    for layer in model.layers:
        attention: Any = layer.get_submodule("attention")
        if isinstance(attention, Attention):
            parameters = RopeParameters(theta=10000.0, dim=attention.head_dim, max_position=256)
            attention.rope = Rope(parameters, 256, attention.kernels, torch.device("cpu"))


def short(change: Callable[[Any], object]) -> Mutate:
    """Apply a change to every short convolution."""
    return lambda model: [change(each) for each in model.modules() if isinstance(each, ShortConvolution)]


def unnormed_heads(model: Decoder) -> None:
    """Remove the norms of queries and keys."""
    for each in model.modules():
        if isinstance(each, Attention):
            each.q_norm = each.k_norm = None
            each._norms_heads = False


def without_gates(number: int) -> Mutate:
    """Remove one of the two gates of every short convolution."""

    def change(layer: ShortConvolution) -> None:
        convolve = layer.kernels.convolve

        def changed(x: Tensor, *operands: Any, gates: tuple[Tensor, Tensor]) -> Tensor:
            left = tuple(torch.ones_like(gate) if at == number else gate for at, gate in enumerate(gates))
            return convolve(x, *operands, gates=left)

        layer.kernels = replace(layer.kernels, convolve=changed)

    return short(change)


LATENT = {
    "neighbours": halves,
    "keys of short rows": each("attention", lambda attention: attention.absorbing.zero_()),
    "keys of long rows": no_keys_of_long_rows,
    "norm of latent vectors": each("attention.norm", lambda norm: norm.weight.fill_(1)),
    "norm of queries": each("attention.query_norm", lambda norm: norm.weight.fill_(1)),
    "shared experts": unshared,
    "scale of experts": route(scale=1.0),
}
