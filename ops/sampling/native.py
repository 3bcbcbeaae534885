"""Choosing tokens in plain torch: the truth in tests, and good enough to serve from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ops.sampling import Choice, Scores

# A row that keeps few tokens is served from its best ones and needs no sort of the whole vocabulary.
MAX_HEAD = 1024
# On the host, rows limited by top_p alone try this many best tokens first.
FIRST_HEAD = 256
# A uniform float32 number stands for a step of 2**-24, and is taken to be in its middle. Else the numbers 0
# and 0.5 would meet the edges between tokens, where tokens may lie that should almost never be chosen.
HALF_STEP = 2**-25
# Logits worked on at once. Temporaries take about 40 bytes for each: about 40 MiB on the host, where small
# pieces stay in the processor's cache, and 1.3 GiB on a device.
HOST_PIECE, DEVICE_PIECE = 2**20, 2**25


def choose(logits: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Pick one token for each row; see `ops.sampling.Choose`."""
    vocab_size = logits.shape[-1]
    greedy, top_k = choice.greedy, choice.top_k
    if bool(greedy.any()):
        peak, ids = _largest_logit(logits)
        if bool(greedy.all()):
            return _sound(ids, peak)
    else:
        peak, ids = logits.amax(-1), torch.zeros(len(logits), dtype=torch.int64, device=logits.device)

    untruncated = (top_k >= vocab_size) & (choice.top_p >= 1)
    headed = (top_k <= MAX_HEAD) & ~untruncated
    hopeful = (top_k >= vocab_size) & ~headed & ~untruncated
    if logits.device.type != "cpu":  # to see whether the mass is covered would mean to wait
        hopeful = torch.zeros_like(hopeful)

    for rows in _pieces(~greedy & untruncated, logits):
        _put(ids, rows, _draw(*_take(rows, logits, peak, choice)))
    for rows in _pieces(~greedy & headed, logits):
        width = int(top_k[rows].max())
        _put(ids, rows, _draw_ranked(*_take(rows, logits, peak, choice), width)[0])
    for rows in _pieces(~greedy & hopeful, logits):
        _put(ids, rows, _draw_hopeful(*_take(rows, logits, peak, choice)))
    for rows in _pieces(~greedy & ~untruncated & ~headed & ~hopeful, logits):
        _put(ids, rows, _draw_ranked(*_take(rows, logits, peak, choice), vocab_size)[0])

    return _sound(ids, peak)


def _largest_logit(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(the largest logit of each row, its id); NaN is larger than any."""
    if logits.device.type != "cpu":
        return logits.max(-1)
    ids = torch.from_numpy(logits.numpy().argmax(-1))  # numpy finds it some ten times faster
    return logits.gather(-1, ids[:, None])[:, 0], ids


def _sound(ids: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    sound = peak.isfinite()  # the maximum of a row is NaN if any of its logits is
    return torch.where(sound, ids, 0), sound


def penalize(
    logits: Tensor,
    rows: Tensor,
    lanes: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
) -> None:
    """Penalise tokens that were seen before, in place; see `ops.sampling.Penalize`."""
    for piece in _slices(len(rows), logits):
        count = counts[lanes[piece]]  # [q, V]
        generated = count > 0
        x = logits[rows[piece]]
        x -= frequency[piece, None] * count
        x -= presence[piece, None] * generated
        seen, factor = generated | in_prompt[lanes[piece]], repetition[piece, None]
        x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
        logits.index_copy_(0, rows[piece], x)


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Forbid what a grammar does not allow, in place; see `ops.sampling.ApplyBitmask`."""
    vocab_size = logits.shape[1]
    if _is_host(logits):  # numpy unpacks bits a hundred times faster
        forbidden = np.unpackbits(
            ~bitmask.contiguous().numpy().view(np.uint8), axis=1, bitorder="little", count=vocab_size
        ).view(bool)
        lines = logits.numpy()
        for line, row in enumerate(rows.tolist()):
            np.copyto(lines[row], -np.inf, where=forbidden[line])
        return
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask.unsqueeze(2) >> shifts & 1).flatten(1)[:, :vocab_size]  # [Q, V]
    logits.index_copy_(0, rows, logits[rows].masked_fill_(allowed == 0, -torch.inf))


def score(
    logits: Tensor, temperature: Tensor, chosen_ids: Tensor, num_top: int, picked_ids: Tensor
) -> Scores:
    """Log-softmax at some tokens; see `ops.sampling.Score`."""
    pieces = [
        _score(logits[piece], temperature[piece], chosen_ids[piece], num_top, picked_ids[piece])
        for piece in _slices(len(logits), logits)
    ]
    return Scores(*(torch.cat(parts) for parts in zip(*pieces)))


def _score(
    logits: Tensor, temperature: Tensor, chosen_ids: Tensor, num_top: int, picked_ids: Tensor
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
    return Scores(chosen, log_softmax(top), top_ids, log_softmax(logits.gather(-1, picked_ids)))


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
    if keys.device.type == "cpu" and count > MAX_HEAD:  # numpy sorts integers some ten times faster
        return torch.from_numpy(~np.sort(~keys.numpy(), axis=-1)[:, :count])
    return keys.topk(count).values if count < keys.shape[-1] else keys.sort(-1, descending=True).values


def _draw(logits: Tensor, peak: Tensor, choice: Choice) -> Tensor:
    """Draw from all tokens that reach min_p, in order of ids: needs no ranking."""
    weights = _weights(logits, peak, choice.temperature)
    weights.masked_fill_(weights < choice.min_p[:, None], 0)
    mass_to = _fixed(weights, logits.shape[-1]).cumsum(-1)
    return _invert(mass_to, mass_to[:, -1], choice.uniform)


def _draw_ranked(logits: Tensor, peak: Tensor, choice: Choice, width: int) -> tuple[Tensor, Tensor]:
    """Draw from the kept ones among the `width` best tokens.

    Also returns whether all kept tokens were among these; else the draw is void. Every limit keeps a prefix
    of the ranking, so together they keep the shortest of these prefixes.
    """
    vocab_size = logits.shape[-1]
    width = min(width, vocab_size)
    values, ids = best(logits, width)
    weights = _weights(values, peak, choice.temperature)
    fixed = _fixed(weights, vocab_size)
    mass_to = fixed.cumsum(-1)  # [R, width]

    in_head = choice.top_k <= width
    last = choice.top_k.clamp(max=width).long() - 1
    mass = mass_to.gather(-1, last[:, None])[:, 0]
    if width < vocab_size:
        whole = _fixed(_weights(logits, peak, choice.temperature), vocab_size).sum(-1)
        mass = torch.where(in_head, mass, whole)
    part = (choice.top_p.double() * mass.double()).ceil().long()
    limit = torch.where(choice.top_p < 1, part, mass)

    kept = (mass_to - fixed < limit[:, None]) & (weights >= choice.min_p[:, None])
    num_kept = kept.sum(-1).clamp(min=1)
    mass_kept = mass_to.gather(-1, num_kept[:, None] - 1)[:, 0]
    drawn = ids.gather(-1, _invert(mass_to, mass_kept, choice.uniform)[:, None])[:, 0]
    return drawn, in_head | (num_kept < width) | (width == vocab_size)


def _draw_hopeful(logits: Tensor, peak: Tensor, choice: Choice) -> Tensor:
    """Draw from a few of the best tokens where these hold all that is kept, else from all. Host only."""
    ids, covered = _draw_ranked(logits, peak, choice, FIRST_HEAD)
    rows = (~covered).nonzero()[:, 0]
    if len(rows):
        _put(ids, rows, _draw_ranked(*_take(rows, logits, peak, choice), logits.shape[-1])[0])
    return ids


def _invert(mass_to: Tensor, mass: Tensor, uniform: Tensor) -> Tensor:
    """The first place [R] whose cumulated mass [R, n] exceeds `uniform` times `mass` [R]."""
    target = ((uniform.double() + HALF_STEP) * mass.double()).long()
    target = torch.minimum(target, mass - 1)  # the product may have been rounded up
    place = torch.searchsorted(mass_to, target[:, None], right=True)[:, 0]
    return place.clamp(max=mass_to.shape[-1] - 1)  # only rows that are not sound get here


def _weights(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """exp((logit - peak) / temperature), at most 1, which the best token has exactly."""
    return logits.sub(peak[:, None]).div_(temperature[:, None]).exp_()


def _fixed(weights: Tensor, vocab_size: int) -> Tensor:
    """Weights as integers, whose sums do not depend on the order."""
    return weights.mul(2.0 ** fraction_bits(vocab_size)).long()


def fraction_bits(vocab_size: int) -> int:
    return 62 - (vocab_size - 1).bit_length()


def _pieces(wanted: Tensor, logits: Tensor) -> Iterator[Tensor]:
    """The wanted rows (int64, on the host) in pieces of bounded size."""
    rows = wanted.nonzero()[:, 0]
    for piece in _slices(len(rows), logits):
        yield rows[piece]


def _slices(count: int, logits: Tensor) -> Iterator[slice]:
    limit = HOST_PIECE if logits.device.type == "cpu" else DEVICE_PIECE
    size = max(1, limit // logits.shape[-1])
    for first in range(0, count, size):
        yield slice(first, first + size)


def _take(rows: Tensor, logits: Tensor, peak: Tensor, choice: Choice) -> tuple[Tensor, Tensor, Choice]:
    """These rows of everything, on the device; the logits without a copy where they lie together."""
    device = logits.device
    part = Choice(*(to_device(field[rows], device) for field in choice))
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first + 1 == count:
        together = slice(first, first + count)
        return logits[together], peak[together], part
    there = to_device(rows, device)
    return logits[there], peak[there], part


def _put(ids: Tensor, rows: Tensor, drawn: Tensor) -> None:
    ids.index_copy_(0, to_device(rows, ids.device), drawn)


def _is_host(logits: Tensor) -> bool:
    return logits.device.type == "cpu"


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor without waiting for the device."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
