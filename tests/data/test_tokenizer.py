"""Encoders: the fast path gives the tokenizer's own ids, training is deterministic, ids are what the store needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from scaling.corpus import Document, python_library_documents
from scaling.corpus.tokenizer import (
    LLAMA_PATTERN,
    QWEN_PATTERN,
    ByteEncoder,
    TokenizerEncoder,
    load_tokenizer,
    sha256_of,
    train_bpe,
)
from scaling.errors import DataError


@pytest.fixture(scope="module")
def library() -> list[str]:
    return [document.text for _, document in zip(range(30), python_library_documents(), strict=False)]


@pytest.fixture(scope="module")
def trained(library: list[str]) -> str:
    return train_bpe(library, 700)


@pytest.fixture(scope="module", params=["own", "llama digits", "added tokens"])
def encoder(request: pytest.FixtureRequest, trained: str) -> TokenizerEncoder:
    """The own tokenizer; with Llama's pattern; with Qwen's normalizer and an added token that is not special."""
    tree = json.loads(trained)
    if request.param == "llama digits":
        tree["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = LLAMA_PATTERN
    text = json.dumps(tree)
    if request.param == "added tokens":
        tree["normalizer"] = {"type": "NFC"}
        tokenizer = Tokenizer.from_str(json.dumps(tree))
        tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
        tokenizer.add_special_tokens(["<|im_end|>"])
        text = tokenizer.to_str()
    encoder = TokenizerEncoder(text)
    assert encoder.looks_words_up
    return encoder


def reference(encoder: TokenizerEncoder, text: str) -> list[int]:
    assert encoder.text is not None
    tokenizer = Tokenizer.from_str(encoder.text)
    tokenizer.encode_special_tokens = True
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def ids(encoder: TokenizerEncoder | ByteEncoder, *texts: str) -> list[list[int]]:
    array, lengths = encoder.encode([text.encode("utf-8") for text in texts])
    assert array.dtype == (np.uint16 if encoder.vocab_size <= 2**16 else np.uint32)
    ends = np.cumsum(lengths)
    assert all(array[end - 1] == encoder.end_of_document for end in ends) and ends[-1] == len(array)
    return [array[end - length : end - 1].tolist() for end, length in zip(ends, lengths, strict=True)]


PROSE = st.text(
    alphabet=st.one_of(
        st.sampled_from(list("abcXYZ019 \n\r\t'.,;_-()<|>")),
        st.sampled_from(list("éßſK日本½²Ⅷ\u0301\u00a0\u2028\x85\x1c\x0b\x0c😀")),
        st.characters(codec="utf-8"),
    ),
    max_size=60,
)


@given(parts=st.lists(st.one_of(PROSE, st.sampled_from(["\n\n", "<tool_call>", "<|endoftext|>", "'LL", "  x"]))))
def test_words_looked_up_give_the_tokenizers_own_ids(encoder: TokenizerEncoder, parts: list[str]) -> None:
    text = "".join(parts)
    assert ids(encoder, text) == [reference(encoder, text)]


def test_ids_of_real_text(encoder: TokenizerEncoder, library: list[str]) -> None:
    assert ids(encoder, *library[:8]) == [reference(encoder, text) for text in library[:8]]


def test_decoding_gives_the_text_back(trained: str, library: list[str]) -> None:
    encoder = TokenizerEncoder(trained)
    tokenizer = Tokenizer.from_str(trained)
    assert [tokenizer.decode(row) for row in ids(encoder, *library[:10])] == library[:10]


def test_a_cache_that_overflows_changes_nothing(
    trained: str, library: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids(TokenizerEncoder(trained), *library[:10])
    monkeypatch.setattr("scaling.corpus.tokenizer._CACHE_BYTES", 2000)
    monkeypatch.setattr("scaling.corpus.tokenizer._LONGEST_CACHED_WORD", 4)
    assert ids(TokenizerEncoder(trained), *library[:10]) == expected


def test_other_tokenizers_are_used_as_they_are(trained: str, library: list[str]) -> None:
    tree = json.loads(trained)
    tree["normalizer"] = {"type": "Lowercase"}
    encoder = TokenizerEncoder(json.dumps(tree))
    assert not encoder.looks_words_up
    assert ids(encoder, "ABC def") == [reference(encoder, "abc def")]


def test_training_is_deterministic(library: list[str], trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert train_bpe(library, 700) == trained
    assert json.loads(trained)["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == QWEN_PATTERN
    assert TokenizerEncoder(trained).vocab_size == 700


def test_the_end_of_a_document_cannot_be_written_in_a_text(trained: str) -> None:
    encoder = TokenizerEncoder(trained)
    (row,) = ids(encoder, "before <|endoftext|> after")
    assert encoder.end_of_document not in row


def test_token_bytes_count_the_text(encoder: TokenizerEncoder, library: list[str]) -> None:
    sizes = encoder.token_bytes()
    for text in [*library[:5], "naïve 日本 <tool_call> x"]:
        assert int(sizes[ids(encoder, text)[0]].sum()) == len(text.encode("utf-8"))
    assert sizes[encoder.end_of_document] == 0 and len(sizes) == encoder.vocab_size
    assert ByteEncoder().token_bytes().sum() == 256


@given(texts=st.lists(st.text(), min_size=1, max_size=5))
def test_plain_bytes(texts: list[str]) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    assert ids(ByteEncoder(), *texts) == [list(text.encode("utf-8")) for text in texts]


def test_hash_tells_tokenizers_apart(trained: str, library: list[str]) -> None:
    hashes = {sha256_of(e) for e in (ByteEncoder(), TokenizerEncoder(trained), TokenizerEncoder(trained + " "))}
    assert len(hashes) == 3


Change = Callable[[dict[str, object]], None]


def test_errors(tmp_path: Path, trained: str, library: list[str]) -> None:
    with pytest.raises(DataError, match=r"vocab_size=100: a byte-level vocabulary needs at least 257"):
        train_bpe(library, 100)
    with pytest.raises(DataError, match=r"yields a vocabulary of 25\d only; add text or set --vocab-size 25\d or less"):
        train_bpe(["a"], 5000)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(DataError, match=r"t\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(DataError, match=r"none\.json: cannot be read \(No such file"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "own.json").write_text(trained)
    with pytest.raises(DataError, match=r"no token '<end>' to end documents with; name one .* <\|endoftext\|>"):
        load_tokenizer(tmp_path / "own.json", "<end>")


def test_documents_with_lone_surrogates_become_text() -> None:
    assert Document("a\ud800b", "s").encode() == b"a?b"
