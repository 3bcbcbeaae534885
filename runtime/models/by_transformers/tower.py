"""The part of a multimodal model before its language model, computed by transformers' modules.

The `forward` of transformers merges images into the embeddings of a text and then calls the language model. Here a
recorder replaces the language model and keeps the arguments of this call. This works for every family, because it does
not depend on the family's encoder, projector or placeholders.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.models.by_transformers.facts import LAYER_EMBEDDINGS, MUTUAL_IN_WINDOWS, quiet

# Arguments of the language model that Penstock supplies itself or that have no effect.
_PLAIN = frozenset(
    {"inputs_embeds", "position_ids", "attention_mask", "use_cache", "cache", "past_key_values", "cache_position",
     "return_dict", "output_attentions", "output_hidden_states", "logits_to_keep", "labels", "input_ids",
     "hidden_states", "position_embeddings", "visual_pos_masks", "deepstack_visual_embeds", "token_type_ids",
     "mm_token_type_ids", "per_layer_inputs",
     "moe_mm_token_type_ids"}
)  # fmt: skip
# Results of processors that are passed to a body with arbitrary keyword arguments.
_PASSED_ON = frozenset({"pixel_values", "pixel_values_videos", "image_sizes", "second_per_grid_ts"})
# Result of a processor -> the name under which a body takes it.
_RENAMED = {"pixel_values_images": "pixel_values"}
# Suffixes of the names of those results of processors from which positions are computed.
GRIDS = ("grid_thw", "grid_hws", "second_per_grid_ts", "target_sizes", "target_sizes_videos")
TEXT = 0  # media type of text tokens
SLIDING = "sliding_attention"  # kind of layer
NUM_AXES = 3  # time, height and width


class EncodedImage(NamedTuple):
    """The input of the language model for an image."""

    is_media: NDArray[np.bool_]  # [T], tokens of the image's block whose embeddings come from the image
    # [N, W] for the N tokens that `is_media` marks: the embedding, then the vectors that are added after the first
    # layers (DeepStack).
    vectors: NDArray[np.float32]


class _Recorded(Exception):
    """Raised by the recorder in place of the language model's computation. Carries the arguments of the call."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class _Unknown(nn.Module):
    """An embedding that is NaN for every token, so that tokens without an image's vector can be recognised."""

    row: Tensor

    def __init__(self, real: nn.Module, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("row", torch.full((1, size), torch.nan, dtype=dtype, device=device), persistent=False)
        self.embedding_dim = size
        self.num_embeddings = getattr(real, "num_embeddings", 0)
        self.padding_idx = None
        for name, child in real.named_children():  # some encoders use a norm of the embedding
            self.add_module(name, child)

    @property
    def weight(self) -> Tensor:
        """The vectors of all tokens, [V, E]: one row of NaN, expanded."""
        return self.row.expand(max(self.num_embeddings, 1), -1)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.row[0].expand(*input_ids.shape, self.embedding_dim).clone()


class _Recorder(nn.Module):
    """Replaces the language model, and raises `_Recorded` when it is called."""

    def __init__(self, config: Any, embedding: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding
        self.model = _Inner(embedding)

    @property
    def dtype(self) -> torch.dtype:
        weight: Any = self.embed_tokens.weight
        return weight.dtype

    @property
    def device(self) -> torch.device:
        weight: Any = self.embed_tokens.weight
        return weight.device

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> None:
        return None

    def get_per_layer_inputs(self, *_: Any, **__: Any) -> None:
        """Return None. The language model computes these embeddings later, from its token ids."""
        if self.config.model_type not in LAYER_EMBEDDINGS:
            raise ValueError("its language model also reads embeddings of its own in every layer.")

    def forward(self, hidden_states: Tensor | None = None, *_: Any, **arguments: Any) -> None:
        raise _Recorded(arguments if hidden_states is None else {**arguments, "inputs_embeds": hidden_states})


class _Inner(nn.Module):
    """Replaces the `model` attribute of a causal language model, and has only an embedding."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embedding


class MediaTower(nn.Module):
    """Encodes images, videos and audio, one at a time. Not thread-safe."""

    def __init__(self, model: Any) -> None:
        """Take a transformers model, and remove its language model.

        Raises CheckpointError unless the language model is a direct child of the model's body, or is the body itself.
        """
        super().__init__()
        name = type(model).__name__
        self.config = model.config
        decoder = model.get_decoder()
        body = getattr(model, "model", model)
        if not isinstance(body, nn.Module) or decoder is model:
            body = model
        weight = model.get_input_embeddings().weight
        embedding = _Unknown(model.get_input_embeddings(), weight.shape[-1], weight.dtype, weight.device)
        recorder = _Recorder(model.config.get_text_config(), embedding)
        owners = [child for child, each in body.named_children() if each is decoder]
        if owners:
            setattr(body, owners[0], recorder)
        elif decoder is body and isinstance(getattr(body, "layers", None), nn.ModuleList):
            # The body itself embeds the images and contains the layers.
            body.layers = nn.ModuleList([recorder])
            body.embed_tokens = embedding
        else:
            raise CheckpointError(f"{name}: images are not supported: its language model is not a part of its body.")
        self.body = body
        self.size = weight.shape[-1]
        self.mutual = False  # whether tokens of one image attend to each other; set to the result of `try_out`
        self._takes = inspect.signature(body.forward).parameters
        self._rope_index: Any = getattr(body, "get_rope_index", None)

    @property
    def has_axes(self) -> bool:
        """Whether positions have three axes."""
        return self._rope_index is not None

    def encode(self, inputs: Mapping[str, Any]) -> EncodedImage:
        """Return the vectors of one image. `inputs` is the processor's result for the image's placeholder alone.

        Raises ValueError if the model does not call its language model, or adds images to layers in an unsupported way.
        """
        arguments = self._record(inputs)
        embeds = self._embeds(arguments)
        is_media = ~embeds.isnan().any(-1)
        levels = arguments.get("deepstack_visual_embeds") or ()
        if isinstance(levels, Mapping):
            raise ValueError("This model adds images to layers in a way that is not supported.")
        parts = [embeds[is_media], *(level.to(embeds.dtype) for level in levels)]
        return EncodedImage(is_media.cpu().numpy(), torch.cat(parts, dim=-1).float().cpu().numpy())

    def try_out(self, inputs: Mapping[str, Any], name: str, kind: str = "images") -> bool:
        """Encode a trial image, video or audio between two text tokens.

        Return whether the tokens of the item attend to each other. Raises CheckpointError if the language model needs
        more than embeddings and positions on three axes. `kind` is the word for the input in error messages.
        """
        try:
            between = _between_texts(inputs)
            arguments = self._record(between)
            self.encode(inputs)
            if self.has_axes and "mm_token_type_ids" in between:
                grids = {grid: between[grid] for grid in self.grid_names if grid in between}
                self.positions(between["input_ids"][0].numpy(), between["mm_token_type_ids"][0].numpy(), grids)
        except Exception as error:  # model code may raise any exception
            raise CheckpointError(f"{name}: {kind} are not supported: {error}") from error
        more = {key for key, value in arguments.items() if value is not None and not _is_setting(value)} - _PLAIN
        if more:
            raise CheckpointError(
                f"{name}: {kind} are not supported: its language model also reads {', '.join(sorted(more))}."
            )
        is_media = ~self._embeds(arguments).isnan().any(-1)
        if not bool(is_media.any()):
            raise CheckpointError(f"{name}: {kind} are not supported: they do not replace embeddings of tokens.")
        return self._attends_mutually(arguments.get("attention_mask"), is_media, name)

    def _embeds(self, arguments: Mapping[str, Any]) -> Tensor:
        """Return the embeddings [T, E] of a recorded call."""
        embeds = arguments.get("inputs_embeds")
        if not isinstance(embeds, Tensor):
            raise ValueError("its language model takes images in another way than as embeddings.")
        return embeds[0]

    def positions(self, token_ids: NDArray[np.int64], types: NDArray[np.int64], grids: Mapping[str, Tensor]) -> Any:
        """Return the positions of a prompt on three axes, int64 [3, T].

        `types` [T] is the media type of each token (0: text). `grids` has the sizes of all images and videos, under
        `grid_names`. Raises ValueError if the model has further axes whose positions are not the tokens' indices.
        """
        ids = torch.from_numpy(token_ids)[None]
        kinds = torch.from_numpy(types)[None]
        given = {"input_ids": ids, "mm_token_type_ids": kinds, "attention_mask": torch.ones_like(ids), **grids}
        takes = inspect.signature(self._rope_index).parameters
        axes, _ = self._rope_index(**{name: value for name, value in given.items() if name in takes})
        if not bool((axes[:-NUM_AXES, 0] == torch.arange(len(token_ids), device=axes.device)).all()):
            raise ValueError(f"positions have {len(axes)} axes.")
        return axes[-NUM_AXES:, 0].cpu().numpy()

    @property
    def grid_names(self) -> tuple[str, ...]:
        """Names of the processor's results that `positions` takes as `grids`."""
        if self._rope_index is None:
            return ()
        takes = inspect.signature(self._rope_index).parameters
        return tuple(name for name in takes if name.endswith(GRIDS))

    def _record(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        device, dtype = next(self.body.parameters()).device, next(self.body.parameters()).dtype
        given = {}
        takes_all = any(each.kind is each.VAR_KEYWORD for each in self._takes.values())
        for original, value in inputs.items():
            name = original if original in self._takes else _RENAMED.get(original, original)
            if name in self._takes or (takes_all and name in _PASSED_ON):
                if isinstance(value, Tensor):
                    value = value.to(device, dtype) if value.is_floating_point() else value.to(device)
                given[name] = value
        given.pop("attention_mask", None)
        try:
            with torch.inference_mode():
                self.body(**given, use_cache=False)
        except _Recorded as recorded:
            return recorded.arguments
        raise ValueError("The language model was not called.")

    def _attends_mutually(self, mask: Any, is_media: Tensor, name: str) -> bool:
        """Return whether the mask [1, 1, T, T] for the language model lets tokens of an image attend to each other."""
        masks = mask if isinstance(mask, Mapping) else {"": mask}
        masks = {kind: each[0, 0] for kind, each in masks.items() if isinstance(each, Tensor) and each.dim() == 4}
        causal = torch.ones(len(is_media), len(is_media), dtype=torch.bool).tril()
        starts = is_media & ~torch.cat((is_media.new_zeros(1), is_media[:-1]))
        block = torch.where(is_media, starts.cumsum(0), 0).cpu()
        same = (block[:, None] == block[None]) & (block > 0)[:, None]
        mutual: set[str] = set()  # kinds of layers in which tokens of an image attend to each other
        for kind, each in masks.items():
            allowed = (each if each.dtype == torch.bool else each == 0).cpu()
            beyond = allowed & ~causal
            if not beyond.any():
                continue
            if not torch.equal(beyond, same & ~causal):
                raise CheckpointError(f"{name}: images are not supported: its texts attend to later tokens.")
            mutual.add(kind)
        in_windows = self.config.get_text_config().model_type in MUTUAL_IN_WINDOWS
        if mutual and mutual != ({SLIDING} if in_windows else {*masks}):
            kinds = ", ".join(sorted(mutual))
            raise CheckpointError(
                f"{name}: images are not supported: their tokens attend to each other only in {kinds}."
            )
        return bool(mutual)


def _is_setting(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _between_texts(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with one text token before and one after the image's block."""
    longer = dict(inputs)
    block = {*inputs["input_ids"][0].tolist()}
    text = next(token_id for token_id in range(3, 4 + len(block)) if token_id not in block)
    for name in ("input_ids", "mm_token_type_ids", "token_type_ids"):
        if isinstance(longer.get(name), Tensor):
            ends = longer[name].new_full((1, 1), text if name == "input_ids" else TEXT)
            longer[name] = torch.cat((ends, longer[name], ends), dim=1)
    return longer


def load_tower(path: str, loader: Any, config: Any, dtype: torch.dtype, device: torch.device) -> MediaTower:
    """Read the tower of a checkpoint. If possible, only one layer of its language model is read, and then dropped.

    Raises CheckpointError if transformers cannot load the checkpoint.
    """
    smaller = copy.deepcopy(config)
    text = smaller.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", None)
    if isinstance(num_layers, int) and num_layers > 1:
        text.num_hidden_layers = 1
        for name in ("layer_types", "no_rope_layers", "mlp_layer_types", "moe_layers", "mlp_only_layers"):
            values = getattr(text, name, None)
            if isinstance(values, list):
                setattr(text, name, values[:1] if name != "moe_layers" else [each for each in values if each < 1])
    error: Exception | None = None
    for each, attention in ((smaller, "sdpa"), (config, "sdpa"), (smaller, "eager"), (config, "eager")):
        try:
            with quiet():
                model = loader.from_pretrained(
                    path, config=each, dtype=dtype, local_files_only=True, ignore_mismatched_sizes=True,
                    attn_implementation=attention,
                )  # fmt: skip
            break
        except Exception as failure:  # transformers raises errors of many types
            error = error or failure
    else:
        raise CheckpointError(f"transformers cannot load the image encoder of {path}: {error}") from error
    tower = MediaTower(_with_masks(model))
    return tower.eval().requires_grad_(False).to(device)


def _with_masks(model: Any) -> Any:
    """Make the language model build explicit attention masks, so that they can be examined. Return the model."""
    text = model.config.get_text_config()
    text._attn_implementation = "eager"
    return model
