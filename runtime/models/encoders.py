"""Table of encoder architectures. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from runtime.modeling.entry import Entry

_LAYER_NORM = {"layer_norm_eps": "rms_norm_eps"}

_BERT = {"hidden_act": "gelu", "max_position_embeddings": 512, "rms_norm_eps": 1e-12}


def _bert(prefix: str, *, spelling: str | None = None, scores: bool = False) -> Entry:
    """Return the entry of an encoder like BERT. Tensors of the pretraining heads are not loaded."""
    unused = "cls|lm_head" if scores else "pooler|cls|lm_head"
    return Entry(
        "bert",
        _BERT,
        encoder=True,
        renamed=_LAYER_NORM,
        tensors={
            rf"({prefix}\.)?embeddings\.position_ids": None,
            rf"({prefix}\.)?({unused})\.": None,
            rf"({prefix}\.)?(.*LayerNorm)\.gamma": r"\2.weight",  # names in TensorFlow
            rf"({prefix}\.)?(.*LayerNorm)\.beta": r"\2.bias",
            rf"{prefix}\.": "",
        },
        spelling=spelling,
        scores=scores,
    )


_ROBERTA = _bert("roberta", spelling="roberta")
_ROBERTA_SCORES = _bert("roberta", spelling="roberta", scores=True)


def _modernbert(*, scores: bool = False) -> Entry:
    return Entry(
        "modernbert",
        {
            "hidden_act": "gelu",
            "local_attention": 128,
            "max_position_embeddings": 8192,
            "norm_bias": False,
            "rms_norm_eps": 1e-5,
        },
        encoder=True,
        renamed={"norm_eps": "rms_norm_eps", "hidden_activation": "hidden_act"},
        tensors={
            r"model\.(layers\.\d+\.mlp\.)Wo\.": r"\1down_proj.",
            r"(layers\.\d+\.mlp\.)Wo\.": r"\1down_proj.",
            r"model\.": "",
            r"decoder\.": None,
            **({} if scores else {r"head\.": None}),
        },
        spelling="modernbert",
        scores=scores,
    )


def _distilbert(*, scores: bool = False) -> Entry:
    """Return the entry of DistilBERT: BERT's layers with other names and without token types."""
    layer = r"(distilbert\.)?transformer\.(layer\.\d+)\."
    parts = {
        "attention.q_lin": "attention.self.query",
        "attention.k_lin": "attention.self.key",
        "attention.v_lin": "attention.self.value",
        "attention.out_lin": "attention.output.dense",
        "sa_layer_norm": "attention.output.LayerNorm",
        "ffn.lin1": "intermediate.dense",
        "ffn.lin2": "output.dense",
        "output_layer_norm": "output.LayerNorm",
    }
    return Entry(
        "bert",
        {**_BERT, "type_vocab_size": 0},
        encoder=True,
        renamed={
            "activation": "hidden_act",
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
        },
        tensors={
            **{layer + re.escape(name) + r"\.": rf"encoder.\2.{usual}." for name, usual in parts.items()},
            r"vocab_(transform|layer_norm|projector)\.": None,
            r"distilbert\.": "",
        },
        scores=scores,
    )


_MPNET = Entry(
    "bert",
    {**_BERT, "relative_attention_num_buckets": 32, "type_vocab_size": 0},
    captured=False,  # torch computes attention with a bias, and CPU graphs cannot capture torch
    encoder=True,
    renamed=_LAYER_NORM,
    tensors={
        r"(mpnet\.)?embeddings\.position_ids": None,
        r"(mpnet\.)?(pooler|lm_head)\.": None,
        r"(mpnet\.)?(encoder\.layer\.\d+\.attention\.)attn\.q\.": r"\2self.query.",
        r"(mpnet\.)?(encoder\.layer\.\d+\.attention\.)attn\.k\.": r"\2self.key.",
        r"(mpnet\.)?(encoder\.layer\.\d+\.attention\.)attn\.v\.": r"\2self.value.",
        r"(mpnet\.)?(encoder\.layer\.\d+\.attention\.)attn\.o\.": r"\2output.dense.",
        r"(mpnet\.)?(encoder\.layer\.\d+\.attention\.)LayerNorm\.": r"\2output.LayerNorm.",
        r"mpnet\.": "",
    },
    spelling="roberta",
)

_NOMIC = Entry(
    "nomic_bert",
    {"max_position_embeddings": 2048, "rms_norm_eps": 1e-12, "rope_theta": 1000.0, "type_vocab_size": 2},
    encoder=True,
    renamed={
        **_LAYER_NORM,
        "layer_norm_epsilon": "rms_norm_eps",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "rotary_emb_base": "rope_theta",
    },
    tensors={
        r"(nomic_bert\.|bert\.)?(cls|pooler|lm_head)\.": None,
        r"(nomic_bert\.|bert\.)?(encoder\.layers\.\d+\.mlp\.)fc11\.": r"\2up_proj.",
        r"(nomic_bert\.|bert\.)?(encoder\.layers\.\d+\.mlp\.)fc12\.": r"\2gate_proj.",
        r"(nomic_bert\.|bert\.)?(encoder\.layers\.\d+\.mlp\.)fc2\.": r"\2down_proj.",
        r"(nomic_bert|bert)\.": "",
    },
)

ENCODERS: Mapping[str, Entry] = {
    "BertModel": _bert("bert"),
    "BertForMaskedLM": _bert("bert"),
    "BertForPreTraining": _bert("bert"),
    "BertForSequenceClassification": _bert("bert", scores=True),
    "CamembertModel": _ROBERTA,
    "CamembertForMaskedLM": _ROBERTA,
    "CamembertForSequenceClassification": _ROBERTA_SCORES,
    "DistilBertModel": _distilbert(),
    "DistilBertForMaskedLM": _distilbert(),
    "DistilBertForSequenceClassification": _distilbert(scores=True),
    "MPNetModel": _MPNET,
    "MPNetForMaskedLM": _MPNET,
    "MPNetForSequenceClassification": replace(_MPNET, scores=True),
    "ModernBertModel": _modernbert(),
    "ModernBertForMaskedLM": _modernbert(),
    "ModernBertForSequenceClassification": _modernbert(scores=True),
    "NomicBertModel": _NOMIC,
    "NomicBertForMaskedLM": _NOMIC,
    "RobertaModel": _ROBERTA,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA_SCORES,
    "XLMRobertaModel": _ROBERTA,
    "XLMRobertaForMaskedLM": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA_SCORES,
}
