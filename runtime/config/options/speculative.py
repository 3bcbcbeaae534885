"""Options about speculative decoding: drafting several tokens and checking them in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import planned


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeArgs:
    """Speculative decoding."""

    speculative_algorithm: Annotated[
        str | None,
        planned(
            "How tokens are drafted: by layers trained for the model (EAGLE, EAGLE3, NEXTN) or by a small "
            "model (STANDALONE). Default: no drafts.",
            choices=("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"),
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        planned("Folder or Hub repository of the drafting model.", aliases=("--speculative-draft-model",)),
    ] = None
    speculative_draft_model_revision: Annotated[
        str | None, planned("Branch, tag or commit of the drafting model.")
    ] = None
    speculative_num_steps: Annotated[int | None, planned("Tokens drafted one after the other.", low=1)] = None
    speculative_eagle_topk: Annotated[
        int | None, planned("Alternatives drafted at each position; 1 drafts a single chain.", low=1)
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None, planned("Drafted tokens checked in one step.", low=1)
    ] = None
    speculative_accept_threshold_single: Annotated[
        float,
        planned(
            "Accept a drafted token at once if the model gives it at least this probability.", low=0, high=1
        ),
    ] = 1.0
    speculative_accept_threshold_acc: Annotated[
        float,
        planned("Divisor of the probability with which other drafted tokens are accepted.", above=0, high=1),
    ] = 1.0
    speculative_token_map: Annotated[
        str | None, planned("File with the frequent tokens to which drafts are limited.")
    ] = None
    speculative_attention_mode: Annotated[
        str,
        planned("Whose attention backend checks the drafts.", choices=("prefill", "decode")),
    ] = "prefill"
