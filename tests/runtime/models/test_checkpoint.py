from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import tiny_checkpoints
from runtime.errors import CheckpointError
from runtime.models.checkpoint import find_weights, locate, read_header


def test_local_directory_is_taken_as_it_is(tmp_path) -> None:
    assert locate(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere/at/all", "/nowhere", "~/models/x"])
def test_path_that_leads_nowhere_is_refused_without_asking_the_hub(name) -> None:
    with pytest.raises(CheckpointError, match="There is no directory"):
        locate(name)


def offline(code: str, cache: object) -> subprocess.CompletedProcess[str]:
    """Runs in a process of its own: the Hub's client reads its settings when it is imported."""
    return subprocess.run(
        [sys.executable, "-c", f"from runtime.models.checkpoint import locate; {code}"],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_hub_model_offline_says_what_to_do(tmp_path) -> None:
    result = offline("locate('nobody/nothing')", tmp_path)
    assert "CheckpointError: There is no directory nobody/nothing, no earlier download" in result.stderr


def test_earlier_download_serves_offline(tmp_path) -> None:
    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    tiny_checkpoints.write(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    result = offline("print(locate('some/model'))", tmp_path)
    assert result.stdout.strip() == str(snapshot), result.stderr
    result = offline(f"print(locate('some/model', download_dir='{tmp_path / 'hub'}'))", tmp_path / "empty")
    assert result.stdout.strip() == str(snapshot), result.stderr


def test_index_decides_which_files_count(tmp_path) -> None:
    tiny_checkpoints.write(tmp_path, max_shard_size="20KB")
    save_file({"stray": torch.zeros(1)}, tmp_path / "stray.safetensors")
    names = [file.name for file in find_weights(tmp_path).files]
    assert "stray.safetensors" not in names
    assert names == sorted(names)


def test_originals_beside_the_weights_are_left_alone(tmp_path) -> None:
    tiny_checkpoints.write(tmp_path)
    save_file({"stray": torch.zeros(1)}, tmp_path / "consolidated.00.safetensors")
    assert [file.name for file in find_weights(tmp_path).files] == ["model.safetensors"]


def test_format_may_be_forced(tmp_path) -> None:
    tiny_checkpoints.write(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    torch.save({}, tmp_path / "training_args.bin")
    assert find_weights(tmp_path).format == "safetensors"
    assert [file.name for file in find_weights(tmp_path, "pt").files] == ["pytorch_model.bin"]
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.bin or \*\.pt"):
        find_weights(tmp_path, "pt")


def test_damaged_index_is_refused(tmp_path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        find_weights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x05" + b"\0" * 7 + b"[1,2]", b"\xff" * 8])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(file)


def test_weight_file_that_cannot_be_opened_is_refused(tmp_path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        read_header(tmp_path / "model.safetensors")
