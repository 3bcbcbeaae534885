"""What the results of a step mean for its sequences."""

from __future__ import annotations

from collections.abc import Callable

from runtime.batch import Batch, StepOutput
from runtime.request import Delta, Finish, Logprobs, Usage
from runtime.sequence import Sequence

NOT_FINITE = "The model computed values that are not finite numbers."

Retire = Callable[[Sequence, Finish, bool], None]  # the last value: whether its KV is to be trusted


def apply_tokens(batch: Batch, output: StepOutput, retire: Retire) -> list[Delta]:
    """Append the sampled tokens and end the sequences that are done; rows of ended sequences are dropped.

    A retracted sequence is not ended: its pending token arrives here as any other.
    """
    for row, logprobs in output.prompt_logprobs:
        _append_prompt_logprobs(batch.sequences[row], logprobs)
    broken = frozenset(output.failed)
    logprobs_of_rows = output.logprobs
    deltas: list[Delta] = []
    for row, (sequence, new) in enumerate(zip(batch.sequences, output.tokens)):
        if sequence.finish is not None:
            continue
        if not new or row in broken:
            finish = _finish_without_token(batch, row, broken)
            if finish is not None:
                retire(sequence, finish, row not in broken)
                deltas.append(final_delta(sequence, finish))
            continue
        [token] = new
        ids = sequence.ids
        ids.append(token)
        sequence.num_pending -= 1
        num_tokens, num_prompt = len(ids), sequence.num_prompt
        finish = None
        if token in sequence.stop_ids:
            finish = Finish("stop", matched=token)
        elif num_tokens >= sequence.max_tokens:
            finish = Finish("length", length=sequence.max_tokens - num_prompt)
        if finish is not None:
            retire(sequence, finish, True)
        deltas.append(
            Delta(
                sequence.request.id,
                sequence.index,
                [token],
                finish,
                Usage(num_prompt, num_tokens - num_prompt, sequence.num_cached),
                None if logprobs_of_rows is None else logprobs_of_rows[row],
                sequence.prompt_logprobs,
            )
        )
        sequence.prompt_logprobs = None
    return deltas


def final_delta(sequence: Sequence, finish: Finish) -> Delta:
    """The last word on a sequence, without a new token."""
    num_output = len(sequence.ids) - sequence.num_prompt
    usage = Usage(sequence.num_prompt, num_output, max(sequence.num_cached, 0))
    prompt_logprobs = sequence.prompt_logprobs if finish.kind == "length" else None
    return Delta(sequence.request.id, sequence.index, [], finish, usage, None, prompt_logprobs)


def _finish_without_token(batch: Batch, row: int, broken: frozenset[int]) -> Finish | None:
    sequence = batch.sequences[row]
    if row in broken:
        return Finish("abort", message=NOT_FINITE)
    end = int(batch.starts[row]) + int(batch.counts[row])
    if end == sequence.max_tokens:  # only a prompt without output is computed to its last token
        return Finish("length", length=0)
    return None


def _append_prompt_logprobs(sequence: Sequence, more: Logprobs) -> None:
    known = sequence.prompt_logprobs
    if known is not None and sequence.finish is None:
        known.chosen.extend(more.chosen)
        known.top.extend(more.top)
        known.picked.extend(more.picked)
