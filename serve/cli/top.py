"""`penstock top`: show the activity of a running server in the terminal, from its /metrics."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import httpx

from runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR = 30  # width of a bar in characters
TIMEOUT_S = 10.0


class Scrape(NamedTuple):
    """The samples of one scrape, summed over all replicas.

    `totals` has sums by sample name. `by_label` has sums by sample name and the value of one label.
    """

    at_s: float
    totals: Mapping[str, float]
    # Key: (sample, label value), for example ("penstock:pages", "free"). The label of a histogram is its bucket's
    # bound.
    by_label: Mapping[tuple[str, str], float]


TOKENS = "sglang:realtime_tokens_total"  # grows in each step; other token counters grow only when requests end
LABELS = {"penstock:pages": "owner", TOKENS: "mode"}  # sample -> the label whose values are summed separately
HISTOGRAMS = {
    "first token": "sglang:time_to_first_token_seconds",
    "between tokens": "sglang:inter_token_latency_seconds",
    "loop lag": "penstock:event_loop_lag_seconds",
}


def read(text: str, at_s: float) -> Scrape:
    """Parse Prometheus's text format. Raises `ValueError` for other text."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    by_label: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = "le" if sample.name.endswith("_bucket") else LABELS.get(sample.name)
            if label is not None and label in sample.labels:
                key = sample.name, sample.labels[label]
                by_label[key] = by_label.get(key, 0.0) + sample.value
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return Scrape(at_s, totals, by_label)


def rate(name: str | tuple[str, str], before: Scrape, now: Scrape) -> float:
    """Return a counter's increase per second, or 0 if the counter has decreased because the server restarted.

    `name` is a key of `totals` or of `by_label`.
    """

    def value(scrape: Scrape) -> float:
        return scrape.totals.get(name, 0.0) if isinstance(name, str) else scrape.by_label.get(name, 0.0)

    grown = value(now) - value(before)
    return max(0.0, grown) / max(now.at_s - before.at_s, 1e-9)


def quantile(name: str, share: float, before: Scrape, now: Scrape) -> float | None:
    """Return the quantile `share` (0 to 1) of the values that a histogram observed between two scrapes.

    The result is the upper bound of the bucket that contains the quantile, or None if there are no new values.
    """
    bucket = f"{name}_bucket"
    grown = sorted(
        (float(bound), value - before.by_label.get((bucket, bound), 0.0))
        for (sample_name, bound), value in now.by_label.items()
        if sample_name == bucket
    )
    if not grown or grown[-1][1] <= 0:
        return None
    return next(bound for bound, count in grown if count >= share * grown[-1][1])


def screen(url: str, before: Scrape, now: Scrape) -> RenderableType:
    """Return the table to show: the state at `now`, and rates since `before`."""
    from rich.table import Table
    from rich.text import Text

    totals = now.totals
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()

    def add(name: str, value: str) -> None:
        table.add_row(name, Text(value))

    def count(name: str) -> int:
        return int(totals.get(name, 0))

    def tokens(mode: str) -> float:
        return rate((TOKENS, mode), before, now)

    add("server", url)
    add(
        "requests",
        f"{count('sglang:num_running_reqs')} running, {count('sglang:num_queue_reqs')} waiting, "
        f"{rate('sglang:num_requests_total', before, now):.1f} ended/s, "
        f"{count('sglang:num_aborted_requests_total')} aborted, {count('penstock:rejected_requests_total')} refused",
    )
    add(
        "tokens",
        f"{tokens('decode'):.0f} out/s, {tokens('prefill_compute') + tokens('prefill_cache'):.0f} in/s, "
        f"{tokens('prefill_cache'):.0f} of them cached/s",
    )
    pages = {owner: now.by_label.get(("penstock:pages", owner), 0.0) for owner in ("running", "prefix", "free")}
    add("pages", f"{_bar(pages)} " + ", ".join(f"{int(value)} {owner}" for owner, value in pages.items()))
    for name, metric in HISTOGRAMS.items():
        quantiles = [quantile(metric, share, before, now) for share in (0.5, 0.99)]
        add(name, ", ".join(f"{q} <= {_seconds(value)}" for q, value in zip(("p50", "p99"), quantiles)))
    add(
        "steps",
        f"{rate('penstock:steps_total', before, now):.1f}/s, "
        f"oldest waiting for {totals.get('penstock:queue_age_seconds', 0.0):.1f} s, "
        f"{count('sglang:total_retracted_reqs')} retracted",
    )
    return table


def _bar(pages: Mapping[str, float]) -> str:
    whole = sum(pages.values()) or 1.0
    used, kept = (round(BAR * pages[owner] / whole) for owner in ("running", "prefix"))
    return ("█" * used + "▒" * kept).ljust(BAR, "·")[:BAR]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


def main(words: Sequence[str]) -> int:
    """Run `penstock top` until Ctrl-C. `words` are the arguments after `top`.

    Raises `ConfigurationError` if the server cannot be reached or has no metrics.
    """
    parser = argparse.ArgumentParser(
        prog="penstock top",
        description="Show the activity of a server that was started with --enable-metrics.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server's address; default: %(default)s")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two updates; default: 1"
    )
    parser.add_argument("--count", type=int, metavar="N", help="exit after N updates; default: continue until Ctrl-C")
    options = parser.parse_args(words)
    if not 0.05 <= options.interval <= 3600 or (options.count or 1) < 1:
        raise ConfigurationError("--interval must be in [0.05, 3600], and --count at least 1.")
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise ConfigurationError("penstock top requires rich: pip install 'penstock[top]'.") from error
    with httpx.Client(base_url=options.url, timeout=TIMEOUT_S) as client:
        before, console = _scrape(client), Console(file=sys.stdout)
        try:
            with Live(console=console, auto_refresh=False) as live:
                for _ in iter(range(options.count)) if options.count else iter(int, 1):
                    time.sleep(options.interval)
                    now = _scrape(client)
                    live.update(screen(options.url, before, now), refresh=True)
                    before = now
        except KeyboardInterrupt:
            pass
    return 0


def _scrape(client: httpx.Client) -> Scrape:
    try:
        response = client.get("/metrics")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigurationError(f"Cannot reach {client.base_url}: {error}.") from error
    if response.status_code == 404:
        raise ConfigurationError("The server has no metrics: start it with --enable-metrics.")
    if response.status_code != 200:
        raise ConfigurationError(f"{response.url} answered with status {response.status_code}.")
    try:
        return read(response.text, time.monotonic())
    except ValueError as error:
        raise ConfigurationError(f"{response.url} did not return metrics: {error}.") from error
