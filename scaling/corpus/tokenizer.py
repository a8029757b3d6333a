"""Tokenizers of a store: plain bytes, an own byte-level BPE trained on the corpus, or any given ``tokenizer.json``.

Part of ``scaling.corpus``. Encoders turn UTF-8 documents into one array of ids, each document closed by the
end-of-document id. A byte-level BPE splits text into words first and then treats each word alone, so its encoder
remembers words: on ASCII stretches, where Python's ``re`` and the tokenizer's own regular expression agree by
construction, a word is looked up rather than merged anew. The ids are those of the tokenizer itself (tested), about
ten times as fast.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scaling.errors import DataError
from scaling.tokens import TOKENIZER, TokenStore, token_dtype

END_OF_DOCUMENT: Final = "<|endoftext|>"
KNOWN_ENDS: Final = (END_OF_DOCUMENT, "<|end_of_text|>", "<|eot_id|>", "<eos>", "</s>")  # tried in this order
BYTES: Final = 256

# The pre-tokenization of Qwen2 and Qwen3 (their tokenizer.json): letters with one leading non-letter, single digits,
# punctuation with the line ends that follow, runs of whitespace.
QWEN_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same with digits in threes: Llama 3, cl100k and their kin.
LLAMA_PATTERN: Final = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
FAST_PATTERNS: Final = (QWEN_PATTERN, LLAMA_PATTERN)

# In each of these patterns a word ends after a line end that a visible character follows, whatever stands around it:
# texts may be cut there. Lines with anything but ASCII are left to the tokenizer.
_CUT: Final = re.compile(r"(?<=\n)(?=[!-~])")
_CACHE_BYTES: Final = 64 * 2**20  # of words and their ids, a worker; then it starts afresh
_LONGEST_CACHED_WORD: Final = 64


class Encoder(Protocol):
    """What a store needs of a tokenizer. ``text`` is its ``tokenizer.json`` (``None`` for plain bytes)."""

    vocab_size: int
    end_of_document: int
    text: str | None

    def encode(self, documents: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Ids of all documents, each closed by its end, and the number of ids of each."""
        ...

    def token_bytes(self) -> npt.NDArray[np.uint16]:
        """Bytes of text that each id stands for."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; ends of documents have none, bytes that are no UTF-8 become U+FFFD."""
        ...


def sha256_of(encoder: Encoder) -> str:
    """Hash of what decides the ids: the tokenizer's file and its end-of-document id."""
    return hashlib.sha256(f"{encoder.end_of_document}\n{encoder.text or 'bytes'}".encode()).hexdigest()


class ByteEncoder:
    """Ids 0 to 255 are bytes, 256 ends a document."""

    vocab_size = BYTES + 1
    end_of_document = BYTES
    text: str | None = None

    def encode(self, documents: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        lengths = np.array([len(document) + 1 for document in documents], dtype=np.int64)
        ids = np.full(int(lengths.sum()), self.end_of_document, dtype=token_dtype(self.vocab_size))
        inside = np.ones(len(ids), dtype=np.bool_)
        inside[np.cumsum(lengths) - 1] = False
        ids[inside] = np.frombuffer(b"".join(documents), dtype=np.uint8)
        return ids, lengths

    def token_bytes(self) -> npt.NDArray[np.uint16]:
        sizes = np.ones(self.vocab_size, dtype=np.uint16)
        sizes[self.end_of_document] = 0
        return sizes

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in ids if index < BYTES).decode("utf-8", errors="replace")


class TokenizerEncoder:
    """An encoder over a ``tokenizer.json``.

    Parameters
    ----------
    text
        The file's content.
    end_of_document
        The token that closes documents; by default the first of ``KNOWN_ENDS`` that the vocabulary has.
    source
        What errors call the file.

    Raises
    ------
    DataError
        If the text is not a tokenizer, or the end-of-document token is not in its vocabulary.
    """

    def __init__(self, text: str, *, end_of_document: str | None = None, source: str = "tokenizer") -> None:
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{source}: not a tokenizer.json ({error}); give a file of Hugging Face tokenizers"
            ) from None
        self.text: str | None = text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        ends = [end_of_document] if end_of_document is not None else [end for end in KNOWN_ENDS if end in vocabulary]
        if not ends or ends[0] not in vocabulary:
            added = sorted(token.content for token in self._tokenizer.get_added_tokens_decoder().values())
            raise DataError(
                f"{source}: no token {' or '.join(map(repr, ends or KNOWN_ENDS))} to end documents with; "
                f"name one with --end-of-document (added tokens: {', '.join(added[:20]) or 'none'})"
            )
        self.end_of_document = vocabulary[ends[0]]
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._dtype = token_dtype(self.vocab_size)
        tree = json.loads(text)
        self._added = [
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if not token.special
        ]
        self._byte_level = _is_byte_level(tree)
        pattern = _fast_pattern(tree)
        self._words = _ascii_pattern(pattern) if pattern else None
        self._merger = _merger(self._tokenizer) if pattern else None
        self._cache: dict[str, bytes] = {}
        self._cached_bytes = 0

    @property
    def looks_words_up(self) -> bool:
        """Whether the fast path is known to be right for this tokenizer."""
        return self._words is not None

    def encode(self, documents: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        if self._words is None:
            encoded = self._encode_plainly([document.decode("utf-8") for document in documents])
        else:
            encoded = [self._encode_by_words(document.decode("utf-8")) for document in documents]
        end = np.array([self.end_of_document], dtype=self._dtype).tobytes()
        lengths = np.array([len(ids) // self._dtype.itemsize + 1 for ids in encoded], dtype=np.int64)
        joined = b"".join(ids + end for ids in encoded)
        return np.frombuffer(joined, dtype=self._dtype), lengths

    def _encode_plainly(self, texts: list[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype).tobytes() for encoding in encodings]

    def _encode_by_words(self, text: str) -> bytes:
        if any(added in text for added in self._added):
            return self._encode_plainly([text])[0]
        if text.isascii():
            return self._look_up(text)
        pieces = []
        for ascii_only, lines in groupby(_CUT.split(text), key=str.isascii):
            stretch = "".join(lines)
            pieces.append(self._look_up(stretch) if ascii_only else self._encode_plainly([stretch])[0])
        return b"".join(pieces)

    def _look_up(self, text: str) -> bytes:
        assert self._words is not None and self._merger is not None
        words = self._words.findall(text)
        missing = list(set(words).difference(self._cache))
        if not missing:
            return b"".join(map(self._cache.__getitem__, words))
        if self._cached_bytes > _CACHE_BYTES:
            self._cache.clear()
            self._cached_bytes = 0
            missing = list(set(words))
        encodings = self._merger.encode_batch_fast(missing, add_special_tokens=False)
        for word, encoding in zip(missing, encodings, strict=True):
            self._cache[word] = coded = np.array(encoding.ids, dtype=self._dtype).tobytes()
            self._cached_bytes += len(word) + len(coded) + 150  # what a str, a bytes and a slot weigh themselves
        joined = b"".join(map(self._cache.__getitem__, words))
        for word in missing:
            if len(word) > _LONGEST_CACHED_WORD:
                self._cached_bytes -= len(word) + len(self._cache.pop(word)) + 150
        return joined

    def token_bytes(self) -> npt.NDArray[np.uint16]:
        sizes = np.zeros(self.vocab_size, dtype=np.uint16)
        special = {content for content, token in _added_tokens(self._tokenizer).items() if token.special}
        plain = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token in special or index == self.end_of_document:
                continue
            if self._byte_level and token not in plain:
                sizes[index] = len(token)  # byte-level vocabularies write each byte as one character
            else:
                sizes[index] = len(self._tokenizer.decode([index], skip_special_tokens=False).encode("utf-8"))
        return sizes

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def store_encoder(store: TokenStore) -> Encoder:
    """The encoder that a token store was made with."""
    if store.meta.tokenizer is None:
        return ByteEncoder()
    path = store.path / TOKENIZER
    try:
        text = path.read_text(encoding="utf-8")
        end = Tokenizer.from_str(text).id_to_token(store.meta.end_of_document)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: cannot be read ({error}); copy or prepare the store again") from None
    return TokenizerEncoder(text, end_of_document=end, source=str(path))


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE (Qwen's pre-tokenization); returns its ``tokenizer.json``, the same for the same texts.

    Raises
    ------
    DataError
        If ``vocab_size`` cannot hold the 256 bytes and the end of document, or the texts have too few distinct words to
        fill it.
    """
    if vocab_size < BYTES + 1:
        raise DataError(f"vocab_size={vocab_size}: a byte-level vocabulary needs at least {BYTES + 1}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_DOCUMENT, special=True)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise DataError(
            f"the corpus yields a vocabulary of {found:,} only; add text or set --vocab-size {found} or less"
        )
    return str(tokenizer.to_str())


def load_tokenizer(path: Path, end_of_document: str | None = None) -> TokenizerEncoder:
    """Read a ``tokenizer.json``; ``DataError`` names the file where it is missing or not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise DataError(f"{path}: cannot be read ({reason}); give a tokenizer.json") from None
    return TokenizerEncoder(text, end_of_document=end_of_document, source=str(path))


def _added_tokens(tokenizer: Tokenizer) -> dict[str, AddedToken]:
    return {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}


def _steps(tree: dict[str, Any]) -> list[dict[str, Any]]:
    first = tree.get("pre_tokenizer") or {}
    return list(first.get("pretokenizers", [])) if first.get("type") == "Sequence" else [first]


def _is_byte_level(tree: dict[str, Any]) -> bool:
    return tree["model"].get("type") == "BPE" and any(step.get("type") == "ByteLevel" for step in _steps(tree))


def _fast_pattern(tree: dict[str, Any]) -> str | None:
    """The pattern that splits words, where looking words up is known to give the tokenizer's own ids."""
    steps = _steps(tree)
    normalizer = (tree.get("normalizer") or {}).get("type")
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"] or not _is_byte_level(tree):
        return None
    split, level = steps
    pattern = split.get("pattern", {}).get("Regex")
    plain = split.get("behavior") == "Isolated" and not split.get("invert") and not level.get("add_prefix_space")
    if pattern not in FAST_PATTERNS or not plain or level.get("use_regex") or tree["model"].get("dropout"):
        return None
    return pattern if normalizer in (None, "NFC") else None  # ASCII is its own NFC


def _ascii_pattern(pattern: str) -> re.Pattern[str]:
    ascii_only = pattern.replace(r"\p{L}", "a-zA-Z").replace(r"\p{N}", "0-9")
    ascii_only = ascii_only.replace("]?a-zA-Z+", "]?[a-zA-Z]+").replace("|0-9", "|[0-9]")
    return re.compile(ascii_only, re.ASCII)


def _merger(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer for single words: nothing is split any more."""
    merger = Tokenizer.from_str(tokenizer.to_str())
    merger.encode_special_tokens = True
    merger.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return merger
