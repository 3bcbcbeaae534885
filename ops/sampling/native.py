"""Choosing tokens in plain torch: the truth in tests, and good enough to serve from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.sampling import Masks, SamplingArrays, Scores

# A row that keeps few tokens is served from its best ones and needs no sort of the whole vocabulary.
MAX_BEST = 1024
# On the host, rows limited by top_p alone try this many best tokens first.
FIRST_BEST = 256
# A uniform float32 number stands for a step of 2**-24, and is taken to be in its middle. Else the numbers 0
# and 0.5 would meet the edges between tokens, where tokens may lie that should almost never be chosen.
HALF_STEP = 2**-25
# Logits worked on at once. Temporaries take about 40 bytes for each: 2.5 MiB on the host, where small pieces stay in
# the processor's cache and in memory that the process has already, and 1.3 GiB on a device.
HOST_PIECE, DEVICE_PIECE = 2**16, 2**25
LEAST_EXPONENT = -80.0  # exp of it is 0 in fixed point, and takes a third of the time of exp(-inf)
_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
# float32 [256, 8]: what the eight logits of a byte of a bitmask may be at most.
LIMITS = np.where(_BYTES == 1, np.float32(np.inf), np.float32(-np.inf))


class Rows(NamedTuple):
    """Some rows of a step, ascending."""

    host: Tensor  # int64 [n]
    index: slice | Tensor  # for tensors that lie where the logits do; a slice where the rows lie together


def choose(
    logits: Tensor,
    arrays: SamplingArrays,
    host: SamplingArrays | None = None,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick one token for each row; see `ops.sampling`."""
    if masks is not None:
        apply_bitmask(logits, *masks)
    vocab_size, on_host = logits.shape[-1], _is_host(logits)
    host = arrays if host is None else host
    if bool(host.greedy.any()):
        peak, ids = _largest_logit(logits)
        if bool(host.greedy.all()):
            return _sound(ids, peak)
    else:
        peak, ids = logits.amax(-1), torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    kinds = _kinds(host, vocab_size)
    order = None  # on a device, rows in the order of their kinds, which saves a copy of their indices
    if not on_host and len(kinds.unique()) > 1:
        order = _kinds(arrays, vocab_size).argsort(stable=True)
    for rows in _pieces(kinds, UNTRUNCATED, order, logits):
        _put(ids, rows, _draw(*_take(rows, logits, peak, arrays)))
    for rows in _pieces(kinds, FEW, order, logits):
        width = int(host.top_k[rows.host].max())
        _put(ids, rows, _draw_ranked(*_take(rows, logits, peak, arrays), width)[0])
    for rows in _pieces(kinds, BY_MASS, order, logits):
        taken = _take(rows, logits, peak, arrays)
        # To see on a device whether the mass is covered would mean to wait.
        _put(ids, rows, _draw_by_mass(*taken) if on_host else _draw_ranked(*taken, vocab_size)[0])
    for rows in _pieces(kinds, MANY, order, logits):
        _put(ids, rows, _draw_ranked(*_take(rows, logits, peak, arrays), vocab_size)[0])
    return _sound(ids, peak)


# How a row is drawn: from all tokens; from few of the best ones; from those that top_p alone keeps; from many.
GREEDY, UNTRUNCATED, FEW, BY_MASS, MANY = range(5)


def _kinds(arrays: SamplingArrays, vocab_size: int) -> Tensor:
    """How each row is drawn, int64 [R], where the arrays lie."""
    unlimited = arrays.top_k >= vocab_size
    kinds = torch.where(unlimited, BY_MASS, MANY)
    kinds = torch.where(arrays.top_k <= MAX_BEST, FEW, kinds)
    kinds = torch.where(unlimited & (arrays.top_p >= 1), UNTRUNCATED, kinds)
    return torch.where(arrays.greedy, GREEDY, kinds)


def _largest_logit(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(the largest logit of each row, its id); NaN is larger than any."""
    if not _is_host(logits):
        return logits.max(-1)
    ids = torch.from_numpy(logits.numpy().argmax(-1))  # numpy finds it some ten times faster
    return logits.gather(-1, ids[:, None])[:, 0], ids


def _sound(ids: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    sound = peak.isfinite()  # the maximum of a row is NaN if any of its logits is
    return torch.where(sound, ids, 0), sound


def penalize(
    logits: Tensor,
    rows: Tensor,
    counted: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
) -> None:
    """Penalise tokens that were seen before, in place; see `ops.sampling`."""
    for piece in _slices(len(rows), logits):
        count = counts[counted[piece]]  # [q, V]
        generated = count > 0
        x = logits[rows[piece]]
        x -= frequency[piece, None] * count
        x -= presence[piece, None] * generated
        seen, factor = generated | in_prompt[counted[piece]], repetition[piece, None]
        x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
        logits.index_copy_(0, rows[piece], x)


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Forbid what a grammar does not allow, in place; see `Masks`."""
    vocab_size = logits.shape[1]
    if _is_host(logits):  # numpy unpacks bits a hundred times faster
        lines, allowed, places = logits.numpy(), bitmask.contiguous().numpy().view(np.uint8), rows.numpy()
        for piece in _slices(len(places), logits):
            limits = np.take(LIMITS, allowed[piece], axis=0).reshape(-1, 8 * allowed.shape[1])[:, :vocab_size]
            first = int(places[piece.start])
            together = lines[first : first + len(limits)]
            if np.array_equal(places[piece], np.arange(first, first + len(limits))):  # no copy is needed
                np.minimum(together, limits, out=together)
            else:
                lines[places[piece]] = np.minimum(lines[places[piece]], limits)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask.unsqueeze(2) >> shifts & 1).flatten(1)[:, :vocab_size]  # [Q, V]
    logits.index_copy_(0, rows, logits[rows].masked_fill_(allowed == 0, -torch.inf))


def score(
    logits: Tensor, temperature: Tensor, chosen_ids: Tensor, num_top: int, requested_ids: Tensor
) -> Scores:
    """Log-softmax at some tokens; see `ops.sampling`."""
    pieces = [
        _score(logits[piece], temperature[piece], chosen_ids[piece], num_top, requested_ids[piece])
        for piece in _slices(len(logits), logits)
    ]
    return Scores(*(torch.cat(parts) for parts in zip(*pieces)))


def _score(
    logits: Tensor, temperature: Tensor, chosen_ids: Tensor, num_top: int, requested_ids: Tensor
) -> Scores:
    vocab_size = logits.shape[-1]
    peak = logits.amax(-1)
    mass = _fixed(_weights(logits, peak, temperature), vocab_size).sum(-1)
    log_mass = (mass.double() / 2.0 ** fraction_bits(vocab_size)).log()

    def log_softmax(values: Tensor) -> Tensor:  # [R, n] -> [R, n]
        shifted = (values.double() - peak.double()[:, None]) / temperature.double()[:, None]
        return (shifted - log_mass[:, None]).float()

    top, top_ids = best(logits, min(num_top, vocab_size))
    chosen = log_softmax(logits.gather(-1, chosen_ids[:, None]))[:, 0]
    return Scores(chosen, log_softmax(top), top_ids, log_softmax(logits.gather(-1, requested_ids)))


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row and their ids [R, count], equal ones by lower id.

    torch's own top-k leaves the order of equal values open, and rounded logits are often equal. So the rows
    are ranked by an integer that holds the logit in its upper bits and the id, reversed, in its lower ones.
    """
    vocab_size = logits.shape[-1]
    if count == 0:
        return logits[:, :0], torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    id_bits = (vocab_size - 1).bit_length()
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # now the integers are in the order of the floats
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = torch.add(reversed_ids, bits, alpha=1 << id_bits)  # int64 [R, V], all distinct
    ids = vocab_size - 1 - (_largest(keys, count) & ((1 << id_bits) - 1))
    return logits.gather(-1, ids), ids


def _largest(keys: Tensor, count: int) -> Tensor:
    """The `count` largest keys of each row, descending."""
    if _is_host(keys) and count > MAX_BEST:  # numpy sorts integers some ten times faster
        return torch.from_numpy(~np.sort(~keys.numpy(), axis=-1)[:, :count])
    return keys.topk(count).values if count < keys.shape[-1] else keys.sort(-1, descending=True).values


def _draw(logits: Tensor, peak: Tensor, arrays: SamplingArrays) -> Tensor:
    """Draw from all tokens that reach min_p, in order of ids: needs no ranking."""
    weights = _weights(logits, peak, arrays.temperature)
    if not _is_host(logits) or bool(arrays.min_p.any()):
        weights.masked_fill_(weights < arrays.min_p[:, None], 0)
    mass_to = _fixed(weights, logits.shape[-1]).cumsum(-1)
    return _invert(mass_to, mass_to[:, -1], arrays.uniform)


def _draw_ranked(logits: Tensor, peak: Tensor, arrays: SamplingArrays, width: int) -> tuple[Tensor, Tensor]:
    """Draw from the kept ones among the `width` best tokens.

    Also returns whether all kept tokens were among these; else the draw is void. Every limit keeps a prefix
    of the ranking, so together they keep the shortest of these prefixes.
    """
    vocab_size = logits.shape[-1]
    width = min(width, vocab_size)
    values, ids = best(logits, width)
    weights = _weights(values, peak, arrays.temperature)
    fixed = _fixed(weights, vocab_size)
    mass_to = fixed.cumsum(-1)  # [R, width]

    is_ranked = arrays.top_k <= width
    last = arrays.top_k.clamp(max=width).long() - 1
    mass = mass_to.gather(-1, last[:, None])[:, 0]
    if width < vocab_size:
        whole = _fixed(_weights(logits, peak, arrays.temperature), vocab_size).sum(-1)
        mass = torch.where(is_ranked, mass, whole)
    part = (arrays.top_p.double() * mass.double()).ceil().long()
    limit = torch.where(arrays.top_p < 1, part, mass)

    kept = (mass_to - fixed < limit[:, None]) & (weights >= arrays.min_p[:, None])
    num_kept = kept.sum(-1).clamp(min=1)
    mass_kept = mass_to.gather(-1, num_kept[:, None] - 1)[:, 0]
    drawn = ids.gather(-1, _invert(mass_to, mass_kept, arrays.uniform)[:, None])[:, 0]
    return drawn, is_ranked | (num_kept < width) | (width == vocab_size)


def _draw_by_mass(logits: Tensor, peak: Tensor, arrays: SamplingArrays) -> Tensor:
    """Draw from a few of the best tokens where these hold all that is kept, else from all. Host only."""
    ids, covered = _draw_ranked(logits, peak, arrays, FIRST_BEST)
    missed = (~covered).nonzero()[:, 0]
    if len(missed):
        rows = Rows(missed, missed)
        _put(ids, rows, _draw_ranked(*_take(rows, logits, peak, arrays), logits.shape[-1])[0])
    return ids


def _invert(mass_to: Tensor, mass: Tensor, uniform: Tensor) -> Tensor:
    """The first index [R] whose cumulated mass [R, n] exceeds `uniform` times `mass` [R]."""
    target = ((uniform.double() + HALF_STEP) * mass.double()).long()
    target = torch.minimum(target, mass - 1)  # the product may have been rounded up
    index = torch.searchsorted(mass_to, target[:, None], right=True)[:, 0]
    return index.clamp(max=mass_to.shape[-1] - 1)  # only rows that are not sound get here


def _weights(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """exp((logit - peak) / temperature), at most 1, which the best token has exactly; next to 0 where it is 0."""
    return logits.sub(peak[:, None]).div_(temperature[:, None]).clamp_(min=LEAST_EXPONENT).exp_()


def _fixed(weights: Tensor, vocab_size: int) -> Tensor:
    """Weights as integers, whose sums do not depend on the order."""
    return weights.mul(2.0 ** fraction_bits(vocab_size)).long()


def fraction_bits(vocab_size: int) -> int:
    return 62 - (vocab_size - 1).bit_length()


def _pieces(kinds: Tensor, kind: int, order: Tensor | None, logits: Tensor) -> Iterator[Rows]:
    """The rows of this kind in pieces of bounded size."""
    rows = (kinds == kind).nonzero()[:, 0]
    first = int((kinds < kind).sum()) if order is not None else 0  # of this kind, in `order`
    for piece in _slices(len(rows), logits):
        host = rows[piece]
        begin, count = int(host[0]), len(host)
        if int(host[-1]) - begin + 1 == count:
            yield Rows(host, slice(begin, begin + count))
        else:
            yield Rows(
                host, host if order is None else order[first + piece.start : first + piece.start + count]
            )


def _slices(count: int, logits: Tensor) -> Iterator[slice]:
    limit = HOST_PIECE if _is_host(logits) else DEVICE_PIECE
    size = max(1, limit // logits.shape[-1])
    for first in range(0, count, size):
        yield slice(first, first + size)


def _take(
    rows: Rows, logits: Tensor, peak: Tensor, arrays: SamplingArrays
) -> tuple[Tensor, Tensor, SamplingArrays]:
    """These rows of everything; the logits without a copy where they lie together."""
    return logits[rows.index], peak[rows.index], SamplingArrays(*(field[rows.index] for field in arrays))


def _put(ids: Tensor, rows: Rows, drawn: Tensor) -> None:
    ids[rows.index] = drawn


def _is_host(logits: Tensor) -> bool:
    return logits.device.type == "cpu"


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor without waiting for the device."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
