"""`cpu-peers`: an environment for each peer, with what its users install from the package index."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import PROGRAM
from bench.cpu.engines import PEERS, Peer, cache_directory
from serve.bench import report
from serve.bench.options import new_parser


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "cpu-peers", "Install the engines that `cpu` compares with, each in its own venv.", program=PROGRAM
    )
    options.add_argument("names", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; default: all")
    options.add_argument("--peers", default=str(cache_directory() / "peers"), metavar="DIR")
    return options


def main(argv: Sequence[str]) -> int:
    """Install; 1 when one of them could not be."""
    options = parser().parse_args(argv)
    unknown = set(options.names) - PEERS.keys()
    if unknown:
        parser().error(f"there is no peer {', '.join(sorted(unknown))}")
    results = [make(PEERS[name], Path(options.peers)) for name in options.names or PEERS]
    return 0 if all(results) else 1


def make(peer: Peer, peers: Path) -> bool:
    """Make the peer's environment anew or bring it up to date; False when pip refused."""
    directory = peers / peer.name
    complete = directory / "complete"
    complete.unlink(missing_ok=True)
    python = str(peer.python(peers))
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    commands = [[python, "-m", "pip", "install", "--quiet", "--upgrade", *peer.packages]]
    if peer.unneeded:
        commands.append([python, "-m", "pip", "uninstall", "--quiet", "--yes", *peer.unneeded])
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            report.say(f"{peer.name}: not installed")
            return False
    complete.touch()
    report.say(f"{peer.name}: installed in {directory}")
    return True
