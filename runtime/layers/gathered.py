"""Data-parallel attention: each attention group attends to its own tokens, and all ranks share the MLPs."""

from __future__ import annotations

from torch import Tensor, nn

from runtime.errors import ConfigurationError
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.moe import MoE
from runtime.layers.weight import Weighted
from runtime.mesh.axis import Axis
from runtime.mesh.mesh import Mesh


class Gathered(nn.Module):
    """Computes an MLP or a mixture of experts for the tokens of all attention groups together.

    Every rank holds a shard of the inner layer. The inner layer must return the sum over all ranks of the stage.
    `groups` has one rank of each attention group.
    """

    def __init__(self, inner: nn.Module, groups: Axis) -> None:
        super().__init__()
        self.inner = inner
        self._groups = groups

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the inner layer's output for this group's tokens, x [T, E] -> [T, E].

        In a group without tokens, x is one padding token. It is not gathered, and its output is zero.
        """
        counts, rank = batch.group_tokens, self._groups.rank
        own, first = counts[rank], sum(counts[:rank])
        out = self.inner(self._groups.all_gather(x[:own], counts), batch)
        return out[first : first + own] if own else x.new_zeros(x.shape)


def split_layers(model: nn.Module, mesh: Mesh) -> None:
    """Keep this rank's shard of every layer of a `Decoder`. Parameters must still be on the meta device.

    Without attention groups, every layer is split over the ranks of the pipeline stage. With attention groups,
    attention and the embedding are split over the ranks of a group; MLPs, experts and the LM head are split over all
    ranks of the stage. An LM head that is tied, or with `head_by_group`, is split over the group instead. With
    `whole_dense` the dense MLPs of a model with experts are not split. Raises `ConfigurationError` if a layer has no
    MLP.
    """
    info = mesh.rank_info
    attention, stage = mesh.axis("tp"), mesh.axis("stage")
    over: dict[nn.Module, Axis | None] = dict.fromkeys(model.modules(), attention)
    layers = [*getattr(model, "layers", ())]
    has_experts = any(isinstance(module, MoE) for module in model.modules())
    for layer in layers if info.dp_size > 1 or info.whole_dense else ():
        inner = getattr(layer, "mlp", None)
        if not isinstance(inner, nn.Module):
            raise ConfigurationError("--enable-dp-attention: this model has layers without an MLP of their own.")
        if info.whole_dense and has_experts and not any(isinstance(module, MoE) for module in inner.modules()):
            over |= dict.fromkeys(inner.modules(), None)
            continue
        over |= dict.fromkeys(inner.modules(), stage)
        if info.dp_size > 1:
            layer.mlp = Gathered(inner, mesh.axis("dp"))
    head = getattr(model, "head", None)
    if head is not None and not head.tied and not info.head_by_group:
        over |= dict.fromkeys(head.modules(), stage)
    for module, axis in over.items():
        if isinstance(module, Weighted) and axis is not None and axis.size > 1:
            module.split(axis)
