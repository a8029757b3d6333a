"""Numbers that two papers published, each with its source: facts to set beside a user's own runs, never mixed.

After ``papers``, which holds them by paper; apart from the computing modules: nothing here enters a fit. ``facts``
selects by topic; ``analysis.tables.beside`` puts them into columns of their own, headed with the paper's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from scaling.analysis.papers import mhar, msar
from scaling.analysis.papers.fact import Fact, Paper
from scaling.errors import UsageError, nearest

SOURCES: Final[dict[Paper, str]] = {"MHAR": mhar.SOURCE, "MSAR": msar.SOURCE}
FACTS: Final[tuple[Fact, ...]] = (*mhar.FACTS, *msar.FACTS)
TOPICS: Final = tuple(dict.fromkeys(fact.topic for fact in FACTS))


def facts(topic: str | None = None, *, paper: Paper | None = None) -> Iterator[Fact]:
    """Published numbers of a topic, a paper, or all.

    Raises
    ------
    UsageError
        If there is no such topic.
    """
    if topic is not None and topic not in TOPICS:
        raise UsageError(f"topic {topic!r} is unknown; {nearest(topic, TOPICS)}")
    return (f for f in FACTS if (topic is None or f.topic == topic) and (paper is None or f.paper == paper))
