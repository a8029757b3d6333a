"""Running a person's own command when a sweep is over or a run of it fails: a mail, a message, anything.

Called by ``watch`` and by the local executor. Words in braces are filled in: ``{sweep}``, ``{event}`` (finished,
failed), ``{runs}``, ``{summary}``; the same are in the environment as SWEEP_NAME, SWEEP_EVENT, SWEEP_RUNS,
SWEEP_SUMMARY.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from scaling.errors import ConfigError
from scaling.sweeps.status import SweepStatus

logger = logging.getLogger(__name__)

LIMIT_S: Final = 60.0
WORDS: Final = ("sweep", "event", "runs", "summary")


def notify(command: str, event: str, now: SweepStatus, runs: Sequence[str] = ()) -> bool:
    """Run the command; a failing one is logged and changes nothing else. Says whether it worked.

    Raises
    ------
    ConfigError
        If the command has a word in braces that is not known.
    """
    summary = ", ".join(f"{count} {state}" for state, count in now.counts.items())
    values = {"sweep": now.plan.spec.name, "event": event, "runs": " ".join(runs), "summary": summary}
    words = _filled(command, values)
    environment = {**os.environ, **{f"SWEEP_{name.upper()}": value for name, value in values.items()}}
    try:
        done = subprocess.run(words, env=environment, timeout=LIMIT_S, capture_output=True, text=True, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("notify: %s", error)
        return False
    if done.returncode != 0:
        logger.warning("notify: exit status %d: %s", done.returncode, done.stderr.strip())
    return done.returncode == 0


def check_command(command: str) -> None:
    """Refuse a command that ``notify`` would refuse, before hours of watching.

    Raises
    ------
    ConfigError
        If it is empty, its quotes are open, or it has a word in braces that is not known.
    """
    _filled(command, dict.fromkeys(WORDS, ""))


def _filled(command: str, values: Mapping[str, str]) -> list[str]:
    try:
        words = [word.format(**values) for word in shlex.split(command)]
    except (KeyError, IndexError, ValueError, AttributeError):
        words = []
    if not words:
        raise ConfigError(f"notify: {command!r}: give a command; allowed in braces: {', '.join(WORDS)}")
    return words
