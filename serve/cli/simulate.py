"""`penstock simulate`: run the scheduler on a trace with a virtual clock, to compare policies and machines."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from ops.machine import Machine
from runtime.config import Args
from runtime.config.plan import SchedulerPlan
from runtime.errors import ConfigurationError
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.replay.record_format import make_cache, make_plan
from runtime.simulation.costs import GPUS, StepCosts, fit, published, weight_bytes
from runtime.simulation.report import Outcome, as_svg, as_text, percentiles
from runtime.simulation.simulator import Simulator, in_order
from runtime.simulation.traces import Arrival, Measured, read_record, read_trace
from serve.demo import demo_path

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")
GPU_SHARE = 0.9  # fraction of a GPU's memory that weights and KV cache may use


class Target(NamedTuple):
    """The simulated system: the scheduler's plan, the step times of a machine, the sizes of cache and model."""

    plan: SchedulerPlan
    costs: StepCosts
    make_cache: Callable[[], PrefixCache]
    vocab_size: int
    context_length: int


def main(words: Sequence[str]) -> int:
    """Run `penstock simulate`, and return 0. `words` are the arguments after `simulate`.

    Raises `ConfigurationError` for invalid options and files.
    """
    flags, rest = _parser().parse_known_args(words)
    recorded = _record(flags.trace)
    target = _target(flags.machine, rest, recorded)
    outcomes: dict[str, Outcome] = {}
    for policy in flags.policy or [target.plan.policy]:
        began_s = time.monotonic()
        sequences = _arrivals(flags, recorded)
        plan = _with(target.plan, policy)
        simulator = Simulator(
            plan,
            target.make_cache(),
            target.costs,
            vocab_size=target.vocab_size,
            context_length=target.context_length,
        )
        outcomes[policy] = simulator.run(sequences)
        sys.stderr.write(f"{policy}: simulated in {time.monotonic() - began_s:.1f} s\n")
    results = {name: outcome.values() for name, outcome in outcomes.items()}
    report: dict[str, Any] = {"costs": target.costs._asdict(), "policies": results}
    if recorded is not None:
        report["recorded"] = _recorded_values(recorded[2], recorded[1], next(iter(outcomes.values())))
    if flags.plot:
        _write(flags.plot, as_svg(outcomes))
    sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n" if flags.json else _text(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock simulate",
        allow_abbrev=False,
        description="Run the scheduler on a trace over a virtual clock. Every decision is the engine's; only the steps "
        "take no time. Their times are fitted to a record of this machine (penstock serve --record FILE), or computed "
        "from the data sheet of a GPU. With a GPU, all other options are those of the server: --model-path DIR ...",
    )
    parser.add_argument(
        "--trace",
        required=True,
        help="a record; Mooncake's .jsonl; Azure's .csv; or a drawn trace such as "
        "requests=1000,rate=10,input=512,output=128,prefixes=0,prefix=256,seed=0",
    )
    parser.add_argument(
        "--machine", help=f"a record whose step times are fitted, or {', '.join(GPUS)}; default: the trace's record"
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME[,FIELD=VALUE...]",
        help=f"{', '.join(POLICIES)}, with changed fields of the scheduler's plan such as max_running=64 or "
        "chunk_tokens=512; may be repeated to compare policies",
    )
    parser.add_argument("--requests", type=int, help="simulate only so many requests of the trace")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a plot of the times to the first token")
    return parser


Recorded = tuple[Any, list[Arrival], Measured]


def _record(text: str) -> Recorded | None:
    """Return the schedule record at the path `text`, or None if `text` is not the path of a record."""
    path = Path(text)
    if not path.is_file() or not _is_record(path):
        return None
    return read_record(path)


def _is_record(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"penstock_record"' in file.read(64)


def _target(machine: str | None, options: Sequence[str], recorded: Recorded | None) -> Target:
    if machine is not None and machine in GPUS:
        return _gpu(machine, options)
    if options:
        raise ConfigurationError(
            f"{' '.join(options)}: the options of a record are fixed; use --policy NAME,FIELD=VALUE."
        )
    if machine is not None:
        if not Path(machine).is_file() or not _is_record(Path(machine)):
            raise ConfigurationError(f"--machine {machine} is neither a record nor one of {', '.join(GPUS)}.")
        recorded = read_record(machine)
    if recorded is None:
        raise ConfigurationError(f"--machine is missing: a record, or one of {', '.join(GPUS)}.")
    player, _, measured = recorded
    header = player.header
    return Target(
        make_plan(header),
        fit(measured.steps),
        lambda: make_cache(header),
        header["vocab_size"],
        header["context_length"],
    )


def _gpu(name: str, options: Sequence[str]) -> Target:
    """Return the target for a GPU: server options `options`, and step times from the GPU's data sheet."""
    from runtime.actors.assemble import prepare

    plan, facts = prepare(Args.parse(options), Machine.named(name), demo_path=demo_path())
    if plan.parallel.ranks > 1 or facts.quantization is not None or facts.recurrent:
        raise ConfigurationError("Published step times are of one GPU and dense models in bf16.")
    size, weights = plan.cache.page_size, weight_bytes(facts)
    kv_bytes = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * 2 * size
    num_pages = int((Machine.named(name).gpus[0].memory_bytes * GPU_SHARE - weights) / kv_bytes)
    if num_pages < 1:
        raise ConfigurationError(f"The model does not fit on one {name}.")
    if plan.cache.max_total_tokens is not None:
        num_pages = min(num_pages, plan.cache.max_total_tokens // size)
    return Target(
        plan.scheduler,
        published(name, facts, weights),
        lambda: PrefixCache(num_pages, size, enabled=plan.cache.prefix_cache),
        facts.vocab_size,
        plan.model.context_length,
    )


def _arrivals(flags: argparse.Namespace, recorded: Recorded | None) -> Iterable[Arrival]:
    if recorded is None:
        return read_trace(flags.trace, flags.requests)
    fresh = [each._replace(sequences=[one.restarted() for one in each.sequences]) for each in recorded[1]]
    for arrival in fresh:
        for sequence in arrival.sequences:
            sequence.constraint = None
    return in_order(fresh[: flags.requests])


def _with(plan: SchedulerPlan, policy: str) -> SchedulerPlan:
    """Return the plan with the policy and fields in a text such as "lpm,max_running=64"."""
    name, *changes = policy.split(",")
    if name not in POLICIES:
        raise ConfigurationError(f"--policy {name} is unknown; use {', '.join(POLICIES)}.")
    known = {field.name for field in fields(plan)} - {"reasons", "policy"}
    values: dict[str, Any] = {"policy": name, "record_file": None}
    for change in changes:
        field, _, value = change.partition("=")
        if field not in known or not value:
            raise ConfigurationError(f"--policy {policy}: {change!r} is not FIELD=VALUE of {', '.join(sorted(known))}.")
        try:
            values[field] = orjson.loads(value)
        except ValueError as error:
            raise ConfigurationError(f"--policy {policy}: {value!r} is not a JSON value.") from error
    return replace(plan, **values)


def _recorded_values(measured: Measured, arrivals: list[Arrival], simulated: Outcome) -> dict[str, Any]:
    """Return the record's measured times, and the relative errors of the simulated mean times."""
    arrived = {each.sequences[0].request.id: each.time_s for each in arrivals}
    first = np.array([measured.first_s[each] - arrived[each] for each in measured.first_s])
    several = [each for each, count in measured.num_output.items() if count > 1]
    tokens = np.array(
        [(measured.last_s[each] - measured.first_s[each]) / (measured.num_output[each] - 1) for each in several]
    )
    equal = sum(one == other for one, other in zip(measured.order, simulated.order))
    values = {"first_token_ms": percentiles(first), "time_per_token_ms": percentiles(tokens)}
    ours = simulated.values()
    errors = {
        f"{key}_error": round(ours[key]["mean"] / values[key]["mean"] - 1, 4) for key in values if values[key]["mean"]
    }
    return {**values, **errors, "admitted_in_the_same_place": f"{equal} of {len(measured.order)}"}


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--plot {path}: {error.strerror}.") from error


def _text(report: dict[str, Any]) -> str:
    lines = as_text(report["policies"])
    costs = ", ".join(f"{name} {value:.3g}" for name, value in report["costs"].items() if value)
    lines += f"\nseconds of a step: {costs}\n"
    if "recorded" in report:
        lines += "\nrecorded, and the error of the first policy's mean:\n"
        lines += "".join(f"  {name}: {value}\n" for name, value in report["recorded"].items())
    return lines
