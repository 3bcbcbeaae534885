"""Options about how the next tokens are chosen, and drafted ahead."""

from __future__ import annotations

from dataclasses import dataclass

from ops.backends import SAMPLING
from runtime.config.option_spec import Json, option, planned
from runtime.config.plan import KernelPlan, ServePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArgs:
    """Sampling."""

    sampling_backend: str | None = option(
        None,
        "Implementation of the choice of tokens. Default: triton on a GPU that runs it, else pytorch.",
        choices=(*SAMPLING, "flashinfer"),
        built=tuple(SAMPLING),
        needs={"flashinfer": "an NVIDIA GPU and the flashinfer package"},
        instead="FlashInfer draws random numbers of its own and keeps all of equal tokens, and here a seed "
        "gives the same tokens with every implementation; use triton or pytorch",
        sglang="flashinfer where it is installed, else pytorch",
        plan=KernelPlan.sampling_backend,
    )
    preferred_sampling_params: Json | None = option(
        None,
        'JSON object of sampling parameters for requests that do not set them, such as {"temperature": 0.6}. '
        "Default: none.",
        plan=ServePlan.preferred_sampling,
    )
    logprobs_mode: str = option(
        "processed_logprobs",
        "Of which distribution log-probabilities of the output are. processed_logprobs: of the one that tokens are "
        "drawn from before top-k, top-p and min-p, hence after penalties, biases, grammars and the temperature (greedy "
        "requests count as temperature 1), as SGLang's; raw_logprobs: of the model's own, as vLLM's.",
        choices=("processed_logprobs", "raw_logprobs"),
        plan=KernelPlan.raw_logprobs,
    )
    enable_nan_detection: bool = option(
        False,
        "Log in which part of the model values stop being finite numbers: such a step is computed again, layer by "
        "layer, and every step is waited for. Requests that meet such values are ended with an error in any case.",
        plan=KernelPlan.nan_detection,
    )
    enable_custom_logit_processor: bool = planned(
        False,
        "Accept Python code with a request that changes the logits.",
        instead="use logit_bias; executing code from requests is not safe",
    )
    enable_return_hidden_states: bool = planned(
        False, "Allow requests to ask for the hidden states of their tokens."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeArgs:
    """Speculative decoding."""

    speculative_algorithm: str | None = planned(
        None,
        "How tokens are drafted: by layers trained for the model (EAGLE, EAGLE3, NEXTN) or by a small model "
        "(STANDALONE). Default: no drafts.",
        choices=("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"),
    )
    speculative_draft_model_path: str | None = planned(
        None, "Folder or Hub repository of the drafting model.", aliases=("--speculative-draft-model",)
    )
    speculative_draft_model_revision: str | None = planned(
        None, "Branch, tag or commit of the drafting model."
    )
    speculative_num_steps: int | None = planned(None, "Tokens drafted one after the other.", low=1)
    speculative_eagle_topk: int | None = planned(
        None, "Alternatives drafted at each position; 1 drafts a single chain.", low=1
    )
    speculative_num_draft_tokens: int | None = planned(None, "Drafted tokens checked in one step.", low=1)
    speculative_accept_threshold_single: float = planned(
        1.0, "Accept a drafted token at once if the model gives it at least this probability.", low=0, high=1
    )
    speculative_accept_threshold_acc: float = planned(
        1.0, "Divisor of the probability with which other drafted tokens are accepted.", above=0, high=1
    )
    speculative_token_map: str | None = planned(
        None, "File with the frequent tokens to which drafts are limited."
    )
    speculative_attention_mode: str = planned(
        "prefill", "Whose attention backend checks the drafts.", choices=("prefill", "decode")
    )
