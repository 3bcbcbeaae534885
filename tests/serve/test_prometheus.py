"""A real Prometheus scrapes a real server. promtool checks the metrics and the configuration."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from runtime.metrics.declarations import BY_NAME
from server_process import serving

DOCS = Path(__file__).parents[2] / "docs" / "monitoring"
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def expressions() -> list[str]:
    """Return the expressions of the dashboard with Grafana's variables filled in."""
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [text.replace("$__rate_interval", "1m").replace("$model", ".*") for text in texts]


def test_dashboard_alerts_and_documents_name_metrics_that_exist() -> None:
    alerts = yaml.safe_load((DOCS / "alerts.yml").read_text(encoding="utf-8"))
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    readme = (DOCS / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"(?:sglang|penstock):\w+", " ".join([*expressions(), *rules, readme])))
    assert len(used) > 15
    unknown = {name for name in used if name not in BY_NAME and SUFFIX.sub("", name) not in BY_NAME}
    assert unknown == set()


@pytest.mark.slow
def test_promtool_accepts_configuration_and_alerts() -> None:
    promtool = tool("promtool")
    subprocess.run([promtool, "check", "config", str(DOCS / "prometheus.yml")], check=True)


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    program = tool("prometheus")
    config = yaml.safe_load((DOCS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"]["scrape_interval"] = "1s"
    config["rule_files"] = [str(DOCS / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        [program, *options, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL, cwd=folder
    )
    try:
        with httpx.Client(base_url=f"http://{address}") as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def query(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    try:
        answer = client.get("/api/v1/query", params={"query": expression}).raise_for_status().json()
    except httpx.HTTPError:  # the server has not started yet
        return []
    return answer["data"]["result"]


def until_some(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    for _ in range(300):
        if found := query(client, expression):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{expression} has no samples")


@pytest.mark.slow
def test_prometheus_scrapes_the_server_and_answers_the_dashboard(tmp_path: Path) -> None:
    tool("prometheus")
    with serving("--enable-metrics", "--collect-tokens-histogram") as server:
        with prometheus(tmp_path, server.url.removeprefix("http://")) as client:
            body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
            httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()
            until_some(client, 'up{job="penstock"} == 1')
            until_some(client, "sglang:num_requests_total == 2")  # including the warm-up request
            assert until_some(client, "sglang:generation_tokens_total")[0]["value"][1] == "28"
            names = client.get("/api/v1/label/__name__/values").json()["data"]
            scraped = {name if name in BY_NAME else SUFFIX.sub("", name) for name in names}
            of_images = {name for name in BY_NAME if name.startswith("penstock:image")}  # of models that see
            assert set(BY_NAME) - {"penstock:adapter_requests"} - of_images <= scraped  # no adapter was named
            assert query(client, "scrape_samples_scraped")[0]["value"][1] > "0"
            for expression in expressions():
                answer = client.get("/api/v1/query", params={"query": expression})
                assert answer.json()["status"] == "success", (expression, answer.text)
        text = httpx.get(f"{server.url}/metrics").text
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, text=True, capture_output=True, check=False
    )
    # 3: readable, but promtool reserves colons in names for rules
    assert done.returncode in (0, 3), done.stderr
    assert "error while" not in done.stderr
