"""Being asked to leave: SIGINT, SIGTERM and SIGUSR2 become a flag that the trainer reads between steps.

Slurm sends SIGTERM on preemption and cancellation, SIGUSR2 (by convention) before the time limit. The command installs
the handlers in its first line, before PyTorch is imported, since a signal may come in the seconds that takes. Where
nothing would be lost (an evaluation, the first step, which may compile for minutes) the trainer lets the signal break
the work off at once. No torch here.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class Interrupted(BaseException):
    """Raised out of interruptible work; not an ``Exception``, so that no library in between swallows it."""


class StopRequest:
    """Whether, and by which signal, this process was asked to leave."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._depth = 0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def listen(self) -> bool:
        """Install the handlers; ``False`` where they are installed already, or outside the main thread."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return False
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return True

    def forget(self) -> None:
        """Put the earlier handlers back and clear the request."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        self.signal = None

    @contextlib.contextmanager
    def interruptible(self, enabled: bool = True) -> Iterator[None]:
        """Within, a request raises ``Interrupted`` at once, also one that came before."""
        if not enabled:
            yield
            return
        self._depth += 1
        try:
            if self.requested:
                raise Interrupted
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a signal ends the process: for waits outside of Python, which would never see the request."""
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._previous:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.signal == signal.SIGINT and number == signal.SIGINT
        self.signal = signal.Signals(number)
        if again:
            raise KeyboardInterrupt  # a person pressed Ctrl-C twice: leave without a checkpoint
        if self._depth:
            raise Interrupted


STOP: Final = StopRequest()  # a process has one set of signal handlers, so it has one of these
