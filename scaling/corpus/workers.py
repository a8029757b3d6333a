"""The worker processes that tokenize pieces, and the threads that feed them.

Between ``shards`` and ``preparation`` in ``scaling.corpus``. A few threads cut (and unpack) inputs side by side; at
most two pieces a worker are under way, so that memory stays bounded whatever the size of the input.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from scaling.corpus.pieces import Columns, Feed, Piece
from scaling.corpus.shards import Folder
from scaling.corpus.tokenizer import ByteEncoder, Encoder, TokenizerEncoder
from scaling.errors import DataUnavailable

FEEDERS: Final = 8  # threads that unpack; unpacking is several times as fast as tokenizing

_worker: list[tuple[Task, Encoder]] = []  # set once in each worker process


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a worker needs to know, once."""

    folder: Path
    columns: Columns
    tokenizer: str | None
    end_of_document: str | None
    fraction: float
    signatures: bool

    def encoder(self) -> Encoder:
        if self.tokenizer is None:
            return ByteEncoder()
        return TokenizerEncoder(self.tokenizer, end_of_document=self.end_of_document)

    def run(self, piece: Piece, encoder: Encoder) -> int:
        return Folder(self.folder).write_piece(
            piece, columns=self.columns, encoder=encoder, fraction=self.fraction, signatures=self.signatures
        )


def tokenize(
    cuts: Sequence[Feed | list[Piece]],
    task: Task,
    encoder: Encoder,
    workers: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Tokenize all pieces that are not complete yet.

    Raises
    ------
    DataError
        The first that a piece gave, or if a worker process died.
    OSError
        If shards cannot be written.
    """
    folder = Folder(task.folder)
    done = _Done(progress)
    if workers == 1:
        for cut in cuts:
            for piece in _pieces(cut):
                if not folder.is_complete(piece.name):
                    task.run(piece, encoder)
                done.add(piece.input_bytes)
        return
    with (
        ProcessPoolExecutor(
            max_workers=workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(task,),
        ) as pool,
        ThreadPoolExecutor(max_workers=min(FEEDERS, workers, len(cuts)), thread_name_prefix="feeder") as feeders,
    ):
        line = _Line(pool, folder, done, 2 * workers)
        feeding = [feeders.submit(line.feed, cut) for cut in cuts]
        try:
            for fed in feeding:
                fed.result()
            line.wait()
        except BrokenProcessPool:
            raise DataUnavailable(
                "a worker process died (out of memory?); use fewer --workers, then run again: "
                "what was tokenized is kept"
            ) from None
        except BaseException:
            line.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class _Done:
    """Adds up what is done, from several threads."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._total = 0

    def add(self, amount: int) -> None:
        with self._lock:
            self._total += amount
            if self._progress is not None:
                self._progress(self._total)


class _Line:
    """Pieces on their way to workers, a bounded number of them."""

    def __init__(self, pool: ProcessPoolExecutor, folder: Folder, done: _Done, length: int) -> None:
        self._pool = pool
        self._folder = folder
        self._done = done
        self._free = threading.Semaphore(length)
        self._length = length
        self._error: BaseException | None = None

    def feed(self, cut: Feed | list[Piece]) -> None:
        for piece in _pieces(cut):
            if self._error is not None:
                raise self._error
            if self._folder.is_complete(piece.name):
                self._done.add(piece.input_bytes)
                continue
            self._free.acquire()
            size = piece.input_bytes
            self._pool.submit(_work, piece).add_done_callback(partial(self._finished, size))

    def _finished(self, size: int, future: Future[int]) -> None:
        if not future.cancelled():
            error = future.exception()
            if error is not None:
                self._error = self._error or error
            else:
                self._done.add(size)
        self._free.release()

    def wait(self) -> None:
        """Until every piece that was fed is finished."""
        for _ in range(self._length):
            self._free.acquire()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._error = self._error or KeyboardInterrupt()


def _pieces(cut: Feed | list[Piece]) -> Iterable[Piece]:
    return cut.pieces() if isinstance(cut, Feed) else cut


def _start(task: Task) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent decides
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    _worker.append((task, task.encoder()))


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(piece: Piece) -> int:
    task, encoder = _worker[0]
    return task.run(piece, encoder)
