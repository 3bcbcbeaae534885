"""Experts on several ranks: ways to combine their results, and the balance of a skewed load.

There are three forms of a layer:

sum         one all-reduce sums the ranks' partial results of all tokens
scattered   a reduce-scatter and an all-gather compute the same sum
all-to-all  each result is sent to the rank that owns its token, and an all-gather follows

Each rank is a process. The forms are measured in turns, so that other work on the machine affects them alike. Times are
those of rank 0.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

from bench import PROGRAM
from ops.select import select
from runtime.experts.balance import balanced
from runtime.experts.placement import in_order, placed
from runtime.layers import expert_sharing
from runtime.layers.build import Build
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.moe import MoE, Routing
from runtime.loading.parameters import split
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.mesh.rendezvous import Rendezvous
from serve.bench.options import new_parser

TOKENS = (1, 64, 1024)
FORMS = ("sum", "scattered", "all-to-all")
WARM_UP, NEVER = 3, 2**31


def main(words: Sequence[str]) -> int:
    """Print the tables of the study."""
    parser = new_parser("experts", "Experts on several ranks.", program=PROGRAM)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--hidden-size", type=int, default=1024, help="default 1024")
    parser.add_argument("--inner-size", type=int, default=512, help="inner size of an expert (default 512)")
    parser.add_argument("--experts", type=int, default=32, help="default 32")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token (default 2)")
    parser.add_argument("--repeats", type=int, default=15, help="measured calls of each form (default 15)")
    options = parser.parse_args(list(words))
    with TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        arguments = [(rank, vars(options), folder, results) for rank in range(options.ranks)]
        processes = [context.Process(target=_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        rows = results.get()
        for process in processes:
            process.join()
    print("tokens | " + " | ".join(f"{form}, ms | of it communication | {form} / sum" for form in FORMS))
    for row in rows[: len(TOKENS)]:
        print(" | ".join(row))
    print("\ntokens, load as 1 / n | in order, ms | balanced, ms | balanced / in order")
    for row in rows[len(TOKENS) :]:
        print(" | ".join(row))
    print("\nload as 1 / n | utilization before | after")
    for row in _skewed(options.experts, options.ranks):
        print(" | ".join(row))
    return 0


def _rank(rank: int, options: dict[str, Any], folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    size = options["ranks"]
    mesh = Mesh(RankInfo(rank=rank, tp_size=size, ep_size=size), torch.device("cpu"))
    mesh.join(Rendezvous(host="127.0.0.1", timeout_s=120, path=f"{folder}/store"))
    with torch.inference_mode():
        rows = _measure(mesh, options)
    if rank == 0:
        results.put(rows)
    mesh.close()


def _measure(mesh: Mesh, options: dict[str, Any]) -> list[list[str]]:
    sharing = ExpertSharing(mesh.axis("ep"), exchanges=True)
    torch.manual_seed(0)
    size, experts = options["hidden_size"], options["experts"]
    build = Build(select(), experts=sharing)
    layer = MoE("m", size, options["inner_size"], experts, "silu", build, routing=Routing(options["top_k"], True))
    split(layer, mesh.axis("tp"))
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.02)
    torch.manual_seed(1)  # the same router on every rank
    layer.router.get_parameter("weight").data.normal_()
    layer.prepare()
    rows = [_forms(mesh, layer, sharing, torch.randn(tokens, size), options) for tokens in TOKENS]
    return rows + [_balance(mesh, layer, sharing, torch.randn(tokens, size), options) for tokens in TOKENS]


def _forms(mesh: Mesh, layer: MoE, sharing: ExpertSharing, x: torch.Tensor, options: dict[str, Any]) -> list[str]:
    """Return a row with the time of each form for tokens x [T, E], and of its communication alone."""
    axis = mesh.axis("tp")
    batch: Any = SimpleNamespace(adapted={})  # the layer reads only this field of a batch
    all_reduce, num_experts = axis.all_reduce, options["experts"]
    chosen = torch.rand(len(x), num_experts).topk(options["top_k"]).indices.to(torch.int32)
    sizes = [len(part) for part in x.tensor_split(axis.size)]

    def scattered(x: torch.Tensor) -> torch.Tensor:
        return axis.all_gather(axis.reduce_scatter(x, sizes), sizes)

    alone: dict[str, Callable[[], object]] = {
        "sum": lambda: all_reduce(x.clone()),
        "scattered": lambda: scattered(x),
        "all-to-all": lambda: sharing.combine(layer.layer_number, chosen, num_experts, lambda tokens: x[tokens]),
    }
    times: dict[tuple[str, bool], list[float]] = {(form, whole): [] for form in FORMS for whole in (True, False)}
    for turn in range(WARM_UP + options["repeats"]):
        for form in FORMS:
            expert_sharing.EXCHANGE_TOKENS = 1 if form == "all-to-all" else NEVER
            axis.all_reduce = scattered if form == "scattered" else all_reduce
            _time(times[form, True], all_reduce, partial(layer, x, batch))
            _time(times[form, False], all_reduce, alone[form])
        axis.all_reduce = all_reduce
        if turn < WARM_UP:
            for each in times.values():
                each.clear()
    found = {each: median(values) for each, values in times.items()}
    row = [str(len(x))]
    for form in FORMS:
        whole = found[form, True]
        row += [f"{whole * 1e3:.2f}", f"{min(1, found[form, False] / whole):.0%}", f"{whole / found['sum', True]:.2f}"]
    return row


def _balance(mesh: Mesh, layer: MoE, sharing: ExpertSharing, x: torch.Tensor, options: dict[str, Any]) -> list[str]:
    """Return a row with the layer's time under a skewed load, with experts in order and balanced."""
    axis, num_experts = mesh.axis("tp"), options["experts"]
    batch: Any = SimpleNamespace(adapted={})
    load = [1000 / (1 + expert) for expert in range(num_experts)]
    chosen = torch.multinomial(torch.tensor(load).expand(len(x), -1), options["top_k"]).to(torch.int32)

    def choose(layer: int, experts: torch.Tensor, num_experts: int) -> torch.Tensor:
        return chosen  # the same on all ranks

    sharing.choose = choose
    slots = balanced({0: load}, num_slots=num_experts, num_ranks=axis.size)[0]
    placements = {"in order": in_order(num_experts, axis.size), "balanced": placed(slots, num_experts, axis.size)}
    times: dict[str, list[float]] = {name: [] for name in placements}
    expert_sharing.EXCHANGE_TOKENS = NEVER
    for turn in range(WARM_UP + options["repeats"]):
        for name, placement in placements.items():
            sharing.place(layer.layer_number, placement)  # the weights stay in place, which does not change the time
            _time(times[name], axis.all_reduce, partial(layer, x, batch))
            if turn < WARM_UP:
                times[name].clear()
    before, after = (median(each) for each in times.values())
    return [str(len(x)), f"{before * 1e3:.2f}", f"{after * 1e3:.2f}", f"{after / before:.2f}"]


def _time(times: list[float], all_reduce: Callable[[torch.Tensor], object], call: Callable[[], object]) -> None:
    all_reduce(torch.zeros(1))  # so that all ranks begin together
    began = perf_counter()
    call()
    times.append(perf_counter() - began)


def _skewed(num_experts: int, num_ranks: int) -> list[list[str]]:
    """Return rows about the balance of loads that fall as 1 / n: mean load of the ranks divided by the largest."""
    load = [1000 / (1 + expert) for expert in range(num_experts)]
    rows = []
    for ranks, copies in ((num_ranks, 0), (num_ranks, num_ranks), (8, 8)):
        slots = num_experts + copies
        after = balanced({0: load}, num_slots=slots, num_ranks=ranks)[0]
        before = [slot % num_experts for slot in range(slots)]
        found = [f"{_utilization(load, each, ranks):.2f}" for each in (before, after)]
        rows.append([f"{ranks} ranks, {copies} copies", *found])
    return rows


def _utilization(load: Sequence[float], experts: Sequence[int], num_ranks: int) -> float:
    shares = [load[expert] / experts.count(expert) for expert in experts]
    per_rank = len(experts) // num_ranks
    of_ranks = [sum(shares[first : first + per_rank]) for first in range(0, len(experts), per_rank)]
    return sum(of_ranks) / num_ranks / max(of_ranks)
