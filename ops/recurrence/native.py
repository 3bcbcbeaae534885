"""Recurrent layers in torch. All single-token spans of a wave are computed together, and longer spans in chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.recurrence import Segments

CHUNK = 64  # tokens whose updates are computed by one matrix product
EPS = 1e-6  # added to the squared lengths of q and k when they are normalised


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    segments: Segments,
    *,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Convolve each channel causally and apply silu, or multiply by gates before and after (see `ops.recurrence`)."""
    out, keep = torch.empty(x.shape, dtype=x.dtype, device=x.device), pool.shape[1]
    if gates is not None:
        x = gates[0].float() * x.float()

    def activated(summed: Tensor, tokens: Tensor | slice) -> Tensor:
        return (F.silu(summed) if gates is None else gates[1][tokens].float() * summed).to(out.dtype)

    for wave in segments.waves:
        if len(wave.tokens):
            inputs = torch.cat([pool[wave.reads].to(x.dtype), x[wave.tokens].unsqueeze(1)], dim=1)  # [S, K, C]
            pool[wave.writes] = inputs[:, 1:].to(pool.dtype)
            summed = (inputs.float() * weight.float()).sum(1)
            summed = summed if bias is None else summed + bias.float()
            out[wave.tokens] = activated(summed, wave.tokens)
        for read, write, start, count in wave.spans:
            tokens = slice(start, start + count)
            inputs = torch.cat([pool[read].to(x.dtype), x[tokens]])  # [K - 1 + count, C]
            pool[write] = inputs[-keep:].to(pool.dtype)
            summed = F.conv1d(
                inputs.float().t().unsqueeze(0),
                weight.float().t().unsqueeze(1),
                None if bias is None else bias.float(),
                groups=weight.shape[1],
            )
            out[tokens] = activated(summed[0].t(), tokens)
    return out


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    shift: Tensor,
    pool: Tensor,
    segments: Segments,
) -> Tensor:
    """Compute the gated delta rule (see `ops.recurrence`)."""
    heads = v.shape[1] // q.shape[1]
    q, k = (_unit(each.float()).repeat_interleave(heads, dim=1) for each in (q, k))  # [T, H, D]
    q = q * q.shape[-1] ** -0.5
    decay = -rate.exp() * F.softplus(a.float() + shift)  # [T, H], logarithm of the decay
    beta, values = b.float().sigmoid(), v.float()
    out = torch.empty_like(values)
    for wave in segments.waves:
        tokens = wave.tokens
        if len(tokens):
            state = pool[wave.reads].float() * decay[tokens].exp()[..., None, None]  # [S, H, D, E]
            keys = k[tokens].unsqueeze(-2)  # [S, H, 1, D]
            delta = (values[tokens].unsqueeze(-2) - keys @ state) * beta[tokens][..., None, None]
            state += keys.transpose(-1, -2) * delta
            pool[wave.writes] = state.to(pool.dtype)
            out[tokens] = (q[tokens].unsqueeze(-2) @ state).squeeze(-2)
        for read, write, start, count in wave.spans:
            state = pool[read].float()
            for first in range(start, start + count, CHUNK):
                part = slice(first, min(first + CHUNK, start + count))
                operands = (each[part].transpose(0, 1) for each in (q, k, values, decay, beta))
                part_out, state = _delta_chunk(state, *operands)
                out[part] = part_out.transpose(0, 1)
            pool[write] = state.to(pool.dtype)
    return out.to(v.dtype)


def _delta_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, new state) of L tokens: state [H, D, E], q, k [H, L, D], v [H, L, E], decay and beta [H, L].

    `decay` is a logarithm. A token's update depends on the updates of earlier tokens, so one triangular system is
    solved for the updates of all tokens.
    """
    total = decay.cumsum(-1)  # [H, L]
    between = _decay_between(total)
    weighted = k * beta.unsqueeze(-1)
    system = (weighted @ k.transpose(-1, -2)) * between
    known = v * beta.unsqueeze(-1) - (weighted * total.exp().unsqueeze(-1)) @ state
    written = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)  # [H, L, E]
    read = (q * total.exp().unsqueeze(-1)) @ state
    out = read + ((q @ k.transpose(-1, -2)) * between) @ written
    last = total[:, -1:]
    faded = k * (last - total).exp().unsqueeze(-1)
    return out, state * last.exp().unsqueeze(-1) + faded.transpose(-1, -2) @ written


def _decay_between(total: Tensor) -> Tensor:
    """Return [H, L, L]. Element [h, i, j] is the factor by which token j's update has decayed at token i; 0 if i < j.

    `total` [H, L] has the cumulative sums of the logarithms of the decays.
    """
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=total.device).triu_(1)
    return between.masked_fill_(later, float("-inf")).exp_()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rate: Tensor,
    shift: Tensor,
    skip: Tensor,
    pool: Tensor,
    segments: Segments,
    *,
    low: float,
    high: float,
) -> Tensor:
    """Compute the selective scan of Mamba 2 (see `ops.recurrence`)."""
    heads = x.shape[1] // b.shape[1]
    b, c = (each.float().repeat_interleave(heads, dim=1) for each in (b, c))  # [T, H, N]
    steps = F.softplus(dt.float() + shift).clamp(low, high)  # [T, H]
    decay, values = -rate.exp() * steps, x.float()
    inputs = values * steps.unsqueeze(-1)  # [T, H, P]
    out = torch.empty_like(values)
    for wave in segments.waves:
        tokens = wave.tokens
        if len(tokens):
            state = pool[wave.reads].float() * decay[tokens].exp()[..., None, None]  # [S, H, N, P]
            state += b[tokens].unsqueeze(-1) * inputs[tokens].unsqueeze(-2)
            pool[wave.writes] = state.to(pool.dtype)
            out[tokens] = (c[tokens].unsqueeze(-2) @ state).squeeze(-2)
        for read, write, start, count in wave.spans:
            state = pool[read].float()
            for first in range(start, start + count, CHUNK):
                part = slice(first, min(first + CHUNK, start + count))
                operands = (each[part].transpose(0, 1) for each in (inputs, b, c, decay))
                part_out, state = _scan_chunk(state, *operands)
                out[part] = part_out.transpose(0, 1)
            pool[write] = state.to(pool.dtype)
    return (out + values * skip.float().unsqueeze(-1)).to(x.dtype)


def _scan_chunk(state: Tensor, x: Tensor, b: Tensor, c: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, new state) of L tokens: state [H, N, P], x, out [H, L, P], b, c [H, L, N], log of decay [H, L]."""
    total = decay.cumsum(-1)
    out = ((c @ b.transpose(-1, -2)) * _decay_between(total)) @ x
    out += (c * total.exp().unsqueeze(-1)) @ state
    last = total[:, -1:]
    faded = b * (last - total).exp().unsqueeze(-1)
    return out, state * last.exp().unsqueeze(-1) + faded.transpose(-1, -2) @ x
