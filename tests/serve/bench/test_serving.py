from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve.bench.__main__ import main
from serve.demo import demo_path

SMALL = ["--vocab-size", "100", "--num-prompts", "6", "--random-input-len", "5", "--random-output-len", "4"]
EXACT = [*SMALL, "--random-range-ratio", "1"]


def run(fake_server: Any, backend: str, *more: str) -> int:
    return main(["serving", "--base-url", fake_server.url, "--backend", backend, *more])


def prompts_file(tmp_path: Path, *prompts: str) -> list[str]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "output_len": 3}) + "\n" for prompt in prompts))
    return ["--dataset-name", "file", "--dataset-path", str(path), "--warmup-requests", "0"]


@pytest.mark.parametrize("backend", ["openai", "native"])
def test_result_file_holds_the_run(fake_server, tmp_path: Path, backend: str) -> None:
    path = tmp_path / "r.json"
    output = ["--output-file", str(path), "--output-details", "--goodput", "ttft:60000"]
    assert run(fake_server, backend, *EXACT, *output, "--api-key", "hidden", "--header", "X-A=hidden") == 0
    text = path.read_text()
    result = json.loads(text)
    assert (result["schema_version"], result["benchmark"]) == (1, "serving")
    assert {"date", "command", "machine", "versions", "settings"} <= set(result)
    assert {"cpu", "cores", "memory_bytes", "gpus"} <= set(result["machine"])
    figures = result["results"]
    assert (figures["completed"], figures["output_tokens"], figures["cached_tokens"]) == (6, 24, 18)
    assert figures["goodput_requests_per_s"] == figures["requests_per_s"]
    assert set(figures["ttft_ms"]) == {"mean", "median", "p90", "p95", "p99", "min", "max"}
    assert len(result["requests"]) == 6
    assert all(len(request["itl_s"]) == 3 for request in result["requests"])
    assert all(0 < request["ttft_s"] <= request["e2e_s"] for request in result["requests"])
    assert "hidden" not in text
    assert fake_server.headers[-1]["authorization"] == "Bearer hidden"


def test_the_server_is_asked_for_its_tokenizer(fake_server, capsys) -> None:
    words = ["--num-prompts", "2", "--random-input-len", "5", "--random-output-len", "2", "--warmup-requests", "0"]
    fake_server.tokenizer_path = demo_path()
    assert run(fake_server, "openai-chat", *words) == 0
    assert all(body["messages"][0]["content"] for body in fake_server.bodies)
    for path in (None, "/nowhere", "org/name", 7):
        fake_server.tokenizer_path = path
        assert run(fake_server, "openai-chat", *words) == 2
        assert "no server names its tokenizer: set --tokenizer" in capsys.readouterr().err


def test_details_are_left_out_unless_asked_for(fake_server, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert run(fake_server, "native", *SMALL, "--output-file", str(path)) == 0
    assert "requests" not in json.loads(path.read_text())


def test_chat_sends_texts_and_the_listed_model(fake_server, tmp_path: Path, capsys) -> None:
    assert run(fake_server, "openai-chat", *prompts_file(tmp_path, "one", "two")) == 0
    sent = sorted((body["messages"][0]["content"], body["model"]) for body in fake_server.bodies)
    assert sent == [("one", "fake-model"), ("two", "fake-model")]
    report = capsys.readouterr().out
    assert "TTFT (ms)" in report
    assert "goodput" not in report


def test_concurrency_is_limited(fake_server) -> None:
    assert run(fake_server, "native", *EXACT, "--max-concurrency", "2") == 0
    assert fake_server.peak == 2


def test_without_a_limit_all_run_at_once(fake_server) -> None:
    assert run(fake_server, "native", *EXACT[:-1], "1", "--random-output-len", "60") == 0
    assert fake_server.peak == 6


def test_warmup_is_sent_and_not_measured(fake_server, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    more = ["--warmup-requests", "3", "--flush-cache", "--output-file", str(path)]
    assert run(fake_server, "native", *EXACT, *more) == 0
    warmup, measured = fake_server.bodies[:3], fake_server.bodies[3:]
    assert json.loads(path.read_text())["results"]["completed"] == 6
    assert not {tuple(b["input_ids"]) for b in warmup} & {tuple(b["input_ids"]) for b in measured}
    assert fake_server.flushed == 1


def test_extra_body_and_eos_reach_the_server(fake_server) -> None:
    more = ["--disable-ignore-eos", "--extra-request-body", '{"temperature": 0.5}', "--model", "m"]
    assert run(fake_server, "openai", *SMALL, *more) == 0
    body = fake_server.bodies[-1]
    assert (body["temperature"], body["model"], "ignore_eos" in body) == (0.5, "m", False)


def test_the_same_seed_sends_the_same_prompts(fake_server) -> None:
    assert run(fake_server, "native", *SMALL, "--max-concurrency", "1", "--warmup-requests", "0") == 0
    assert run(fake_server, "native", *SMALL, "--max-concurrency", "1", "--warmup-requests", "0") == 0
    assert fake_server.bodies[:6] == fake_server.bodies[6:]


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("refuse", "HTTP 500"),
        ("garbage", "not JSON"),
        ("cut", "in the middle"),
        ("error", "the step failed"),
    ],
)
def test_failures_are_counted_and_shown(fake_server, tmp_path: Path, capsys, word: str, shown: str) -> None:
    path = tmp_path / "r.json"
    more = [*prompts_file(tmp_path, "fine", word, word), "--output-file", str(path)]
    assert run(fake_server, "openai-chat", *more) == 0
    figures = json.loads(path.read_text())["results"]
    assert (figures["completed"], figures["failed"]) == (1, 2)
    assert f"error, 2 times: {next(iter(figures['errors']))}" in capsys.readouterr().out
    assert shown in next(iter(figures["errors"]))


def test_requests_that_hang_time_out(fake_server, tmp_path: Path, capsys) -> None:
    more = [*prompts_file(tmp_path, "hang"), "--request-timeout-s", "0.2"]
    assert run(fake_server, "openai-chat", *more) == 1
    assert "no complete answer within 0.2 s" in capsys.readouterr().out


def test_a_run_without_success_fails(fake_server, tmp_path: Path) -> None:
    assert run(fake_server, "openai-chat", *prompts_file(tmp_path, "refuse")) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "--tokenizer"),
        (["--vocab-size", "9", "--send", "ids", "--backend", "openai-chat"], "--send text"),
        (["--vocab-size", "9", "--goodput", "x:1"], "--goodput"),
        (["--vocab-size", "9", "--extra-request-body", "[1]"], "JSON object"),
        (["--vocab-size", "9", "--header", "oops"], "NAME=VALUE"),
        (["--dataset-name", "file"], "--dataset-path"),
        (["--vocab-size", "9", "--num-prompts", "0"], "at least 1"),
    ],
)
def test_unusable_command_lines_are_refused(capsys, more: list[str], words: str) -> None:
    assert main(["serving", "--backend", "native", *more]) == 2
    assert words in capsys.readouterr().err


def test_a_dead_server_is_refused_before_the_run(refused_url: str, capsys) -> None:
    assert main(["serving", "--base-url", refused_url, "--backend", "native", *SMALL]) == 2
    assert "The warm-up request failed: no connection" in capsys.readouterr().err


def test_unknown_commands_show_the_usage(capsys) -> None:
    assert main(["serve"]) == 2
    assert main(["--help"]) == 0
    _, _, listed = capsys.readouterr().out.partition("commands:\n")
    assert [line.split()[0] for line in listed.splitlines()] == ["serving", "offline", "latency"]


def test_importing_the_serving_benchmark_imports_no_torch() -> None:
    code = "import sys, serve.bench.serving, serve.bench.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
