"""Beam search with vLLM's interface: `LLM.beam_search`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain

from ops.progress import shown_bar
from runtime.errors import InvalidRequest
from serve.calls.prompts import MAX_PROMPTS
from serve.python.sync_engine import SyncEngine


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search.

    The score of a beam is the sum of its log-probabilities, divided by length ** `length_penalty`. The length counts
    the tokens of prompt and output, except the end-of-text token. `include_stop_str_in_output` keeps the end-of-text
    token in the result.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. `tokens` has the token ids of the prompt and the output, and `text` has their text."""

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search(
    engine: SyncEngine, prompts: Sequence[Sequence[int]], params: BeamSearchParams, *, progress: bool = False
) -> list[BeamSearchOutput]:
    """Run a beam search from each prompt, given as token ids.

    Each step extends all beams of all prompts by one token. `progress` shows a bar that counts steps. Raises
    `InvalidRequest` for unsupported parameters.
    """
    if params.beam_width < 1 or params.max_tokens < 1:
        raise InvalidRequest("beam_width and max_tokens must be at least 1.", param="beam_width")
    if params.temperature:
        raise InvalidRequest("Beam search supports temperature=0 only.", param="temperature")
    tokenizer = engine.get_tokenizer()
    eos = None if params.ignore_eos else tokenizer.eos_token_id
    beams = [[BeamSearchSequence(list(prompt))] for prompt in prompts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    with shown_bar(params.max_tokens, "Beam search", unit="token") if progress else nullcontext() as bar:
        for _ in range(params.max_tokens):
            if not _extend(engine, params, eos, beams, ended):
                break
            if bar is not None:
                bar.update()
    outputs = []
    for mine, over in zip(beams, ended, strict=True):
        for beam in mine:
            beam.finish_reason = "length"
        best = sorted([*over, *mine], key=lambda beam: -_score(beam, eos, params))[: params.beam_width]
        for beam in best:
            beam.text = tokenizer.decode(beam.tokens)
        outputs.append(BeamSearchOutput(best))
    return outputs


def _extend(
    engine: SyncEngine,
    params: BeamSearchParams,
    eos: int | None,
    beams: list[list[BeamSearchSequence]],
    ended: list[list[BeamSearchSequence]],
) -> bool:
    """Extend all beams by one token, and move finished beams to `ended`. Return False if no beam is left to extend."""
    running = [beam for each in beams for beam in each]
    if not running:
        return False
    answers = chain.from_iterable(
        engine.generate(
            input_ids=[beam.tokens for beam in running[first : first + MAX_PROMPTS]],
            sampling_params={"max_new_tokens": 1, "ignore_eos": True, "temperature": 0},
            return_logprob=True,
            top_logprobs_num=2 * params.beam_width,
        )
        for first in range(0, len(running), MAX_PROMPTS)
    )
    for number, mine in enumerate(beams):
        longer: list[BeamSearchSequence] = []
        for beam in mine:
            for logprob, token, _ in next(answers).meta_info["output_top_logprobs"][0]:
                new = BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + logprob)
                new.logprobs = [*beam.logprobs, logprob]
                if token == eos:
                    new.finish_reason = "stop"
                    if not params.include_stop_str_in_output:
                        new.tokens.pop()
                    ended[number].append(new)
                else:
                    longer.append(new)
        longer.sort(key=lambda beam: -beam.cum_logprob)
        beams[number] = longer[: params.beam_width]
    return True


def _score(beam: BeamSearchSequence, eos: int | None, params: BeamSearchParams) -> float:
    length = len(beam.tokens) - (beam.tokens[-1] == eos)
    return beam.cum_logprob / length**params.length_penalty
