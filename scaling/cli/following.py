"""A command that goes on until it is interrupted, and what it says meanwhile; used by ``scaling runs``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from scaling.tracking import SyncReport


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets, so that work in hand ends well; a second SIGINT interrupts."""
    stop = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Teller:
    """Says on stderr what a round did, where it differs from the last: a follower goes on for days."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, report: SyncReport) -> None:
        text = line(report)
        if text != self._said:
            typer.echo(text, err=True)
        self._said = text


def line(report: SyncReport) -> str:
    """One line about a round."""
    text = f"{report.store}: {report.runs} runs ({report.running} running), {report.points} values sent"
    if report.unavailable:
        return f"{text}; not now: {report.unavailable}"
    if report.problems:
        first = report.problems[0]
        return f"{text}; {len(report.problems)} with problems, first {first.run}: {first.reason}"
    return text
