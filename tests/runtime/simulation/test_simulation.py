"""The simulator's times follow from its costs, and its decisions are those of the engine."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_runner import make_plan
from greedy import model_path, prompts
from runtime.errors import ConfigurationError
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.simulation.costs import StepCosts, fit
from runtime.simulation.report import Outcome
from runtime.simulation.simulator import Simulator
from runtime.simulation.traces import Arrival, read_record, read_trace
from serve import Engine
from serve.cli.main import run


def simulate(trace: str | list[Arrival], costs: StepCosts, *, num_pages: int = 4096, **plan: Any) -> Outcome:
    simulator = Simulator(make_plan(**plan), PrefixCache(num_pages, 16), costs, vocab_size=2**31, context_length=2**20)
    arrivals = list(read_trace(trace)) if isinstance(trace, str) else trace
    outcome = simulator.run(arrivals)
    simulator.scheduler.check()
    assert not simulator.scheduler.num_running
    assert not simulator.scheduler.num_waiting
    return outcome


def write_mooncake(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_times_of_one_request_follow_from_the_costs(tmp_path: Path):
    trace = write_mooncake(tmp_path / "t.jsonl", [{"timestamp": 2000, "input_length": 100, "output_length": 11}])
    outcome = simulate(trace, StepCosts(base=0.01, token=0.001, row=0.002))
    assert outcome.first_token_s.tolist() == pytest.approx([0.01 + 100 * 0.001])
    assert outcome.token_s.tolist() == pytest.approx([0.01 + 0.002])
    assert outcome.num_tokens == 11


def test_waiting_times_are_those_of_queueing_theory():
    """One server, Poisson arrivals, constant service: the mean wait is rho * service / (2 * (1 - rho)).

    That is the formula of Pollaczek and Khinchine.
    """
    draw, time_s, rows = random.Random(3), 0.0, []
    service_s, load = 0.1, 0.6
    for arrival in read_trace("requests=4000,rate=1,input=8,output=1"):
        time_s += draw.expovariate(load / service_s)
        rows.append(arrival._replace(time_s=time_s, outputs=[1]))
    outcome = simulate(rows, StepCosts(base=service_s), max_running=1, overlap=False, max_queued=100_000)
    wait_s = float(outcome.first_token_s.mean()) - service_s
    assert wait_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.07)


def states(text: str, *, skips: bool, num_pages: int, costs: StepCosts, **plan: Any) -> tuple[list[Any], int]:
    """Simulate a random trace. Return the scheduler's states at all arrivals and the outcome, and how often it filled.

    A state has the pages, tokens and rows of the running sequences, the free pages and the estimates.
    """
    found: list[Any] = []
    cache = PrefixCache(num_pages, 4)
    simulator = Simulator(make_plan(**plan), cache, costs, vocab_size=2**31, context_length=300, skips=skips)
    scheduler, numbers = simulator.scheduler, simulator.outcome.numbers

    def arrivals() -> Iterator[Arrival]:
        draw = random.Random(text)
        for arrival in read_trace(text):
            arrival.sequences[0].max_tokens = draw.choice([2**31, arrival.sequences[0].num_prompt + 30])
            scheduler.check()
            rows = [
                (numbers[each.request.id], each.sequence_index, each.pages[:], each.ids[:], each.num_computed)
                for each in scheduler.running
            ]
            found.append((rows, scheduler.load, list(cache._pool._free), {**vars(simulator._times)}))  # pyright: ignore
            yield arrival

    num_filled, fill = 0, scheduler.fill

    def counted() -> Any:
        nonlocal num_filled
        num_filled += 1
        return fill()

    scheduler.fill = counted
    outcome = simulator.run(arrivals())
    order = [numbers[each] for each in outcome.order]
    times = [list(each) for each in (outcome.arrived_s, outcome.first_s, outcome.last_s, outcome.num_output)]
    return [*found, order, times, outcome.values()], num_filled


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("plan", [{}, {"max_running": 3, "policy": "lpm"}, {"mixed": False, "target_token_ms": 30.0}])
def test_skipped_steps_leave_the_state_of_single_steps(plan: dict[str, Any], overlap: bool):
    num_filled = Counter[bool]()
    for seed in range(6):
        draw = random.Random(seed)
        trace = f"requests=40,rate={draw.choice([0, 1, 10, 50])},input=20,output=40,prefixes=3,prefix=12,seed={seed}"
        costs = StepCosts(*(10.0 ** -draw.randrange(2, 6) for _ in range(6)))
        num_pages = draw.choice([80, 200, 1000])
        ran = []
        for skips in (False, True):
            found, number = states(trace, skips=skips, num_pages=num_pages, costs=costs, overlap=overlap, **plan)
            ran.append(found)
            num_filled[skips] += number
        assert ran[0] == ran[1]
    assert num_filled[True] < 0.4 * num_filled[False]


def test_shared_prefixes_are_computed_once(tmp_path: Path):
    rows = [
        {"timestamp": 10_000 * at, "input_length": 1024, "output_length": 2, "hash_ids": [7, 100 + at]}
        for at in range(3)
    ]
    outcome = simulate(write_mooncake(tmp_path / "t.jsonl", rows), StepCosts(token=0.001))
    first, *others = outcome.first_token_s.tolist()
    assert first == pytest.approx(1.024)
    assert others == pytest.approx([0.512, 0.512])
    assert outcome.num_cached == 1024


def test_policies_differ_and_every_request_ends():
    trace = "requests=300,rate=0,input=100,output=20,prefixes=10,prefix=400"
    costs = StepCosts(base=0.001, token=0.0001)
    policies = {
        name: simulate(trace, costs, policy=name, max_running=4, num_pages=200, max_queued=1000)
        for name in ("fcfs", "lpm")
    }
    assert policies["fcfs"].num_tokens == policies["lpm"].num_tokens
    assert policies["lpm"].num_cached > policies["fcfs"].num_cached
    assert policies["lpm"].end_s < policies["fcfs"].end_s


def test_a_fit_finds_the_costs():
    costs, draw = StepCosts(base=0.003, row=0.0002, token=0.0001, context=1e-7, pair=1e-9), random.Random(1)
    steps = []
    for _ in range(300):
        rows, tokens = draw.randrange(0, 32), draw.choice([0, 0, draw.randrange(2, 900)])
        features = (rows, tokens, rows * draw.randrange(1, 3000), tokens * draw.randrange(1, 2000))
        seconds = costs.base + sum(one * other for one, other in zip(features, costs[1:5]))
        slow = 100 if draw.random() < 0.02 else 1  # another program took the processor
        steps.append((features, seconds * slow))
    assert fit(steps)[:5] == pytest.approx(costs[:5], rel=1e-3)


async def test_the_order_is_the_engines_on_a_recorded_run(tmp_path: Path):
    path = tmp_path / "record"
    options: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1, "page_size": 4, "max_total_tokens": 400}
    async with Engine(model_path("llama"), record=str(path), max_running_requests=3, **options) as engine:
        sampling = [{"temperature": 0, "max_new_tokens": 4 + 3 * (at % 5)} for at in range(len(prompts()))]
        await engine.generate(input_ids=prompts(), sampling_params=sampling)
        num_generated = engine.status().num_generated
    player, arrivals, measured = read_record(path)
    burst = [each._replace(time_s=0.0) for each in arrivals]
    costs = fit(measured.steps)
    from runtime.replay.record_format import make_cache
    from runtime.replay.record_format import make_plan as recorded_plan

    simulator = Simulator(
        recorded_plan(player.header), make_cache(player.header), costs, vocab_size=128, context_length=400
    )
    outcome = simulator.run(burst)
    assert outcome.order == measured.order
    assert outcome.num_tokens == num_generated


def test_the_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plot = tmp_path / "plot.svg"
    words = ["simulate", "--trace", "requests=40,rate=100,input=20,output=5", "--machine", "h100", "--plot", str(plot)]
    words += ["--policy", "fcfs", "--policy", "lpm,max_running=2", "--json"]
    assert run(words) == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    assert list(policies) == ["fcfs", "lpm,max_running=2"]
    assert all(values["requests"] == 40 for values in policies.values())
    assert plot.read_text().count("<polyline") == 2


def test_azures_format_is_read(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,110,27\n"
    )
    first, second = read_trace(str(path))
    assert (first.time_s, second.time_s) == (0.0, 1.0)
    assert (first.sequences[0].num_prompt, second.outputs) == (4808, [27])


@pytest.mark.parametrize(
    "words",
    [
        ["--trace", "missing.jsonl", "--machine", "h100"],
        ["--trace", "requests=2,rat=1", "--machine", "h100"],
        ["--trace", "requests=2", "--machine", "z80"],
        ["--trace", "requests=2"],
        ["--trace", "requests=2", "--machine", "h100", "--policy", "sjf"],
        ["--trace", "requests=2", "--machine", "h100", "--policy", "fcfs,rows=3"],
    ],
)
def test_invalid_options_are_refused(words: list[str]):
    assert run(["simulate", *words]) == 2


def test_a_damaged_trace_is_refused(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(ConfigurationError, match="input_length"):
        list(read_trace(str(path)))
