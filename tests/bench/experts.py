"""Experts on several ranks: a layer whose results are summed, the same with all-to-all, and balance of a skewed load.

Each rank is a process. Forms take turns, so that other work on the machine affects them alike. Times are of rank 0.
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
FORMS = ("sum", "all_to_all")
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
    print("tokens | sum, ms | all-to-all, ms | share of the sum that is communication | ratio")
    for row in rows:
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
    rows = []
    for tokens in TOKENS:
        x: torch.Tensor = torch.randn(tokens, size)
        batch: Any = SimpleNamespace(adapted={})  # the layer reads nothing else
        times: dict[str, list[float]] = {form: [] for form in (*FORMS, "reduce")}
        for turn in range(WARM_UP + options["repeats"]):
            for form in FORMS:
                expert_sharing.EXCHANGE_TOKENS = 1 if form == "all_to_all" else NEVER
                _time(times[form], mesh, partial(layer, x, batch))
            _time(times["reduce"], mesh, partial(mesh.axis("tp").all_reduce, x.clone()))
            if turn < WARM_UP:
                for each in times.values():
                    each.clear()
        whole, exchanged, reduce = (median(each) for each in times.values())
        cells = (f"{whole * 1e3:.2f}", f"{exchanged * 1e3:.2f}", f"{reduce / whole:.0%}", f"{exchanged / whole:.2f}")
        rows.append([str(tokens), *cells])
    return rows


def _time(times: list[float], mesh: Mesh, call: Callable[[], object]) -> None:
    mesh.axis("tp").all_reduce(torch.zeros(1))  # begin together
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
