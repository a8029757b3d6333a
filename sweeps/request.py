"""What passes between a pool and its workers: a run to train, and how it went.

Below ``worker`` and ``pool``, which must not import each other (a worker installs signal handlers as it is imported).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from scaling.config.tree import RunConfig, to_dict

TRAINER: Final = "scaling.train:train"  # module:function(config, *, out) that trains one run
LOG: Final = "log.txt"  # in the run folder: what the training printed


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One run for a worker. ``launcher`` starts it on several processes (empty: a pool's own worker trains it).

    With ``wait_busy`` a run that another process still holds is waited for: a requeued job's twin on a lost node.
    """

    key: str
    config: Mapping[str, Any]
    out: str
    launcher: tuple[str, ...] = ()
    wait_busy: bool = False

    @classmethod
    def of(cls, key: str, config: RunConfig, out: str, **rest: Any) -> Request:
        return cls(key=key, config=to_dict(config), out=out, **rest)

    def line(self) -> str:
        tree = {"key": self.key, "config": self.config, "out": self.out, "wait_busy": self.wait_busy}
        return json.dumps(tree, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run left the pool: an end record's status, ``interrupted``, ``busy`` or ``waiting`` (never started)."""

    key: str
    outcome: str
    reason: str = ""
