"""Options about how the next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import Json, OptionSpec, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArgs:
    """Sampling."""

    sampling_backend: Annotated[
        str | None,
        OptionSpec(
            "Implementation of top-k, top-p and min-p sampling. Default: pytorch.",
            choices=("flashinfer", "pytorch", "triton"),
            built=("pytorch", "triton"),
            needs={"flashinfer": "an NVIDIA GPU and the flashinfer package"},
            instead="FlashInfer draws random numbers of its own and keeps all of equal tokens, and here a seed gives "
            "the same tokens with every implementation; use pytorch or triton",
            plan="kernels.sampling_backend",
        ),
    ] = None
    preferred_sampling_params: Annotated[
        Json | None,
        OptionSpec(
            "JSON object of sampling parameters for requests that do not set them, such as "
            '{"temperature": 0.6}. Default: none.',
            plan="serve.preferred_sampling",
        ),
    ] = None
    enable_nan_detection: Annotated[
        bool,
        planned("Look for logits that are not numbers in every step, and end the requests that have them."),
    ] = False
    enable_custom_logit_processor: Annotated[
        bool,
        planned(
            "Accept Python code with a request that changes the logits.",
            instead="use logit_bias; executing code from requests is not safe",
        ),
    ] = False
    enable_return_hidden_states: Annotated[
        bool, planned("Allow requests to ask for the hidden states of their tokens.")
    ] = False
