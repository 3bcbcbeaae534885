"""Send requests that schemathesis generates from /openapi.json. Arguments: URL, number of requests, number of the
first round (0).

Prints how often each status occurred. Each round has other requests, so that a long run can be divided.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

STATUSES = {200, 400, 401, 403, 404, 405, 409, 413, 422, 429, 501, 503}
PER_ROUND, MAX_ROUNDS = 100, 100
ELSEWHERE = ("/start_profile", "/stop_profile", "/freeze_gc")  # routes that slow the whole process down


def main(url: str, num_cases: int, first_round: int = 0) -> None:
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [each for each in operations if each.path not in ELSEWHERE]
    found: Counter[int] = Counter()
    wrong: dict[str, str] = {}
    for round_number in range(first_round, MAX_ROUNDS):
        varied = []
        for operation in operations:
            before = found.total()
            ask(operation, url, PER_ROUND, round_number, found, wrong)
            if found.total() - before == PER_ROUND:  # otherwise no further request exists for it
                varied.append(operation)
            sys.stderr.write(f"round {round_number}: {found.total()} cases, {len(wrong)} wrong: {operation.path}\n")
            if found.total() >= num_cases:
                varied = []
                break
        operations = varied
        if not operations:
            break
    print(sum(found.values()), dict(found), "last round", round_number)
    for name, text in wrong.items():
        print(name, text)
    sys.exit(bool(wrong))


def ask(operation: Any, url: str, num_cases: int, number: int, found: Counter[int], wrong: dict[str, str]) -> None:
    """Send cases of one operation, including invalid ones. Each round has other cases."""
    name = f"{operation.method.upper()} {operation.path}"

    @seed(7 + number)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        response = case.call(base_url=url, timeout=300)
        found[response.status_code] += 1
        trouble = trouble_of(response, is_ollama=operation.path.startswith("/api/"))
        if trouble:
            wrong.setdefault(f"{name} {trouble}", f"{case.as_curl_command()[:1500]} -> {response.text[:500]}")

    send()


def trouble_of(response: Any, *, is_ollama: bool) -> str:
    """Return a short description of what is wrong with an answer, or ""."""
    if response.status_code not in STATUSES:
        return f"status {response.status_code}"
    if response.status_code < 400 or response.request.method == "HEAD" or not response.content:
        return ""
    if not response.headers["content-type"][0].startswith("application/json"):
        return f"{response.status_code} as {response.headers['content-type'][0]}"
    error = response.json().get("error")
    message = error if is_ollama else error.get("message") if isinstance(error, dict) else None
    return "" if isinstance(message, str) and message else f"{response.status_code} of another shape"


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
