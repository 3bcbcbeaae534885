"""Which encoders there are. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.models.entry import Entry

_LAYER_NORM = {"layer_norm_eps": "rms_norm_eps"}

_BERT = {"hidden_act": "gelu", "max_position_embeddings": 512, "rms_norm_eps": 1e-12}


def _bert(prefix: str, *, spelling: str | None = None, scores: bool = False) -> Entry:
    """Of BERT's shape; what predicts hidden words and the next sentence is not needed."""
    unused = "cls|lm_head" if scores else "pooler|cls|lm_head"
    return Entry(
        "bert",
        _BERT,
        encoder=True,
        cuttable=False,
        renamed=_LAYER_NORM,
        tensors={
            rf"({prefix}\.)?embeddings\.position_ids": None,
            rf"({prefix}\.)?({unused})\.": None,
            rf"({prefix}\.)?(.*LayerNorm)\.gamma": r"\2.weight",  # as TensorFlow called them
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
        cuttable=False,
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


ENCODERS: Mapping[str, Entry] = {
    "BertModel": _bert("bert"),
    "BertForMaskedLM": _bert("bert"),
    "BertForPreTraining": _bert("bert"),
    "BertForSequenceClassification": _bert("bert", scores=True),
    "CamembertModel": _ROBERTA,
    "CamembertForMaskedLM": _ROBERTA,
    "CamembertForSequenceClassification": _ROBERTA_SCORES,
    "ModernBertModel": _modernbert(),
    "ModernBertForMaskedLM": _modernbert(),
    "ModernBertForSequenceClassification": _modernbert(scores=True),
    "RobertaModel": _ROBERTA,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA_SCORES,
    "XLMRobertaModel": _ROBERTA,
    "XLMRobertaForMaskedLM": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA_SCORES,
}
