"""Tiny random encoders, written by transformers, with a tokenizer and the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EPS = {"layer_norm_eps": 1e-3}  # large enough to affect results
_DISTIL = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}
CONFIGS: dict[str, Any] = {
    "bert": lambda **own: BertConfig(**SHAPE, **EPS, **own),
    "roberta": lambda **own: RobertaConfig(**{**SHAPE, "pad_token_id": 1}, **EPS, type_vocab_size=1, **own),
    "xlm-roberta": lambda **own: XLMRobertaConfig(**{**SHAPE, "pad_token_id": 1}, **EPS, type_vocab_size=1, **own),
}
CONFIGS["modernbert"] = lambda **own: ModernBertConfig(
    **SHAPE, norm_eps=1e-3, local_attention=12, cls_token_id=1, sep_token_id=2, **own
)
CONFIGS["distilbert"] = lambda **own: DistilBertConfig(
    **{_DISTIL.get(name, name): value for name, value in SHAPE.items()}, **own
)
CONFIGS["mpnet"] = lambda **own: MPNetConfig(**{**SHAPE, "pad_token_id": 1}, **EPS, **own)
CONFIGS["nomic_bert"] = lambda **own: NomicBertConfig(**SHAPE, **EPS, **own)
CLS, SEP = 94, 93  # not 1, which is RoBERTa's padding and has its own position
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}w3"
    "{% if enable_thinking is false %} w4{% endif %}"
)


def redraw(model: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """Draw matrices large enough that every part matters, and norms and biases different from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(noise * 0.2 + (1.0 if is_norm else 0.0))
    return model.eval()


def save(folder: Path, kind: str, *, num_labels: int = 0, **own: Any) -> PreTrainedModel:
    """Write a checkpoint of this kind (a classifier if it has labels), and return the transformers model."""
    if num_labels:
        config = CONFIGS[kind](num_labels=num_labels, **own)
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModel.from_config(CONFIGS[kind](**own))
    redraw(model).save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer: words w3 to w90, yes and no, [CLS] before a text, and [SEP] after each text of a pair."""
    words = {f"w{index}": index for index in range(3, 91)} | {"yes": 91, "no": 92}
    words |= {"[PAD]": 0, "[SEP]": SEP, "[CLS]": CLS, "[UNK]": 95}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_sentence_files(
    folder: Path,
    *,
    pooling: dict[str, Any],
    normalize: bool = True,
    dense: tuple[torch.Tensor, torch.Tensor] | None = None,
    max_tokens: int | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
) -> None:
    """Write the files of sentence-transformers to a checkpoint."""
    from safetensors.torch import save_file

    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    for module in modules:
        (folder / str(module["path"])).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": max_tokens, "do_lower_case": False})
    )
    if dense is not None:
        weight, bias = dense
        save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense/model.safetensors")
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": True}
        activation = "torch.nn.modules.activation.Tanh"
        (folder / "2_Dense/config.json").write_text(json.dumps({**sizes, "activation_function": activation}))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts or {}, "default_prompt_name": default_prompt})
    )
