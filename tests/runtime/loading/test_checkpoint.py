from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import tiny_checkpoints
import tiny_encoders
from runtime.config.pooling import read_sentence_files
from runtime.errors import CheckpointError
from runtime.loading import remote
from runtime.loading.checkpoint import DESCRIPTIONS, find_weights, locate, read_header


def test_local_directory_is_taken_as_it_is(tmp_path) -> None:
    assert locate(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere/at/all", "/nowhere", "~/models/x"])
def test_path_that_leads_nowhere_is_refused_without_asking_the_hub(name) -> None:
    with pytest.raises(CheckpointError, match="There is no directory"):
        locate(name)


def offline(code: str, cache: object, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run code in a separate process, because the Hub's client reads its settings on import."""
    return subprocess.run(
        [sys.executable, "-c", f"from runtime.loading.checkpoint import locate; {code}"],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "PATH": "", **settings},
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


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """Serve a Hub with one model, some/model, that has these files. Return its URL."""
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    commit = "1" * 40

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path, headers = unquote(urlsplit(self.path).path), {}
            if path.startswith("/api/models/some/model/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
                body = json.dumps(tree).encode()
            elif path.startswith("/api/models/some/model"):
                listed = [{"rfilename": name} for name in files]
                body = json.dumps({"id": "some/model", "sha": commit, "siblings": listed}).encode()
            elif path.startswith(f"/some/model/resolve/{commit}/"):
                body = files[path.removeprefix(f"/some/model/resolve/{commit}/")]
                headers = {"ETag": f'"{sha1(body).hexdigest()}"', "X-Repo-Commit": commit}
            else:
                self.send_error(404)
                return
            self.send_response(200)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def embedding_model(folder: Path) -> None:
    """A model with a folder for pooling, a folder with the weights of a dense layer, and an unneeded folder."""
    tiny_checkpoints.write(folder)
    weight, bias = torch.ones(8, 32), torch.zeros(8)
    tiny_encoders.save_sentence_files(folder, pooling={"pooling_mode_cls_token": True}, dense=(weight, bias))
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.bin").write_bytes(b"not wanted")


FOLDERS = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}


def copied(folder: Path) -> set[str]:
    """Return the files that a download put into subfolders of the model."""
    return {str(file.relative_to(folder)) for file in folder.glob("*/*")}


def test_hub_model_comes_with_the_folders_that_say_how_its_vectors_are_made(tmp_path: Path) -> None:
    embedding_model(tmp_path / "there")
    with hub(tmp_path / "there") as url:
        online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url}
        for weights, folders in ((False, FOLDERS - {"2_Dense/model.safetensors"}), (True, FOLDERS)):
            code = f"print(locate('some/model', weights={weights}))"
            result = offline(code, tmp_path / str(weights), **online)
            assert result.returncode == 0, result.stderr
            found = Path(result.stdout.strip())
            assert copied(found) == folders
            assert (found / "model.safetensors").exists() == weights
    sentences = read_sentence_files(found)
    assert sentences is not None
    assert sentences.pooling.modes == ("cls",)
    assert offline(code, tmp_path / "True").stdout.strip() == str(found)  # works again without the Hub


def test_a_model_whose_weights_a_running_server_has_comes_without_them(tmp_path: Path) -> None:
    tiny_checkpoints.write(tmp_path / "there")
    with hub(tmp_path / "there") as url:
        code = "print(locate('some/model', load_format='remote_instance'))"
        result = offline(code, tmp_path / "here", HF_HUB_OFFLINE="0", HF_ENDPOINT=url)
    found = Path(result.stdout.strip())
    assert (found / "config.json").exists(), result.stderr
    assert not (found / "model.safetensors").exists()


def test_model_of_a_store_comes_with_the_same_folders(tmp_path: Path) -> None:
    embedding_model(tmp_path / "there")
    fsspec.filesystem("memory").put(str(tmp_path / "there"), "/models/vectors", recursive=True)
    found = remote.download("memory://models/vectors", str(tmp_path / "here"), DESCRIPTIONS)
    assert copied(Path(found)) == FOLDERS


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
