"""vLLM's engine arguments: conversion to Penstock's options, `EngineArgs`, and a command-line parser."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from runtime.errors import ConfigurationError
from serve.python.options import add_arguments, word_types
from serve.python.sync_engine import SyncEngine

# vLLM's keywords -> Penstock's options with the same values.
RENAMED: Mapping[str, str] = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "max_model_len": "context_length",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "block_size": "page_size",
    "seed": "random_seed",
    "enforce_eager": "disable_cuda_graph",
    "hf_overrides": "json_model_override_args",
    "max_loras": "max_loras_per_batch",
    "max_cpu_loras": "max_loaded_loras",
    "enable_expert_parallel": "enable_ep_moe",
}
# vLLM's keywords -> the values that match Penstock's behaviour, and the advice in the error for any other value.
FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "runner": (("auto", "generate", "pooling"), "leave it out"),
    "task": (("auto", "generate", "embed", "embedding", "classify", "score", "reward"), "leave it out"),
    "convert": (("auto", "none", "embed"), "convert the checkpoint to a classifier first"),
    "tokenizer_mode": (("auto", "hf", "slow"), "give a checkpoint with a tokenizer.json"),
    "config_format": (("auto", "hf"), "give a checkpoint with a config.json"),
    "generation_config": (("auto",), "give every sampling parameter"),
    "distributed_executor_backend": (("mp", "uni"), "leave it out: Penstock starts one process per rank"),
    "enable_prompt_embeds": ((False,), "give prompts as text or token ids"),
    "disable_chunked_mm_input": ((False, True), "leave it out"),
    "max_logprobs": ((20,), "leave it out: the API's own limit applies"),
}


@dataclass(slots=True, kw_only=True)
class ProfilerConfig:
    """vLLM's `profiler_config`: the folder for the traces of `LLM.start_profile`.

    The profile covers `max_iterations` steps, or lasts until `LLM.stop_profile` if this is 0. `delay_iterations` above
    0 is not supported: `LLM.start_profile` then raises `InvalidRequest`.
    """

    profiler: str = "torch"
    torch_profiler_dir: str | None = None
    delay_iterations: int = 0
    max_iterations: int = 0

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return a `ProfilerConfig`, converted from a dict if necessary.

        Raises `ConfigurationError` for unknown keys, and for a profiler other than torch.
        """
        try:
            made = config if isinstance(config, cls) else cls(**config)
        except TypeError as error:
            raise ConfigurationError(f"profiler_config: {error}.") from None
        if made.profiler != "torch":
            raise ConfigurationError(f"profiler_config: the profiler must be torch, not {made.profiler!r}.")
        return made

    def options(self) -> dict[str, Any]:
        """Return the options of `Engine.start_profile`."""
        values: dict[str, Any] = {}
        if self.torch_profiler_dir is not None:
            values["output_dir"] = self.torch_profiler_dir
        if self.delay_iterations:
            values["start_step"] = self.delay_iterations
        if self.max_iterations:
            values["num_steps"] = self.max_iterations
        return values


@dataclass(slots=True)
class EngineSettings:
    """Settings converted from vLLM's keywords: Penstock's options, and settings that are no option of Penstock."""

    options: dict[str, Any] = field(default_factory=dict)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    logits_processors: tuple[Any, ...] = ()

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Convert vLLM's keywords, except those whose value is None.

        Raises `ConfigurationError` for unsupported values.
        """
        settings = cls()
        for name, value in keywords.items():
            if value is not None:
                settings._take(name, value)
        return settings

    def start(self) -> SyncEngine:
        """Start an engine with these options."""
        engine = SyncEngine(**self.options)
        engine.start()
        return engine

    def _take(self, name: str, value: Any) -> None:
        if name in FIXED:
            accepted, advice = FIXED[name]
            if value not in accepted:
                raise ConfigurationError(f"{name}={value!r} is not supported; {advice}.")
        elif name == "profiler_config":
            self.profiler = ProfilerConfig.of(value)
        elif name == "logits_processors":
            if isinstance(value, str) or not all(isinstance(each, type) for each in value):
                raise ConfigurationError("logits_processors must be a list of classes, not of their names.")
            self.logits_processors = tuple(value)
        elif name == "enable_prefix_caching":
            self._set("disable_radix_cache", not value)
        elif name == "enable_chunked_prefill":
            if not value:
                self._set("chunked_prefill_size", -1)
        elif name == "disable_log_stats":
            self._set("enable_metrics", not value)
        else:
            self._set(RENAMED.get(name, name), value)

    def _set(self, own: str, value: Any) -> None:
        if own in self.options:
            raise ConfigurationError(f"{own} is given twice.")
        self.options[own] = value


class EngineArgs:
    """vLLM's `EngineArgs`: the arguments of an engine, as attributes. An argument that was not given is None.

    The keywords are those of `LLM`: Penstock's option names and vLLM's names.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        self.keywords = {"model": model, **keywords}

    def __getattr__(self, name: str) -> Any:
        if name != "keywords" and (name in self.keywords or name in _types()):
            return self.keywords.get(name)
        raise AttributeError(f"EngineArgs has no {name}.")

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.keywords.items() if value is not None)
        return f"{type(self).__name__}({given})"

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option, under Penstock's name and under vLLM's name, and return the parser.

        Every flag's default is None, which means the engine's own default.
        """
        return add_arguments(parser, _types())

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Create `EngineArgs` from the parsed arguments that belong to the engine."""
        return cls(**{name: getattr(args, name) for name in _types() if getattr(args, name, None) is not None})


AsyncEngineArgs = EngineArgs


@cache
def _types() -> Mapping[str, tuple[Any, bool]]:
    """Map each argument to (its type on a command line, whether it takes several values)."""
    found = word_types()
    for name, own in RENAMED.items():
        found[name] = found[own]
    for name, (accepted, _) in FIXED.items():
        found[name] = (type(accepted[0]), False)
    for name in ("enable_prefix_caching", "enable_chunked_prefill", "disable_log_stats"):
        found[name] = (bool, False)
    found["profiler_config"] = (json.loads, False)
    return found


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A command-line parser that accepts underscores instead of hyphens in flag names: `--max_model_len 512`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        import sys

        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_hyphenated(word) for word in words], namespace)


def _hyphenated(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
