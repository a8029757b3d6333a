"""What a user can get wrong with data: one line that names the file, what is allowed, and what to do next."""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from scaling.corpus import Document, pieces, prepare
from scaling.errors import DataError, DataUnavailable, UsageError
from scaling.tokens import TokenStore

Make = Callable[..., list[Document]]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}


def one_line(caught: pytest.ExceptionInfo[DataError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_packed_file_is_named(tmp_path: Path, ending: str, damage: str) -> None:
    text = b"".join(b'{"text": "number %d"}\n' % (number * number) for number in range(3000))
    packed = bytearray(PACK[ending](text))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    else:
        packed[len(packed) // 2 : len(packed) // 2 + 4] = b"\xff\xff\xff\xff"
    path = tmp_path / f"bad.jsonl.{ending}"
    path.write_bytes(packed)
    with pytest.raises(
        DataError, match=rf"bad\.jsonl\.{ending}: damaged \.{ending} file \(.*\); fetch it again"
    ) as caught:
        prepare([path], tmp_path / "s")
    assert "ends too early" in one_line(caught) or damage == "flipped"
    assert not (tmp_path / "s").exists()


def test_damage_is_named_also_from_a_worker(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(DataError, match=r"bad\.jsonl: line 2 is not JSON"):
        prepare([tmp_path / "bad.jsonl", tmp_path / "bad.jsonl"], tmp_path / "s", workers=2)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds list, not an object"),
        ('{"content": 1}', r"no column 'text'; it has 'content'; name one with --text-column, or"),
        ('{"text": 1}', r"column 'text' holds int, not text; name another column with --text-column, or"),
    ],
)
def test_a_bad_line_is_named_by_number(
    tmp_path: Path, ending: str, bad: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file is read in pieces, packed or not; blank lines count."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 40)
    lines = [f'{{"text": "number {number}"}}' for number in range(20)]
    lines[3], lines[16] = "", bad
    path = tmp_path / f"bad.jsonl{ending}"
    text = "\n".join(lines).encode()
    path.write_bytes(PACK["gz"](text) if ending else text)
    with pytest.raises(DataError, match=rf"bad\.jsonl{ending}: line 17:? ?{what}.* repair or remove ") as caught:
        prepare([path], tmp_path / "s")
    one_line(caught)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_missing_column_lists_those_there(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        path.write_text('{"content": "x", "id": 1}\n')
    else:
        pq.write_table(pa.table({"content": ["x"], "id": [1]}), path)
    with pytest.raises(DataError, match=r"no column 'text'; it has 'content', 'id'; name one with --text-column"):
        prepare([path], tmp_path / "s")
    with pytest.raises(DataError, match=r"no column 'lang'; it has 'content', 'id'; name one with --source-column"):
        prepare([path], tmp_path / "s", text_column="content", source_column="lang")
    with pytest.raises(DataError, match=r"column 'id' holds int, not text; name another column"):
        prepare([path], tmp_path / "s", text_column="id")
    assert prepare([path], tmp_path / "s", text_column="content", held_out_fraction=0).num_tokens == 2


def test_lines_that_are_not_records(tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match=r"list\.jsonl: line 1 holds list, not an object"):
        prepare([tmp_path / "list.jsonl"], tmp_path / "s")


def test_damaged_parquet(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(DataError, match=r"bad\.parquet: damaged or not Parquet"):
        prepare([tmp_path / "bad.parquet"], tmp_path / "s")


def test_lines_that_are_not_utf8_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": "caf\xe9"}\n{"text": null}\n\n{"text": " "}\n')
    store = prepare([tmp_path / "a.jsonl"], tmp_path / "s", held_out_fraction=0)
    assert store.meta.num_documents == 1 and store.meta.skipped == {"empty": 2, "not UTF-8": 1}


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none/\*\.txt: no such file or folder, and no file matches"):
        prepare([tmp_path / "none" / "*.txt"], tmp_path / "s")
    (tmp_path / "a.docx").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"a\.docx: unknown ending; known are .*\.jsonl.*--text-suffix \.docx"):
        prepare([tmp_path / "a.docx"], tmp_path / "s")


def test_an_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with pytest.raises(DataError, match="the corpus is empty: no files with text; give other sources"):
        prepare([tmp_path / "tree"], tmp_path / "s")
    (tmp_path / "tree" / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"the corpus is empty: no documents \(1 not UTF-8\); give other sources"):
        prepare([tmp_path / "tree"], tmp_path / "s")
    with pytest.raises(DataError, match="the corpus is empty"):
        prepare([], tmp_path / "s")


def test_a_corpus_too_small_to_split(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"too small: none of its 1 documents falls on the held_out side .*fraction 1e-09"
    ):
        prepare([Document("alone", "a")], tmp_path / "s", held_out_fraction=1e-9)


def test_options_that_contradict(tmp_path: Path) -> None:
    document = [Document("x", "a")]
    with pytest.raises(UsageError, match="a byte-level vocabulary needs at least 257"):
        prepare(document, tmp_path / "s", vocab_size=100)
    assert not list(tmp_path.iterdir())  # refused before anything is written
    with pytest.raises(UsageError, match="vocab_size and tokenizer: give one of them"):
        prepare(document, tmp_path / "s", vocab_size=300, tokenizer="t.json")
    with pytest.raises(UsageError, match=r"held_out_fraction=1.0 is outside 0..1"):
        prepare(document, tmp_path / "s", held_out_fraction=1.0)
    with pytest.raises(UsageError, match=r"near_duplicates=0.3: a similarity from 0.5 to 1 is allowed"):
        prepare(document, tmp_path / "s", near_duplicates=0.3)
    with pytest.raises(UsageError, match="near duplicates cannot be dropped while exact ones are kept"):
        prepare(document, tmp_path / "s", near_duplicates=0.8, drop_duplicates=False)
    for vocab_size in (None, 300):
        with pytest.raises(UsageError, match=r"end_of_document='<eos>' is a token of a given tokenizer; give"):
            prepare(document, tmp_path / "s", vocab_size=vocab_size, end_of_document="<eos>")
    for workers in (0, -1):
        with pytest.raises(UsageError, match=rf"workers={workers}: at least one process is needed; give 1 or more"):
            prepare(document, tmp_path / "s", workers=workers)
    assert not list(tmp_path.iterdir())


def test_another_store_or_folder_is_never_overwritten(tmp_path: Path, make_documents: Make) -> None:
    prepare(make_documents(50, "a"), tmp_path / "s", held_out_fraction=0.2)
    with pytest.raises(DataError, match="holds a token store made from other inputs or options; choose another --out"):
        prepare(make_documents(51, "a"), tmp_path / "s", held_out_fraction=0.2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="exists and is not a token store; choose another --out"):
        prepare(make_documents(50, "a"), tmp_path / "full", held_out_fraction=0.2)
    assert (tmp_path / "full" / "thesis.tex").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk(
    tmp_path: Path, make_documents: Make, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The error is the system's; what was tokenized stays and the next call goes on."""
    items = make_documents(50, "a")
    replace = os.replace
    calls = []

    def failing(source: object, target: object) -> None:
        calls.append(target)
        if len(calls) == 4:
            raise OSError(code, os.strerror(code), str(target))
        replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(
        DataError, match=rf"cannot be written \({os.strerror(code)}\); free space or choose another --out"
    ):
        prepare(items, tmp_path / "s", held_out_fraction=0.2)
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr(os, "replace", replace)
    assert prepare(items, tmp_path / "s", held_out_fraction=0.2).meta.num_documents == 50


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path, make_documents: Make) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match=r"cannot be written \(Permission denied\)"):
        prepare(make_documents(5, "a"), tmp_path / "s")
    tmp_path.chmod(0o700)


def test_a_parent_that_is_a_file(tmp_path: Path, make_documents: Make) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"cannot be written \(Not a directory\)"):
        prepare(make_documents(5, "a"), tmp_path / "file" / "s")


def test_two_at_once_are_refused(tmp_path: Path, make_documents: Make) -> None:
    import fcntl

    (tmp_path / "s.partial").mkdir()
    with (tmp_path / "s.partial" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is preparing this store"):
            prepare(make_documents(5, "a"), tmp_path / "s")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_refusal_leaves_nothing_behind(tmp_path: Path, workers: int) -> None:
    """Once repaired the file is another input, so that what was tokenized could not be used."""
    for name in ("a", "b"):
        lines = [f'{{"text": "number {name} {number}"}}\n' for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text("".join([*lines[:6], "{broken\n", *lines[6:]]))
    sources, options = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], {"held_out_fraction": 0.2, "workers": workers}
    before = sorted(tmp_path.iterdir())
    for vocab_size in (None, 300):  # refused where it is tokenized, or where a tokenizer is trained on it
        with pytest.raises(DataError, match=r"b.jsonl: line 7 is not JSON .*repair or remove it"):
            prepare(sources, tmp_path / "s", vocab_size=vocab_size, **options)  # type: ignore[arg-type]
        assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(DataError, match="the corpus is too small"):
        prepare(sources[:1], tmp_path / "s", held_out_fraction=1e-9)
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "b.jsonl").write_text("".join(lines))
    assert prepare(sources, tmp_path / "s", **options).meta.num_documents == 80  # type: ignore[arg-type]


@pytest.mark.parametrize("there", ["", "new"])
def test_a_refusal_leaves_no_folders_that_were_made_for_it(tmp_path: Path, there: str) -> None:
    """Those that were there before stay, empty as they may be."""
    (tmp_path / "bad.jsonl").write_text("{broken\n")
    (tmp_path / there).mkdir(exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match="line 1 is not JSON"):
        prepare([tmp_path / "bad.jsonl"], tmp_path / "new" / "stores" / "s")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_tokenized_stays_where_the_same_call_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be read for now."""
    for name in ("a", "b"):
        lines = [f'{{"text": "number {name} {number}"}}\n' for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    read = pieces._read

    def failing(path: Path, start: int, length: int | None) -> bytes:
        if path.name == "b.jsonl":
            raise DataUnavailable(f"{path}: cannot be read ({os.strerror(errno.EIO)})")
        return read(path, start, length)

    monkeypatch.setattr(pieces, "_read", failing)
    with pytest.raises(DataUnavailable, match=r"b.jsonl: cannot be read \(Input/output error\)"):
        prepare(sources, tmp_path / "s", held_out_fraction=0.2)
    monkeypatch.undo()
    assert len(list((tmp_path / "s.partial" / "shards").glob("*.json"))) == 1
    assert prepare(sources, tmp_path / "s", held_out_fraction=0.2).meta.num_documents == 80
    assert not (tmp_path / "s.partial").exists()


def test_a_parquet_file_that_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")

    def failing(path: Path) -> None:
        raise OSError(errno.EIO, "Error reading bytes from file. Detail: [errno 5] Input/output error")

    monkeypatch.setattr(pq, "ParquetFile", failing)
    with pytest.raises(DataUnavailable, match=r"a.parquet: cannot be read \(Input/output error\)"):
        prepare([tmp_path / "a.parquet"], tmp_path / "s")


@pytest.fixture
def copy(store: TokenStore, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store.path, tmp_path / "copy"))


def edit(folder: Path, **fields: object) -> None:
    tree = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**tree, **fields}))


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no token store here \(no meta.json\); make one with `scaling data prepare`"):
        TokenStore.open(tmp_path)


def test_a_store_of_another_version(copy: Path) -> None:
    edit(copy, version=99)
    with pytest.raises(DataError, match="store version 99, this program reads version 1; prepare it again"):
        TokenStore.open(copy)


def test_a_damaged_description(copy: Path) -> None:
    edit(copy, surprise=1)
    with pytest.raises(DataError, match="fields missing or unknown"):
        TokenStore.open(copy)
    edit(copy, format="other")
    with pytest.raises(DataError, match="not a token store's description"):
        TokenStore.open(copy)
    (copy / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta\.json: damaged; prepare the store again"):
        TokenStore.open(copy)


def test_files_cut_short(copy: Path, store: TokenStore) -> None:
    os.truncate(copy / "offsets.npy", 200)
    with pytest.raises(DataError, match=r"offsets\.npy: missing or damaged"):
        TokenStore.open(copy)
    os.truncate(copy / "tokens.bin", 100)
    expected = store.num_tokens * 2
    with pytest.raises(DataError, match=rf"tokens\.bin: 100 bytes where meta.json says {expected:,} .*damaged"):
        TokenStore.open(copy)
    (copy / "tokens.bin").unlink()
    with pytest.raises(DataError, match=r"tokens\.bin: No such file or directory"):
        TokenStore.open(copy)


def test_a_model_with_too_few_ids(store: TokenStore) -> None:
    store.require_vocabulary(257)
    with pytest.raises(
        DataError, match=r"ids go up to 256 but the model's vocabulary has 256; set model.vocab_size=257"
    ):
        store.require_vocabulary(256)


def test_a_source_that_is_not_there(store: TokenStore) -> None:
    with pytest.raises(DataError, match="no source 'prose'; it holds books, code, maths"):
        store.tokens_of("train", "prose")
