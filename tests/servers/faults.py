"""What the fault proxy is told to do: rules, in order, and an account of what became of them.

Every request meets the first rule that matches and has hits left. Chance is seeded, and begins anew with each
set of rules. The log keeps the last 10,000 requests.
"""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

__all__ = ["Fault", "Rule", "RuleBook"]

Fault = Literal[
    "delay",  # only delay_seconds, which every rule may have
    "status",  # answer `status` and `code`; the server is not asked
    "refuse",  # reset the connection; the server is not asked
    "reset",  # RST after `after_bytes` of the response's body
    "truncate",  # FIN after `after_bytes`
    "corrupt",  # flip `length` bytes from `after_bytes` on
    "hang",  # fall silent after `after_bytes` (None: before the head) for `hang_seconds` (None: for good)
    "trickle",  # after `after_bytes` one byte at a time, at `bytes_per_second`
    "throttle",  # both bodies at `bytes_per_second`
    "lost_acknowledgement",  # let the server do it all, then reset instead of its answer
]

_LOG_REQUESTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What to do to which requests: all of `method`, `path` and `header` match, `skip` of them passed by."""

    fault: Fault
    method: str | None = None
    path: str = ""
    """Regular expression, searched in the request's target."""
    header: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions by header name; a missing header is empty."""
    skip: int = 0
    count: int | None = None
    probability: float = 1.0
    delay_seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"
    after_bytes: int | None = 0
    length: int = 1
    hang_seconds: float | None = None
    bytes_per_second: float = 10.0

    def __post_init__(self) -> None:
        if self.fault not in get_args(Fault):
            raise ValueError(f"fault must be one of {', '.join(get_args(Fault))}: {self.fault!r}")
        if self.after_bytes is None and self.fault != "hang":
            raise ValueError(f"after_bytes=None is for hang, not {self.fault}")

    def matches(self, method: str, target: str, headers: dict[str, str]) -> bool:
        return (
            self.method in (None, method)
            and re.search(self.path, target) is not None
            and all(re.search(want, headers.get(name.lower(), "")) for name, want in self.header.items())
        )


class RuleBook:
    """The rules in force, how often each was hit, and what was asked."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.replace([])

    def replace(self, rules: list[Rule]) -> None:
        self._rules = rules
        self._seen, self._hits = [0] * len(rules), [0] * len(rules)
        self._random = random.Random(self._seed)
        self.log: deque[dict[str, Any]] = deque(maxlen=_LOG_REQUESTS)

    def pick(self, method: str, target: str, headers: dict[str, str]) -> Rule | None:
        for index, rule in enumerate(self._rules):
            if not rule.matches(method, target, headers):
                continue
            self._seen[index] += 1
            if self._seen[index] <= rule.skip or (rule.count is not None and self._hits[index] >= rule.count):
                continue
            if rule.probability < 1 and self._random.random() >= rule.probability:
                continue
            self._hits[index] += 1
            return rule
        return None

    def report(self) -> bytes:
        return json.dumps({"hits": self._hits, "log": list(self.log)}).encode()
