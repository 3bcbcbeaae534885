"""Options about sampling and speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from ops.backends import SAMPLING
from runtime.config.option_spec import Json, option, refused

CHAINS = tuple(f"NGRAM,{method}" for method in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArgs:
    """Sampling."""

    sampling_backend: str | None = option(
        None,
        "Implementation of sampling. On a CPU, pytorch replaces the C++ kernels of sampling. Default: on a CPU, the "
        "C++ kernels where a compiler is installed, else pytorch; on a GPU, triton if the GPU supports it, "
        "else pytorch.",
        choices=(*SAMPLING, "flashinfer"),
        built=tuple(SAMPLING),
        needs={"flashinfer": "an NVIDIA GPU and the flashinfer package"},
        instead="FlashInfer uses its own random numbers, whereas Penstock's seeds give the same tokens with every "
        "implementation; use triton or pytorch",
        sglang="flashinfer if it is installed, else pytorch",
        plan="kernels.sampling_backend",
    )
    preferred_sampling_params: Json | None = option(
        None,
        'JSON object of sampling parameters for requests that do not set them, such as {"temperature": 0.6}. '
        "Default: none.",
        plan="serve.preferred_sampling",
    )
    sampling_defaults: str = option(
        "model",
        "Defaults of sampling parameters in the APIs of OpenAI, Anthropic and Ollama. model: those of the model's "
        "generation_config.json, then the API's. openai: the API's alone.",
        choices=("model", "openai"),
        plan="serve.model_sampling",
    )
    logprobs_mode: str = option(
        "processed_logprobs",
        "Distribution whose log-probabilities are returned for output tokens. processed_logprobs (as SGLang): after "
        "penalties, biases, grammars and temperature, but before top-k, top-p and min-p; greedy requests count as "
        "temperature 1. raw_logprobs (as vLLM): the model's unmodified distribution.",
        choices=("processed_logprobs", "raw_logprobs"),
        plan="kernels.raw_logprobs",
    )
    enable_nan_detection: bool = option(
        False,
        "Log which part of the model first computes non-finite values. A step with such values is recomputed layer by "
        "layer, and steps do not overlap. Requests with such values end with an error even without this option.",
        plan="kernels.nan_detection",
    )
    enable_deterministic_inference: bool = option(
        False,
        "Promise that tokens and log-probabilities of a request do not depend on other requests, chunks or cached "
        "prefixes. On a CPU this holds anyway, except for MLA models: with this option they use absorbed "
        "attention for prompts too, which is slower for long prompts. Refused on a GPU, where products depend on the "
        "batch.",
        plan="model.deterministic",
    )
    rl_on_policy_target: str | None = option(
        None,
        "Make log-probabilities equal those that a trainer (FSDP) computes with transformers' modules in float32, to "
        "1e-5. Implies --enable-deterministic-inference and --dtype float32. Refused on a GPU, for quantised models "
        "and for 8-bit KV caches.",
        choices=("fsdp",),
        plan="model.deterministic",
    )
    enable_custom_logit_processor: bool = refused(
        False,
        "Accept Python code in requests that changes the logits.",
        reason="code from requests would run with all rights of the server",
        instead="use --logits-processors, which names functions of this machine",
    )
    logits_processors: tuple[str, ...] | None = option(
        None,
        "Functions that requests may name as custom_logit_processor, each as package.module.function or "
        "NAME=package.module.function. They are called with (logits, output_ids, custom_params) before each token, "
        "change the logits in place, and have all rights of this process. Default: none.",
        plan="serve.logits_processors",
    )
    enable_return_hidden_states: bool = option(
        False,
        "Allow requests to return the hidden states of their tokens (return_hidden_states). Such requests compute "
        "their whole prompt.",
        plan="serve.returns_hidden",
    )
    enable_return_routed_experts: bool = option(
        False,
        "Allow requests to return the experts that each layer chose for their tokens (return_routed_experts). Such "
        "requests compute their prompt from routed_experts_start_len on.",
        plan="experts.returned",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeArgs:
    """Speculative decoding."""

    speculative_algorithm: str | None = option(
        None,
        "How tokens are drafted. NGRAM: prompt lookup, which proposes the tokens that followed an earlier occurrence "
        "of the last tokens in the same prompt or output; STANDALONE: by a small model; EAGLE, EAGLE3: by a head that "
        "was trained for the model; NEXTN: by the multi-token prediction layer of the model's checkpoint. NGRAM,EAGLE3 "
        "and other pairs: by prompt lookup where text repeats, else by the second. Default: no drafts.",
        choices=("EAGLE", "EAGLE3", "NEXTN", "NGRAM", "STANDALONE", *CHAINS),
        plan="scheduler.max_drafts",
        other_unit=True,
    )
    speculative_config: Json = option(
        {},
        "Settings of speculation in vLLM's form, a JSON object with method (ngram, suffix, draft_model, eagle, eagle3, "
        "mtp), model, revision, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min and "
        "suffix_decoding_max_tree_depth. It sets the options of this group.",
        plan="scheduler.max_drafts",
        other_unit=True,
    )
    speculative_adaptive: Json = option(
        {},
        "JSON object. enabled (default true): measure steps with and without drafts for each number of running "
        "sequences, and draft only where this is faster. min_gain (default 1.0): least quotient of tokens per second "
        "with and without drafts.",
        plan="scheduler.min_draft_gain",
        other_unit=True,
    )
    speculative_draft_model_path: str | None = option(
        None,
        "Folder or Hub repository of the drafting model, which must have the vocabulary of the served model, or of the "
        "draft head. Default: for NEXTN, the served model.",
        aliases=("--speculative-draft-model",),
        plan="draft.path",
    )
    speculative_draft_model_revision: str | None = option(
        None, "Branch, tag or commit of the drafting model.", plan="draft.revision"
    )
    speculative_num_steps: int | None = option(
        None,
        "Number of tokens drafted one after the other. Default: 4.",
        low=1,
        high=64,
        plan="scheduler.max_drafts",
        other_unit=True,
    )
    speculative_eagle_topk: int = option(
        1,
        "Tokens that a drafting model proposes at each step. 1: a chain. Above 1, the chain has alternatives at each "
        "step, which are verified with it; --speculative-num-draft-tokens limits all of them together.",
        low=1,
        high=16,
        plan="scheduler.draft_topk",
        other_unit=True,
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        "Maximum number of drafted tokens per sequence that one step verifies. With a drafting model, the token that "
        "they follow counts too, as in SGLang; in a pair, the number is that of NGRAM. Default: 8 for NGRAM, else 5.",
        low=1,
        high=64,
        plan="scheduler.max_drafts",
        other_unit=True,
    )
    speculative_ngram_min_match_window_size: int = option(
        2,
        "NGRAM: length of the shortest n-gram that is looked up.",
        low=1,
        high=64,
        plan="scheduler.draft_windows",
        other_unit=True,
    )
    speculative_ngram_max_match_window_size: int = option(
        8,
        "NGRAM: length of the longest n-gram that is looked up. If it has not occurred before, shorter n-grams are "
        "looked up.",
        low=1,
        high=64,
        plan="scheduler.draft_windows",
        other_unit=True,
        sglang="12",
    )
    speculative_ngram_match_type: str = option(
        "BFS",
        "NGRAM: which continuation of an n-gram is proposed if there are several. BFS: the most recent one. PROB: the "
        "most frequent one.",
        choices=("BFS", "PROB"),
        plan="scheduler.drafts_by_frequency",
    )
    speculative_ngram_min_bfs_breadth: int = option(
        1,
        "NGRAM: maximum number of continuations of the longest n-grams that one step verifies. PROB ignores it.",
        low=1,
        high=16,
        plan="scheduler.draft_breadths",
        other_unit=True,
    )
    speculative_ngram_max_bfs_breadth: int = option(
        1,
        "NGRAM: maximum number of continuations of the shortest n-grams that one step verifies. Above 1, drafts are "
        "a tree of up to --speculative-num-draft-tokens ids.",
        low=1,
        high=16,
        plan="scheduler.draft_breadths",
        other_unit=True,
        sglang="10",
    )
    speculative_ngram_max_trie_depth: int | None = option(
        None,
        "NGRAM: lowers --speculative-ngram-max-match-window-size to this number - 1. Default: it is not lowered.",
        low=2,
        high=65,
        plan="scheduler.draft_windows",
        other_unit=True,
        sglang="18",
    )
    speculative_ngram_capacity: int = option(
        10_000_000,
        "NGRAM: maximum number of states of a request's index, which has at most two per token. Beyond it, the older "
        "tokens of the request are no longer looked up.",
        low=1024,
        plan="scheduler.draft_capacity",
        other_unit=True,
    )
    speculative_ngram_branch_length: int | None = option(
        None,
        "NGRAM: longest run of tokens that is proposed. Default: --speculative-num-draft-tokens.",
        low=1,
        high=64,
        plan="scheduler.max_lookup_drafts",
        other_unit=True,
        sglang="18",
    )
    speculative_ngram_external_corpus_path: str | None = option(
        None,
        "NGRAM: file with texts in which tokens are looked up too, one JSON string per line. The id of this corpus is "
        "the path. More corpora can be added at run time with /add_external_corpus.",
        plan="draft.corpus_path",
    )
    speculative_ngram_external_sam_budget: int | None = option(
        None,
        "NGRAM: maximum number of drafted tokens per sequence and step that come from corpora. 0: no corpora. Default: "
        "--speculative-num-draft-tokens.",
        low=0,
        high=64,
        plan="scheduler.max_corpus_drafts",
        other_unit=True,
        sglang="0",
    )
    speculative_ngram_external_corpus_max_tokens: int = option(
        10_000_000,
        "NGRAM: maximum number of tokens of all corpora. A token takes up to 40 bytes of host memory.",
        low=1,
        high=100_000_000,
        plan="draft.max_corpus_tokens",
    )
    speculative_accept_threshold_single: float = option(
        1.0,
        "In drawn outputs, accept a drafted token if the model gives it at least this probability. Below 1, outputs no "
        "longer have the model's distribution.",
        low=0,
        high=1,
        plan="draft.accept_single",
    )
    speculative_accept_threshold_acc: float = option(
        1.0,
        "In drawn outputs, accept a drafted token of probability p with probability p divided by this number. Below 1, "
        "outputs no longer have the model's distribution.",
        above=0,
        high=1,
        plan="draft.accept_divisor",
    )
    speculative_token_map: str | None = option(
        None,
        "EAGLE, NEXTN: file with the ids of frequent tokens, a list in JSON or in a .pt file. The draft head then "
        "proposes only these tokens, so its LM head is smaller and faster. Default: all tokens.",
        plan="draft.token_map",
    )
    speculative_attention_mode: str = option(
        "decode",
        "Attention backend that verifies drafts, if those of prefill and decode differ. Outputs equal those of plain "
        "decoding only with decode.",
        choices=("prefill", "decode"),
        plan="kernels.choices",
        other_unit=True,
        sglang="prefill",
    )
