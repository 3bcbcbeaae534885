"""A draft head's LM head that has only the rows of frequent tokens (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from ops.select import Kernels
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.errors import ConfigurationError
from runtime.layers.build import Build
from runtime.layers.embedding import Embedding
from runtime.layers.lm_head import LMHead
from runtime.layers.weight import frozen
from runtime.loading.loader import open_tensors
from runtime.loading.staged_weights import replace_parameters, shell_of
from runtime.modeling.decoder import Decoder

MAX_FILE_BYTES = 64 * 2**20
FLAG = "--speculative-token-map"


def read_token_map(path: str, vocab_size: int) -> Tensor:
    """Return the token ids in a file, ascending, int64 [n]. A `.pt` file has a list or a tensor; others a JSON list.

    Raises `ConfigurationError` if the file cannot be read, is empty, or has ids outside the vocabulary.
    """
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise ConfigurationError(f"{FLAG}: {path} is larger than {MAX_FILE_BYTES} bytes.")
        if path.endswith(".pt"):
            found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        ids = torch.as_tensor(found)
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ConfigurationError(f"{FLAG}: {path} cannot be read as a list of token ids: {error}") from error
    is_list = ids.dim() == 1 and len(ids) > 0 and not (ids.is_floating_point() or ids.dtype == torch.bool)
    if not is_list or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ConfigurationError(f"{FLAG}: {path} must be a list of token ids below {vocab_size}.")
    return ids.long().unique()  # sorted


def head_of_tokens(target: Decoder, facts: ModelFacts, plan: ModelPlan, kernels: Kernels, ids: Tensor) -> LMHead:
    """Return an unquantised LM head with the rows `ids` of the LM head of `target`, read from the checkpoint.

    Raises `ConfigurationError` if `target` has no LM head in a checkpoint, or if the LM head has a bias.
    """
    head, embedding = target.head, target.embedding
    if head is None or embedding is None or plan.load_format == "dummy" or head.has_bias or head.unit:
        raise ConfigurationError(f"{FLAG} needs a model with an LM head without bias, in a checkpoint; leave it out.")
    stored = lm_head_tensor(target)
    tensors = open_tensors(facts, plan)
    if stored not in tensors.shapes:
        raise ConfigurationError(f"{FLAG}: {facts.path} has no tensor {stored}, from which the rows are read.")
    rows: list[Tensor] = []
    tensors.read_all(lambda name, number, tensor: rows.append(tensor[ids]), {stored: [()]})
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    build = Build(kernels, plan.context_length, device)
    with torch.device("meta"):
        sizes = Embedding("", len(ids), embedding.size, build)
        small = LMHead(head.name, sizes, build, tied=False, scale=head.scale, soft_cap=head.soft_cap)
    small.weight = frozen(rows[0].to(device, dtype))
    small.prepare()
    return small


def lm_head_tensor(model: Decoder) -> str:
    """Return the name, in the model, of the tensor with the rows of the LM head, which may be the embedding's."""
    layer = model.embedding if model.head is None or model.head.tied else model.head
    return "" if layer is None else f"{layer.name}.weight"


class TokenRows:
    """The LM head of `head_of_tokens`, whose rows are replaced when the model's LM head changes."""

    def __init__(self, head: LMHead, ids: Tensor, name: str) -> None:
        """`ids` int64 [n] are the tokens of the rows of `head`. The tensor `name` has the rows of all tokens."""
        self._head, self._ids, self.name = head, ids, name

    def replace(self, whole: Tensor) -> None:
        """Replace the rows by those of a whole LM head [V, E]."""
        outline = shell_of(self._head, whole.dtype, whole.device)
        outline.weight = frozen(whole[self._ids.to(whole.device)])
        outline.prepare()
        replace_parameters(self._head, outline)
