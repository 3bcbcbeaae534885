"""Coding agents from npm run against a real server. Their answers' sense does not matter, the protocol does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Agents send prompts of thousands of tokens. The first blank ends each answer.
OPTIONS = ("--json-model-override-args", '{"max_position_embeddings": 65536}', "--max-total-tokens", "150000")
OPTIONS += ("--preferred-sampling-params", '{"max_new_tokens": 64, "stop": [" "]}', "--random-seed", "1")
CODEX = """
model = "penstock-demo"
model_provider = "penstock"
[model_providers.penstock]
name = "penstock"
base_url = "{url}/v1"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*OPTIONS) as running:
        yield running


def run(agent: Path, words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an agent in an empty repository, with a home of its own."""
    subprocess.run(["git", "init", "-q", str(folder)], check=True, capture_output=True)
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
    return subprocess.run(
        [str(agent), *words],
        cwd=folder,
        env={**kept, "HOME": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("npm_program", ["@openai/codex@0.169.0:codex"], indirect=True)
def test_codex_completes_a_turn(npm_program: Path, server: Server, tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(CODEX.format(url=server.url))
    done = run(npm_program, ["exec", "--skip-git-repo-check", "--json", "Say hello"], tmp_path)
    kinds = [json.loads(line)["type"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert kinds[-1] == "turn.completed", done.stdout


@pytest.mark.parametrize("npm_program", ["@anthropic-ai/claude-code@2.1.197:claude"], indirect=True)
def test_claude_code_prints_an_answer(npm_program: Path, server: Server, tmp_path: Path) -> None:
    words = ["-p", "Say hello", "--system-prompt", "Be brief.", "--tools", "Read", "--output-format", "json"]
    done = run(
        npm_program,
        words,
        tmp_path,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="penstock-demo",
        ANTHROPIC_SMALL_FAST_MODEL="penstock-demo",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="64",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["subtype"], told["is_error"]) == ("success", False)
    assert told["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("npm_program", ["opencode-ai@1.18.33:opencode"], indirect=True)
def test_opencode_prints_an_answer(npm_program: Path, server: Server, tmp_path: Path) -> None:
    demo = {"name": "demo", "limit": {"context": 60_000, "output": 64}}
    options = {"baseURL": f"{server.url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "p", "options": options, "models": {"penstock-demo": demo}}
    names = dict.fromkeys(("model", "small_model"), "penstock/penstock-demo")
    config = {"provider": {"penstock": provider}, **names, "share": "disabled", "autoupdate": False}
    (tmp_path / "opencode.json").write_text(json.dumps(config))
    done = run(npm_program, ["run", "--format", "json", "Say hello"], tmp_path)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in {event["type"] for event in events}, done.stdout
    assert "step_finish" in {event["type"] for event in events}, done.stdout
