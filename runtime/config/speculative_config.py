"""Converts vLLM's JSON settings of speculative decoding (--speculative-config) to Penstock's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.errors import ConfigurationError

FLAG = "--speculative-config"
_METHODS = {
    "ngram": "NGRAM",
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "suffix": "NGRAM",
}
_OPTIONS = {
    "model": "speculative_draft_model_path",
    "revision": "speculative_draft_model_revision",
    "prompt_lookup_max": "speculative_ngram_max_match_window_size",
    "prompt_lookup_min": "speculative_ngram_min_match_window_size",
    "suffix_decoding_max_tree_depth": "speculative_ngram_max_trie_depth",
}
# vLLM's settings of the draft step that Penstock does not support. Only the value given here (or null) is accepted.
_NEUTRAL = {
    "enforce_eager": False,
    "parallel_drafting": False,
    "disable_padded_drafter_batch": False,
    "suffix_decoding_max_cached_requests": 0,
}


def as_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return option values by name. Raises `ConfigurationError` for an unsupported key or method."""
    config = {key: value for key, value in config.items() if key not in _NEUTRAL or value not in (None, _NEUTRAL[key])}
    keys = ("method", "num_speculative_tokens", *_OPTIONS)
    unknown = [key for key in config if key not in keys]
    if unknown:
        raise ConfigurationError(f"{FLAG}: {', '.join(unknown)} cannot be used; supported keys: {', '.join(keys)}.")
    method = config.get("method") or ("draft_model" if "model" in config else None)
    if method not in _METHODS:
        raise ConfigurationError(f"{FLAG}: method must be {', '.join(_METHODS)}, not {method!r}.")
    options = {option: config[key] for key, option in _OPTIONS.items() if key in config}
    options["speculative_algorithm"] = _METHODS[method]
    if method == "suffix":
        options["speculative_ngram_match_type"] = "PROB"
    if "num_speculative_tokens" in config:
        name = "speculative_num_draft_tokens" if method in ("ngram", "suffix") else "speculative_num_steps"
        options[name] = config["num_speculative_tokens"]
    return options
