from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.cpu import engines
from bench.cpu.engines import PEERS, SCRIPTS, Peer, chosen_peers, converted
from runtime.errors import ConfigurationError

CONVERT = """
import os, sys
import answering

def convert(options):
    if options.weights == "int8":
        raise NotImplementedError("no 8 bits here")
    os.mkdir(options.output)
    with open(os.path.join(options.output, "from"), "x") as file:
        file.write(options.checkpoint)

answering.main((), convert, None)
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A peer that runs on this Python, and whose conversion writes the source's name."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run_named.py").write_text(CONVERT)
    (tmp_path / "scripts" / "answering.py").write_text((SCRIPTS / "answering.py").read_text())
    (tmp_path / "peers" / "named" / "bin").mkdir(parents=True)
    (tmp_path / "peers" / "named" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "models" / "T" / "checkpoint").mkdir(parents=True)
    (tmp_path / "models" / "T" / "checkpoint" / "model.safetensors").touch()
    monkeypatch.setattr(engines, "SCRIPTS", tmp_path / "scripts")
    return Peer("named", "run_named.py", ())


def test_a_checkpoint_is_converted_once(peer: Peer, tmp_path: Path) -> None:
    folders = (tmp_path / "peers", tmp_path / "models")
    directory = converted(peer, *folders, "T", "bf16")
    assert (directory / "from").read_text() == str(tmp_path / "models" / "T" / "checkpoint")
    assert converted(peer, *folders, "T", "bf16") == directory


def test_an_unfinished_conversion_is_begun_again(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "models" / "T" / "named-bf16").mkdir()
    directory = converted(peer, tmp_path / "peers", tmp_path / "models", "T", "bf16")
    assert (directory / "from").is_file()


def test_a_conversion_that_fails_says_why(peer: Peer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no 8 bits here"):
        converted(peer, tmp_path / "peers", tmp_path / "models", "T", "int8")


def test_only_whole_installations_take_part(tmp_path: Path) -> None:
    for name in ("vllm", "openvino"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    (tmp_path / "openvino" / "complete").touch()
    assert [peer.name for peer in chosen_peers(tmp_path, None)] == ["openvino"]
    assert chosen_peers(tmp_path, []) == []


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_every_peers_script_says_its_options_without_its_engine(peer: Peer) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / peer.script), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "{convert,run}" in done.stdout
