"""From files to a store: every format, the split, duplicates, and that the bytes depend on the input alone."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.corpus import Document, pieces, prepare, python_library_documents, shards
from scaling.corpus.inputs import find_inputs
from scaling.corpus.pieces import Columns, feeds, read_piece
from scaling.tokens import SPLITS, TokenStore, is_held_out

Make = Callable[..., list[Document]]


def texts_of(store: TokenStore, split: str | None = None) -> list[tuple[str, str]]:
    """(source, text) of a store of plain bytes."""
    found = []
    for part in store.meta.parts:
        for document in range(part.first_document, part.last_document):
            ids = store.tokens[store.offsets[document] : store.offsets[document + 1]]
            assert ids[-1] == store.meta.end_of_document
            if split in (None, part.split):
                found.append((part.source, bytes(ids[:-1].astype(np.uint8)).decode("utf-8")))
    return found


def pairs(items: list[Document]) -> list[tuple[str, str]]:
    return sorted((item.source, item.text) for item in items)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def lines(items: list[Document]) -> bytes:
    return b"".join(json.dumps({"source": d.source, "text": d.text}).encode() + b"\n" for d in items)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut everything into pieces and shards of 2 kB instead of 16 MiB."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 1500)


@pytest.mark.usefixtures("small_pieces")
def test_every_format_gives_the_same_documents(tmp_path: Path, make_documents: Make) -> None:
    items = make_documents(60, "a") + make_documents(40, "b")
    data = lines(items)
    (tmp_path / "plain.jsonl").write_bytes(data)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(data[:3000]) + gzip.compress(data[3000:]))
    (tmp_path / "packed.jsonl.xz").write_bytes(lzma.compress(data[:5000]) + bytes(8) + lzma.compress(data[5000:]))
    frames = [zstandard.ZstdCompressor().compress(part) for part in (data[:7000], data[7000:])]
    (tmp_path / "packed.jsonl.zst").write_bytes(b"".join(frames))
    table = pa.table({"source": [d.source for d in items], "n": list(range(100)), "text": [d.text for d in items]})
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=15)
    for name in ("plain.jsonl", "packed.jsonl.gz", "packed.jsonl.xz", "packed.jsonl.zst", "table.parquet"):
        store = prepare([tmp_path / name], tmp_path / "stores" / name, held_out_fraction=0.2)
        assert sorted(texts_of(store)) == pairs(items), name
        inputs, _ = find_inputs([tmp_path / name])
        assert len(list(feeds(inputs)[0].pieces())) > 5, "the test must cross piece borders"


@pytest.mark.usefixtures("small_pieces")
def test_the_store_does_not_depend_on_workers(tmp_path: Path, make_documents: Make) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(make_documents(60, "a")))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(make_documents(60, "b"))))
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    one = prepare(sources, tmp_path / "one", vocab_size=300, held_out_fraction=0.2, near_duplicates=0.9)
    two = prepare(sources, tmp_path / "two", vocab_size=300, held_out_fraction=0.2, near_duplicates=0.9, workers=2)
    assert files(one.path) == files(two.path)


def test_trees_patterns_and_names(tmp_path: Path) -> None:
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / ".git").mkdir()
    (tmp_path / "tree" / "one.py").write_text("one = 1\n")
    (tmp_path / "tree" / "inner" / "two.md").write_text("# two\n")
    (tmp_path / "tree" / "inner" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "tree" / ".git" / "config.txt").write_text("hidden\n")
    (tmp_path / "tree" / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "tree" / "empty.txt").write_text(" \n")
    whole = prepare([tmp_path / "tree"], tmp_path / "s1", held_out_fraction=0)
    assert sorted(texts_of(whole)) == [("tree", "# two\n"), ("tree", "one = 1\n")]
    assert whole.meta.skipped == {"empty": 1, "not UTF-8": 1, "unknown ending": 1}
    pattern = prepare([f"code={tmp_path}/tree/**/*.py"], tmp_path / "s2", held_out_fraction=0)
    assert texts_of(pattern) == [("code", "one = 1\n")]
    (tmp_path / "tree" / "notes.log").write_text("logged\n")
    logged = prepare([tmp_path / "tree" / "notes.log"], tmp_path / "s3", text_suffixes=[".log"], held_out_fraction=0)
    assert texts_of(logged) == [("notes", "logged\n")]


def test_a_large_text_file_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100)
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "large.txt").write_text(text)
    inputs, _ = find_inputs([tmp_path / "large.txt"])
    parts = [d.text for p in feeds(inputs)[0].pieces() for d in read_piece(p, Columns(), Counter())]
    assert len(parts) > 5 and "".join(parts) == text and all(part.endswith("\n") for part in parts)


@given(
    texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=30),
    copies=st.lists(st.integers(0, 29), max_size=30),
    fraction=st.floats(0.1, 0.9),
)
def test_no_document_is_on_both_sides(texts: list[str], copies: list[int], fraction: float) -> None:
    """Also where copies stay: the side is a function of the text."""
    everything = texts + [texts[i % len(texts)] for i in copies]
    hashes = np.array([hash_of(text) for text in everything], dtype=np.uint64)
    sides = is_held_out(hashes, fraction)
    held_out = {text for text, side in zip(everything, sides, strict=True) if side}
    train = {text for text, side in zip(everything, sides, strict=True) if not side}
    assert not held_out & train


def hash_of(text: str) -> int:
    from scaling.corpus.documents import digest

    return int.from_bytes(digest(Document(text, "").encode())[:8], "little")


def test_copies_never_meet_across_the_split(tmp_path: Path, make_documents: Make) -> None:
    items = make_documents(200, "a")
    copied = [Document(d.text, "b") for d in items[:100]]
    for keep in (True, False):
        store = prepare(items + copied, tmp_path / str(keep), held_out_fraction=0.3, drop_duplicates=not keep)
        sides = [{text for _, text in texts_of(store, split)} for split in SPLITS]
        assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200
        assert store.meta.num_documents == (300 if keep else 200)
        assert sorted(texts_of(store)) == pairs(items + copied if keep else items)
        assert store.meta.dropped == ({} if keep else {"duplicate": 100})
        assert 0.15 < store.tokens_of("held_out") / store.num_tokens < 0.45


def test_near_duplicates_are_dropped_and_others_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vocabulary = [f"word{i}" for i in range(2000)]

    def text(words: list[str]) -> str:
        return " ".join(words)

    originals = [list(rng.choice(vocabulary, 400)) for _ in range(120)]
    near, far = [], []
    for words in originals[:60]:
        changed = list(words)
        changed[int(rng.integers(400))] = "CHANGED"  # 5 of 396 runs differ: similarity 391/401 = 0.975
        near.append(Document(text(changed).upper().replace(" ", "\n"), "near"))
    for words in originals[60:]:
        changed = list(words)
        for place in range(0, 400, 10):
            changed[place] = "changed"  # half of the runs differ: similarity a third
        far.append(Document(text(changed), "far"))
    items = [Document(text(words), "original") for words in originals]
    store = prepare(items + near + far, tmp_path / "s", near_duplicates=0.8, held_out_fraction=0.1)
    kept = Counter(source for source, _ in texts_of(store))
    assert kept == {"original": 120, "far": 60}
    assert store.meta.dropped == {"duplicate": 0, "near duplicate": 60}


def test_counts_and_bytes_add_up(tmp_path: Path, make_documents: Make) -> None:
    items = make_documents(100, "a") + [Document("éèà 日本 \ud800 x" * 5, "b")]
    store = prepare(items, tmp_path / "s", vocab_size=300, held_out_fraction=0.2)
    text_bytes = sum(len(item.encode()) for item in items)
    assert store.meta.text_bytes == text_bytes == int(store.token_bytes_V[store.tokens].astype(np.int64).sum())
    assert store.meta.bytes_per_token == text_bytes / store.num_tokens
    assert store.tokens.dtype == np.uint16 and int(store.tokens.max()) < store.vocab_size == 300
    assert store.tokens_of("train") + store.tokens_of("held_out") == store.num_tokens
    assert int(np.count_nonzero(store.tokens == store.meta.end_of_document)) == store.meta.num_documents == 101


def test_fingerprint_follows_content_not_place(tmp_path: Path, make_documents: Make) -> None:
    items = make_documents(60, "a")
    here = prepare(items, tmp_path / "here", held_out_fraction=0.2)
    there = prepare(items, tmp_path / "deep" / "there", held_out_fraction=0.2)
    assert here.fingerprint == there.fingerprint and files(here.path) == files(there.path)
    changed = [*items[:-1], Document(items[-1].text + "!", "a")]
    others = [
        prepare(changed, tmp_path / "o1", held_out_fraction=0.2),
        prepare(items[::-1], tmp_path / "o2", held_out_fraction=0.2),
        prepare(items, tmp_path / "o3", held_out_fraction=0.5),
        prepare(items, tmp_path / "o4", held_out_fraction=0.2, vocab_size=300),
    ]
    assert len({store.fingerprint for store in [here, *others]}) == 5


def test_again_is_at_once_and_never_overwrites(tmp_path: Path, make_documents: Make) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(make_documents(60, "a")))
    store = prepare([tmp_path / "a.jsonl"], tmp_path / "s", held_out_fraction=0.2)
    before = (tmp_path / "s" / "meta.json").stat().st_mtime_ns
    assert prepare([tmp_path / "a.jsonl"], tmp_path / "s", held_out_fraction=0.2).fingerprint == store.fingerprint
    assert (tmp_path / "s" / "meta.json").stat().st_mtime_ns == before
    assert not (tmp_path / "s.partial").exists()


def test_the_python_library_is_there_once_and_readable() -> None:
    skipped: dict[str, int] = {}
    items = list(python_library_documents(skipped))
    text_bytes = sum(len(item.encode()) for item in items)
    assert len({item.text for item in items}) == len(items) > 300 and text_bytes > 5e6
    assert any("class JSONEncoder" in item.text for item in items)
    assert all(reason in ("duplicate", "not UTF-8", "empty") for reason in skipped)


INTERRUPTED = """
import sys, time
from pathlib import Path
from scaling.corpus import pieces, prepare, shards
pieces.PIECE_BYTES, shards.SHARD_BYTES = 2000, 1500
def main():
    write = shards.Folder.write_piece
    def slowly(*args, **options):
        time.sleep(0.03)
        return write(*args, **options)
    shards.Folder.write_piece = slowly
    prepare([sys.argv[1]], sys.argv[2], vocab_size=300, held_out_fraction=0.2)
main()
"""


def test_killed_at_any_moment_it_goes_on_and_ends_in_the_same_bytes(
    tmp_path: Path, make_documents: Make, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    source = tmp_path / "a.jsonl.xz"
    source.write_bytes(lzma.compress(lines(make_documents(200, "a"))))
    whole = prepare([source], tmp_path / "whole", vocab_size=300, held_out_fraction=0.2)
    out, work = tmp_path / "out", tmp_path / "out.partial" / "shards"
    kills, found = 0, 0
    for wanted in (3, 7, 11):
        process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(source), str(out)], start_new_session=True)
        deadline = time.monotonic() + 60
        while process.poll() is None and len(list(work.glob("*.json"))) < wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        assert not out.exists()
        assert len(list(work.glob("*.json"))) >= found, "what was tokenized stays"
        found = len(list(work.glob("*.json")))
    assert kills == 3 and found >= 11
    written: list[str] = []
    write = shards.Folder.write_piece

    def noted(self: shards.Folder, piece: pieces.Piece, **options: object) -> int:
        written.append(piece.name)
        return write(self, piece, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(shards.Folder, "write_piece", noted)
    resumed = prepare([source], out, vocab_size=300, held_out_fraction=0.2)
    inputs, _ = find_inputs([source])
    assert len(written) == len(list(feeds(inputs)[0].pieces())) - found
    assert files(resumed.path) == files(whole.path)


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_input(tmp_path: Path) -> None:
    """The peak of 160 MB of text exceeds that of 40 MB by less than a quarter of the difference."""
    code = """
import sys
from scaling.corpus import prepare
prepare([sys.argv[1]], sys.argv[2])
# not getrusage, whose peak a process inherits from the one that started it
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    peaks: list[float] = []
    rng = np.random.default_rng(0)
    for megabytes in (40, 160):
        path = tmp_path / f"{megabytes}.jsonl.zst"
        with path.open("wb") as raw, zstandard.ZstdCompressor(level=1).stream_writer(raw) as packed:
            for _ in range(megabytes * 10):
                packed.write(b'{"text": "%s"}\n' % rng.integers(97, 123, 100_000, dtype=np.uint8).tobytes())
        out = subprocess.run(
            [sys.executable, "-c", code, str(path), str(tmp_path / f"s{megabytes}")],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(out.stdout) / 1024)
    assert peaks[1] - peaks[0] < 30, f"peaks {peaks} MiB"
    assert peaks[1] < 600


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_plain_bytes_round_trip(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = np.random.default_rng(seed)
    items = [
        Document("x" + "".join(map(chr, rng.integers(1, 0xD7FF, int(rng.integers(0, 40))))), str(rng.integers(3)))
        for _ in range(30)
    ]
    store = prepare(items, tmp_path_factory.mktemp("round") / "s", held_out_fraction=0, drop_duplicates=False)
    assert sorted(texts_of(store)) == pairs(items)


def test_a_name_on_the_command_line_holds_for_all_records(tmp_path: Path) -> None:
    """``NAME=PATH`` wins over a record's ``source``, unless a column was named for it."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n}", "source": "ab"[n % 2]}) + "\n" for n in range(80)))

    def sources(name: str, argument: str, column: str | None = None) -> list[str]:
        store = prepare([argument], tmp_path / name, source_column=column, held_out_fraction=0.2)
        return sorted({part.source for part in store.meta.parts})

    assert sources("unnamed", str(path)) == ["a", "b"]
    assert sources("named", f"code={path}") == ["code"]
    assert sources("column", f"code={path}", "source") == ["a", "b"]
