"""The command line as users see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.documents import differences, markdown, metrics_markdown, sampling_markdown
from ops.machine import Machine
from runtime.config import Args, options
from runtime.sampling_params import parameters
from serve import WrongPackageError, check_packages
from serve.__main__ import main
from serve.cli import explain
from serve.cli import main as cli
from serve.demo import demo_path

ROOT = Path(__file__).parents[3]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def run_python(code: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, **more
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["--page-sze", "1"],
        ["explain", "--table=markdown"],
        ["explain", "--table=sampling"],
    ],
)
def test_answers_without_torch(words: list[str]) -> None:
    code = f"import sys; from serve.__main__ import main; main({words}); sys.exit(int('torch' in sys.modules))"
    assert run_python(code).returncode == 0


def test_help_fits_a_screen_and_knows_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 40
    assert max(map(len, short.splitlines())) <= 100
    assert main(["help"]) == 0
    assert capsys.readouterr().out == short
    for words in (["help", "lora"], ["--help", "--lora"], ["serve", "-h", "LoRA"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert "--lora-paths" in text
        assert "--port" not in text
    assert main(["help", "no-such-thing"]) == 0
    assert "No option has the word 'no-such-thing'" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["help", "models"])
    assert "usage: penstock models" in capsys.readouterr().out


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "all"]) == 0
    text = capsys.readouterr().out
    assert "*: all origins" in text
    assert "*No effect*" not in text
    for option in options():
        for flag in option.flags if option.spec.outcome == "works" else [option.flag]:
            assert flag in text
    assert max(map(len, text.splitlines())) <= 110


def test_mistakes_are_listed_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "x", "--page-sze", "16"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "  - --port must be a whole number, not 'x'.\n" in said.err
    assert "  - --page-sze is not an option; did you mean --page-size?\n" in said.err
    assert "Traceback" not in said.err


def test_server_gets_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Args] = []
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(run=served.append))
    assert main(["--port", "1"]) == main(["serve", "--port", "1"]) == 0
    assert served == [Args.of(port=1)] * 2


def test_a_model_may_follow_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    served: list[Args] = []
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(run=served.append))
    assert main(["serve", "Qwen/Qwen3-8B", "--port", "1"]) == 0
    assert served == [Args.of(model_path="Qwen/Qwen3-8B", port=1)]
    assert main(["Qwen/Qwen3-8B"]) == 2
    assert "`penstock serve Qwen/Qwen3-8B`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--hlep", "--help"),
        ("--verison", "--version"),
        ("--modle", "--model"),
        ("--prot", "--port"),
        ("--contxt-length", "--context-length"),
        ("--length-context", "--context-length"),
        ("--max-seqs-running", "--max-running-requests"),
        ("benhc", "bench"),
        ("--zzz", ""),
    ],
)
def test_suggestions_weigh_letters_and_words(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    said = capsys.readouterr().err
    assert (f"did you mean {meant}?" in said) if meant else "did you mean" not in said


def test_bench_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    module = SimpleNamespace(main=lambda words: given.append(words) or 3)
    monkeypatch.setattr(cli, "import_module", lambda name: module)
    assert main(["bench", "serving", "--port", "x"]) == 3
    assert given == [["serving", "--port", "x"]]


def test_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("penstock ")


def test_explain_shows_asked_done_and_the_reason(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--model", model, "--page-size", "8", "--api-key", "hush-hush", "--sm-group-num", "4"]
    assert main(words) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("--")}
    assert rows["--page-size"] == ["--page-size", "8", "8", "as", "asked"]
    assert rows["--context-length"][1] == "256"
    assert rows["--sm-group-num"][2] == "nothing"
    assert "hush" not in text


def test_explain_shows_refusals_in_the_table_and_below(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "--model", model, "--enable-dp-attention", "--context-length", "999"]) == 2
    told = json.loads(capsys.readouterr().out)
    rows = {row["option"]: row for row in told["options"]}
    assert rows["--enable-dp-attention"]["done"] == rows["--context-length"]["done"] == "refused"
    assert len(told["refusals"]) == 2


def test_explain_for_another_machine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "--machine", "h200", "--model", model]) == 0
    rows = {row["option"]: row for row in json.loads(capsys.readouterr().out)["options"]}
    assert rows["--device"]["done"] == "cuda"
    assert "H200" in rows["--device"]["reason"]


@pytest.mark.parametrize(("machine", "code"), [("h200", 2), ("h200:8", 0)])
def test_explain_counts_the_gpus_of_the_machine(machine: str, code: int, model: str) -> None:
    assert main(["explain", "--json", "--machine", machine, "--model", model, "--dp-size", "8"]) == code


@pytest.mark.parametrize("machine", ["h300", "cpu:2", "h200:", "h200:0", "h200:65", "h200:1000"])
def test_explain_refuses_machines_that_it_does_not_know(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--machine", machine])
    assert f"argument --machine: {machine} is" in capsys.readouterr().err


def test_explain_refuses_draft_models_that_do_not_fit(model: str) -> None:
    def refused(**options: Any) -> list[str]:
        args = Args.of(model_path=model, **options)
        return explain.explain(args, Machine.named("h100"))[1]

    [why] = refused(speculative_algorithm="NEXTN")
    assert "needs multi-token prediction layers of" in why
    assert "not of LlamaForCausalLM" in why
    assert not refused(speculative_algorithm="STANDALONE", speculative_draft_model_path=model)
    [why] = refused(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(demo_path()))
    assert "its vocabulary has 4096 tokens, and that of the served model 100" in why
    assert not refused(speculative_algorithm="EAGLE3", speculative_draft_model_path="an/id-of-the-hub")
    [why] = refused(speculative_draft_model_path=str(demo_path()))
    assert "needs --speculative-algorithm" in why


def test_explain_without_a_model_says_what_it_can() -> None:
    rows, refusals = explain.explain(Args.of(enable_mscclpp=True, model_path="/nowhere/at/all"), Machine.named("cpu"))
    assert any("--enable-mscclpp" in refusal for refusal in refusals)
    assert any("/nowhere/at/all" in refusal for refusal in refusals)
    assert {row.option: row.done for row in rows}["--enable-mscclpp"] == "refused"


def test_explain_without_a_model_still_tells_the_kernels() -> None:
    rows, _ = explain.explain(Args.of(model_path="/nowhere/at/all"), Machine.named("h200"))
    done = {row.option: row.done for row in rows}
    assert done["--attention-backend"] == done["--decode-attention-backend"] == "triton"
    assert "--dtype" not in done


def test_explain_all_shows_every_option(model: str) -> None:
    rows, _ = explain.explain(Args.of(model_path=model), Machine.named("cpu"), everything=True)
    assert len(rows) == len(options()) + 1
    assert rows[-1].option == "(kernels)"
    assert {"attention with_onednn", "matmul with_onednn", "norm native"} <= set(rows[-1].done.split(", "))


def test_table_in_the_documentation_is_current() -> None:
    written = (ROOT / "docs" / "arguments.md").read_text(encoding="utf-8")
    assert written == markdown(), "write it with: just docs"


def test_table_of_sampling_parameters_in_the_documentation_is_current() -> None:
    written = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    assert written == sampling_markdown(), "write it with: just docs"
    for parameter in parameters():
        assert f"| `{parameter.name}` |" in written


def test_table_of_metrics_in_the_documentation_is_current() -> None:
    written = (ROOT / "docs" / "monitoring" / "metrics.md").read_text(encoding="utf-8")
    assert written == metrics_markdown(), "write it with: just docs"


def test_differences_in_the_documentation_are_current() -> None:
    written = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    assert differences() in written, "write them with: just study documents differences"


def test_own_packages_pass_the_check() -> None:
    check_packages()


def test_foreign_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from serve.__main__ import main; "
    done = run_python(code + "sys.exit(main(['--help']))", cwd=tmp_path)
    assert done.returncode == 2
    assert "The package 'ops' is not Penstock's" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_package_is_named() -> None:
    with pytest.raises(WrongPackageError, match="package 'penstock_nothing' is missing"):
        check_packages(("penstock_nothing",))
