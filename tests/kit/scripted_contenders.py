"""Contenders that take part in a CPU contest without a process: they say what they were told to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.cpu.work import Ids, WorkError


class ScriptedContender:
    """Needs `token_s` for each token that it adds, and keeps a diary that contenders may share."""

    def __init__(self, name: str, token_s: float, diary: list[str] | None = None) -> None:
        self.name = name
        self.url: str | None = None
        self.versions: Mapping[str, str] = {name: "1"}
        self.diary = [] if diary is None else diary
        self.asked: list[Sequence[Ids]] = []
        self.fails_at: int | None = None  # the number of the call
        self.running = self.paused = False
        self._token_s = token_s

    def start(self) -> None:
        self.running, self.paused = True, False
        self.diary.append(f"{self.name} starts")

    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> float:
        if not self.running or self.paused:
            raise AssertionError(f"{self.name} was asked while it stood still")
        if self.fails_at == len(self.asked):
            raise WorkError("out of memory")
        self.asked.append(prompts)
        self.diary.append(f"{self.name} {len(prompts)} x {new_tokens}")
        return self._token_s * new_tokens * len(prompts)

    def ask(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"lag_s": 0.002} if job.get("lag") else {}

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def cpu_s(self) -> float:
        return 0.0

    def peak_bytes(self) -> int:
        return 3 * 2**20

    def stop(self) -> None:
        self.running = False
