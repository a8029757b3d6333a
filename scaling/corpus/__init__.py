"""From text to a token store: documents are read, given to a tokenizer, split by hash, and laid out by source.

First of the data flow, before ``scaling.tokens``. ``prepare`` is the whole of it; ``python_library_documents`` is a
corpus that every machine has.
"""

from scaling.corpus.documents import Document
from scaling.corpus.library import python_library_documents
from scaling.corpus.preparation import prepare

__all__ = ["Document", "prepare", "python_library_documents"]
