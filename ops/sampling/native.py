"""Sampling in torch: the reference in tests, and fast enough to serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.sampling import Masks, SamplingArrays, Scores

# Rows with at most this top_k are drawn without sorting the whole vocabulary.
MAX_BEST = 1024
# On the host, rows with top_p and without top_k are first drawn from this number of best tokens, which usually include
# all tokens that top_p keeps.
FIRST_BEST = 256
# A uniform number u represents the interval [u, u + 2**-24), and draws use the middle of the interval. Its lower end,
# for example 0 or 0.5, could be exactly at a boundary between two tokens, and select a token of almost no probability.
HALF_STEP = 2**-25
# Rows are computed in pieces of at most this number of logits. Temporary tensors take about 40 bytes per logit: 2.5 MiB
# on the host, where small pieces stay in the processor's cache and reuse memory, and 1.3 GiB on a device.
HOST_PIECE, DEVICE_PIECE = 2**16, 2**25
# Exponents are clamped to this minimum. exp(-80) is 0 in fixed point, and exp(-inf) would take three times as long.
LEAST_EXPONENT = -80.0
_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
# float32 [256, 8]: for each value of a bitmask's byte, upper bounds on the logits of its eight tokens: inf or -inf.
LIMITS = np.where(_BYTES == 1, np.float32(np.inf), np.float32(-np.inf))


class Rows(NamedTuple):
    """Some rows of a step, ascending."""

    host: Tensor  # int64 [n]
    index: slice | Tensor  # on the device of the logits; a slice if the rows are adjacent


def choose(
    logits: Tensor,
    arrays: SamplingArrays,
    host: SamplingArrays | None = None,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    if masks is not None:
        apply_bitmask(logits, *masks)
    vocab_size, on_host = logits.shape[-1], _is_host(logits)
    host = arrays if host is None else host
    if bool((host.top_n_sigma > 0).any()):
        logits = _within_sigmas(logits, arrays.top_n_sigma, host.top_n_sigma)
    typical = (host.typical_p < 1) & ~host.greedy
    if bool(typical.any()):
        logits = _typical(logits, arrays, typical)
    if bool(host.greedy.any()):
        peak, ids = _largest_logit(logits)
        if bool(host.greedy.all()):
            return _sound(ids, peak)
    else:
        peak, ids = logits.amax(-1), torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    kinds = _kinds(host, vocab_size)
    order = None  # int64 [R] on a device: rows sorted by kind, so that no row indices are copied from the host
    if not on_host and len(kinds.unique()) > 1:
        order = _kinds(arrays, vocab_size).argsort(stable=True)
    for rows in _pieces(kinds, UNTRUNCATED, order, logits):
        _put(ids, rows, _draw(*_take(rows, logits, peak, arrays)))
    for rows in _pieces(kinds, FEW, order, logits):
        width = int(host.top_k[rows.host].max())
        _put(ids, rows, _draw_ranked(*_take(rows, logits, peak, arrays), width)[0])
    for rows in _pieces(kinds, BY_MASS, order, logits):
        taken = _take(rows, logits, peak, arrays)
        # On a device, draw from the whole ranking: `_draw_by_mass` reads a result, and so would wait for the device.
        _put(ids, rows, _draw_by_mass(*taken) if on_host else _draw_ranked(*taken, vocab_size)[0])
    for rows in _pieces(kinds, MANY, order, logits):
        _put(ids, rows, _draw_ranked(*_take(rows, logits, peak, arrays), vocab_size)[0])
    return _sound(ids, peak)


def _within_sigmas(logits: Tensor, top_n_sigma: Tensor, host: Tensor) -> Tensor:
    """Return a copy of `logits` with -inf for the tokens that `top_n_sigma` drops."""
    kept = logits.clone()
    rows = (host > 0).nonzero()[:, 0]
    for piece in _slices(len(rows), logits):
        index = to_device(rows[piece], logits.device)
        x = kept[index]
        drop = x.amax(-1).double() - top_n_sigma[index].double() * _standard_deviations(x)
        kept.index_copy_(0, index, x.masked_fill_(x < drop[:, None], -torch.inf))
    return kept


def _typical(logits: Tensor, arrays: SamplingArrays, host_rows: Tensor) -> Tensor:
    """Return a copy of `logits` with -inf for tokens that `typical_p` drops, in the rows of `host_rows` (bool [R])."""
    kept, vocab_size = logits.clone(), logits.shape[-1]
    rows = host_rows.nonzero()[:, 0]
    for piece in _slices(len(rows), logits):
        index = to_device(rows[piece], logits.device)
        x, temperature = kept[index], arrays.temperature[index]
        peak = x.amax(-1)
        below = x.sub(peak[:, None]).div_(temperature[:, None]).clamp_(min=LEAST_EXPONENT).neg_()
        weights = below.neg().exp_()
        fixed = _fixed(weights, vocab_size)
        mass = fixed.sum(-1)
        # A token's surprise is `below` plus a constant of the row, and the entropy is the mean surprise. The constant
        # cancels in their difference.
        mean = _fixed(weights * below, vocab_size).sum(-1).double() / mass.double()
        order = (below.double() - mean[:, None]).abs_().sort(dim=-1, stable=True).indices
        ordered = fixed.gather(-1, order)
        need = (arrays.typical_p[index].double() * mass.double()).ceil().long()
        is_kept = torch.zeros_like(x, dtype=torch.bool)
        is_kept.scatter_(-1, order, ordered.cumsum(-1) - ordered < need[:, None])
        is_kept |= ~peak.isfinite()[:, None]  # leave rows that are not sound as they are
        kept.index_copy_(0, index, x.masked_fill_(~is_kept, -torch.inf))
    return kept


def _standard_deviations(logits: Tensor) -> Tensor:
    """Return the standard deviation of each row's finite logits, float64 [R], independent of the order of summation."""
    below = logits.amax(-1, keepdim=True).double() - logits  # float64 [R, V]
    finite = below.isfinite()
    below.masked_fill_(~finite, 0)
    unit = below.amax(-1)  # distances divided by `unit` are in [0, 1], and can be summed in fixed point
    fixed = 2.0 ** fraction_bits(logits.shape[-1])
    below /= torch.where(unit > 0, unit, 1)[:, None]
    count = finite.sum(-1)
    mean, square = ((part * fixed).long().sum(-1) / fixed / count for part in (below, below * below))
    return unit * (square - mean * mean).clamp(min=0).sqrt()


# Kinds of rows. GREEDY rows take the best token, and UNTRUNCATED rows draw from all tokens. The other kinds draw from a
# ranking: FEW rows from at most MAX_BEST tokens (top_k), BY_MASS rows from the tokens that top_p keeps, MANY rows from
# more tokens (top_k, XTC).
GREEDY, UNTRUNCATED, FEW, BY_MASS, MANY = range(5)


def _kinds(arrays: SamplingArrays, vocab_size: int) -> Tensor:
    """Return the kind of each row, int64 [R], on the device of the arrays."""
    unlimited = arrays.top_k >= vocab_size
    kinds = torch.where(unlimited, BY_MASS, MANY)
    kinds = torch.where(arrays.top_k <= MAX_BEST, FEW, kinds)
    kinds = torch.where(unlimited & (arrays.top_p >= 1), UNTRUNCATED, kinds)
    kinds = torch.where(unlimited & (arrays.xtc_probability > 0), MANY, kinds)
    return torch.where(arrays.greedy, GREEDY, kinds)


def _largest_logit(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (largest logit of each row, its id). NaN counts as largest."""
    if not _is_host(logits):
        return logits.max(-1)
    ids = torch.from_numpy(logits.numpy().argmax(-1))  # numpy is about ten times faster
    return logits.gather(-1, ids[:, None])[:, 0], ids


def _sound(ids: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    sound = peak.isfinite()  # the maximum of a row is NaN if any of its logits is NaN
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
    vocab_size = logits.shape[1]
    if _is_host(logits):  # numpy unpacks bits 100 times faster
        values, allowed, indices = logits.numpy(), bitmask.contiguous().numpy().view(np.uint8), rows.numpy()
        for piece in _slices(len(indices), logits):
            limits = np.take(LIMITS, allowed[piece], axis=0).reshape(-1, 8 * allowed.shape[1])[:, :vocab_size]
            first = int(indices[piece.start])
            adjacent = values[first : first + len(limits)]
            if np.array_equal(indices[piece], np.arange(first, first + len(limits))):  # adjacent rows: without a copy
                np.minimum(adjacent, limits, out=adjacent)
            else:
                values[indices[piece]] = np.minimum(values[indices[piece]], limits)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask.unsqueeze(2) >> shifts & 1).flatten(1)[:, :vocab_size]  # [Q, V]
    logits.index_copy_(0, rows, logits[rows].masked_fill_(allowed == 0, -torch.inf))


def score(logits: Tensor, temperature: Tensor, chosen_ids: Tensor, num_top: int, requested_ids: Tensor) -> Scores:
    pieces = [
        _score(logits[piece], temperature[piece], chosen_ids[piece], num_top, requested_ids[piece])
        for piece in _slices(len(logits), logits)
    ]
    return Scores(*(torch.cat(parts) for parts in zip(*pieces)))


def _score(logits: Tensor, temperature: Tensor, chosen_ids: Tensor, num_top: int, requested_ids: Tensor) -> Scores:
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
    """Return the `count` largest logits of each row and their ids [R, count]. Equal logits are ranked by lower id."""
    vocab_size = logits.shape[-1]
    if count == 0:
        return logits[:, :0], torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    if not _is_host(logits) or count >= min(vocab_size, MAX_BEST):
        ids = _best_by_keys(logits, count)
        return logits.gather(-1, ids), ids
    values, ids = logits.topk(count + 1)
    is_tied = values[:, count - 1] == values[:, count]  # then topk may have chosen an equal logit of a higher id
    ids = ids[:, :count].sort(-1).values
    order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(-1, order)
    if bool(is_tied.any()):
        ids[is_tied] = _best_by_keys(logits[is_tied], count)
    return logits.gather(-1, ids), ids


def _best_by_keys(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest logits of each row, int64 [R, count], equal logits by lower id.

    Tokens are ranked by an integer key, which has the logit in its upper bits and the reversed id in its lower bits.
    """
    vocab_size = logits.shape[-1]
    id_bits = (vocab_size - 1).bit_length()
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # the order of these integers is the order of the floats
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = torch.add(reversed_ids, bits, alpha=1 << id_bits)  # int64 [R, V], all distinct
    return vocab_size - 1 - (_largest(keys, count) & ((1 << id_bits) - 1))


def _largest(keys: Tensor, count: int) -> Tensor:
    """Return the `count` largest keys of each row, in descending order."""
    if _is_host(keys) and count > MAX_BEST:  # numpy sorts integers about ten times faster
        return torch.from_numpy(~np.sort(~keys.numpy(), axis=-1)[:, :count])
    return keys.topk(count).values if count < keys.shape[-1] else keys.sort(-1, descending=True).values


def _draw(logits: Tensor, peak: Tensor, arrays: SamplingArrays) -> Tensor:
    """Draw from all tokens that min_p keeps, in order of ids, without a ranking."""
    weights = _weights(logits, peak, arrays.temperature)
    if not _is_host(logits) or bool(arrays.min_p.any()):
        weights.masked_fill_(weights < arrays.min_p[:, None], 0)
    mass_to = _fixed(weights, logits.shape[-1]).cumsum(-1)
    return _invert(mass_to, mass_to[:, -1], arrays.uniform)


def probabilities(logits: Tensor, arrays: SamplingArrays, ids: Tensor) -> Tensor:
    """Return the probability with which each row draws the token `ids` [R], float64 [R].

    `ids` is int64. XTC is ignored, and greedy rows are treated like other rows. The result of a row that is not sound
    is arbitrary.
    """
    if bool((arrays.top_n_sigma > 0).any()):
        logits = _within_sigmas(logits, arrays.top_n_sigma, arrays.top_n_sigma.cpu())
    typical = arrays.typical_p < 1
    if bool(typical.any()):
        logits = _typical(logits, arrays, typical.cpu())
    vocab_size, found = logits.shape[-1], []
    for piece in _slices(len(logits), logits):
        own = SamplingArrays(*(field[piece] for field in arrays))
        values, ranked = best(logits[piece], vocab_size)
        weights = _weights(values, logits[piece].amax(-1), own.temperature)
        fixed = _fixed(weights, vocab_size)
        mass_to, kept = _kept(weights, fixed, own)
        num_kept = kept.sum(-1).clamp(min=1)
        rank = (ranked == ids[piece, None]).long().argmax(-1)
        own_mass = fixed.gather(-1, rank[:, None])[:, 0].double()
        whole = mass_to.gather(-1, num_kept[:, None] - 1)[:, 0].double()
        found.append(torch.where(rank < num_kept, own_mass / whole, 0))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64, device=logits.device)


def _kept(weights: Tensor, fixed: Tensor, arrays: SamplingArrays) -> tuple[Tensor, Tensor]:
    """Return (cumulative mass, whether the limits keep the token) of all tokens in ranked order, both [R, V]."""
    mass_to = fixed.cumsum(-1)
    last = arrays.top_k.clamp(max=fixed.shape[-1]).long() - 1
    mass = mass_to.gather(-1, last[:, None])[:, 0]
    limit = torch.where(arrays.top_p < 1, (arrays.top_p.double() * mass.double()).ceil().long(), mass)
    return mass_to, (mass_to - fixed < limit[:, None]) & (weights >= arrays.min_p[:, None])


def second_uniform(uniform: Tensor) -> Tensor:
    """Return a second number in [0, 1) for each uniform number: a hash of its 24 bits (MurmurHash3's finaliser)."""
    x = (uniform.double() * 2**24).long() + 0x9E3779B9
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFF_FFFF
    return ((x ^ (x >> 16)) >> 8).double() * 2.0**-24


def _draw_ranked(logits: Tensor, peak: Tensor, arrays: SamplingArrays, width: int) -> tuple[Tensor, Tensor]:
    """Draw one of the `width` best tokens, except those that the limits exclude.

    Return (ids, whether the id is valid), both [R]. An id is invalid if the limits may also allow tokens outside the
    `width` best ones. Each limit keeps a prefix of the ranking, so all limits together keep the shortest of these
    prefixes.
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
    dropped = None
    if not _is_host(logits) or bool(arrays.xtc_probability.any()):
        dropped = _dropped_mass(mass_to, fixed, kept, mass_kept, arrays)
    drawn = ids.gather(-1, _invert(mass_to, mass_kept, arrays.uniform, dropped)[:, None])[:, 0]
    return drawn, is_ranked | (num_kept < width) | (width == vocab_size)


def _dropped_mass(mass_to: Tensor, fixed: Tensor, kept: Tensor, mass_kept: Tensor, arrays: SamplingArrays) -> Tensor:
    """Return the mass [R] of the tokens that XTC drops, which are the first in the ranking."""
    need = (arrays.xtc_threshold.double() * mass_kept.double()).ceil().long()
    num_likely = (kept & (fixed >= need[:, None])).sum(-1)
    is_drawn = second_uniform(arrays.uniform) < arrays.xtc_probability
    num_dropped = torch.where(is_drawn, num_likely - 1, 0).clamp(min=0)
    mass = mass_to.gather(-1, (num_dropped - 1).clamp(min=0)[:, None])[:, 0]
    return torch.where(num_dropped > 0, mass, 0)


def _draw_by_mass(logits: Tensor, peak: Tensor, arrays: SamplingArrays) -> Tensor:
    """Draw from FIRST_BEST tokens if they include all tokens that the limits keep, else from all tokens. Host only."""
    ids, covered = _draw_ranked(logits, peak, arrays, FIRST_BEST)
    missed = (~covered).nonzero()[:, 0]
    if len(missed):
        rows = Rows(missed, missed)
        _put(ids, rows, _draw_ranked(*_take(rows, logits, peak, arrays), logits.shape[-1])[0])
    return ids


def _invert(mass_to: Tensor, mass: Tensor, uniform: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return the first index [R] whose cumulative mass in `mass_to` [R, n] exceeds `uniform` times `mass` [R].

    With `dropped` [R], tokens at the start of the ranking that together have this mass cannot be drawn.
    """
    part = mass if dropped is None else mass - dropped
    target = ((uniform.double() + HALF_STEP) * part.double()).long()
    target = torch.minimum(target, part - 1)  # the product may have been rounded up
    if dropped is not None:
        target += dropped
    index = torch.searchsorted(mass_to, target[:, None], right=True)[:, 0]
    return index.clamp(max=mass_to.shape[-1] - 1)  # larger only in rows that are not sound


def _weights(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """Return the weights exp((logit - peak) / temperature), at least exp(-80). The best token has exactly 1."""
    return logits.sub(peak[:, None]).div_(temperature[:, None]).clamp_(min=LEAST_EXPONENT).exp_()


def _fixed(weights: Tensor, vocab_size: int) -> Tensor:
    """Return weights in fixed point (int64), so that sums do not depend on the order of summation."""
    return weights.mul(2.0 ** fraction_bits(vocab_size)).long()


def fraction_bits(vocab_size: int) -> int:
    return 62 - (vocab_size - 1).bit_length()


def _pieces(kinds: Tensor, kind: int, order: Tensor | None, logits: Tensor) -> Iterator[Rows]:
    """Yield the rows of this kind in pieces (see `HOST_PIECE`)."""
    rows = (kinds == kind).nonzero()[:, 0]
    first = int((kinds < kind).sum()) if order is not None else 0  # first row of this kind in `order`
    for piece in _slices(len(rows), logits):
        host = rows[piece]
        begin, count = int(host[0]), len(host)
        if int(host[-1]) - begin + 1 == count:
            yield Rows(host, slice(begin, begin + count))
        else:
            yield Rows(host, host if order is None else order[first + piece.start : first + piece.start + count])


def _slices(count: int, logits: Tensor) -> Iterator[slice]:
    limit = HOST_PIECE if _is_host(logits) else DEVICE_PIECE
    size = max(1, limit // logits.shape[-1])
    for first in range(0, count, size):
        yield slice(first, first + size)


def _take(rows: Rows, logits: Tensor, peak: Tensor, arrays: SamplingArrays) -> tuple[Tensor, Tensor, SamplingArrays]:
    """Return these rows of `logits`, `peak` and `arrays`: views if the rows are adjacent, otherwise copies."""
    return logits[rows.index], peak[rows.index], SamplingArrays(*(field[rows.index] for field in arrays))


def _put(ids: Tensor, rows: Rows, drawn: Tensor) -> None:
    ids[rows.index] = drawn


def _is_host(logits: Tensor) -> bool:
    return logits.device.type == "cpu"


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to the device without waiting for earlier work of the device."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
