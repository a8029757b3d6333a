"""Published numbers with the user's own beside them, in columns of their own: compared by eye, never by arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pandas as pd

from scaling.analysis.disagreement import judge_disagreement
from scaling.analysis.findings import Findings
from scaling.analysis.papers.fact import Fact
from scaling.analysis.published import SOURCES, TOPICS, facts
from scaling.analysis.readings import OVER_SIZES
from scaling.analysis.tables import costs, shapes
from scaling.analysis.tables.table import Column, Table
from scaling.errors import TableError

TITLES: Final = {
    "main": "Main comparison",
    "heads": "Head count",
    "undertrained": "Under-trained replication",
    "web": "Web corpus",
    "seeds": "Paired seeds",
    "width": "Width control",
    "disagreement": "Disagreement of routing heads",
    "noise": "Noise of their losses",
    "throughput": "Throughput and overhead",
    "kernels": "Routing kernels",
    "midtraining": "Mid-training at 8B",
    "loss": "Training loss at 18B",
    "speedup": "Iso-loss speedup",
    "tasks": "Downstream tasks",
    "streams": "Streams",
    "blocks": "Block granularity",
    "ablation": "Ablations",
    "overhead": "Overhead",
}
assert set(TITLES) == set(TOPICS)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mine:
    """What is looked up for many facts, computed once."""

    found: Findings
    usable: pd.DataFrame
    places: tuple[str, ...]
    scores: pd.DataFrame | None
    throughput: pd.DataFrame | None
    added: pd.DataFrame | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Own:
    """What the user's runs have for a fact, and where."""

    value: float
    low: float | None = None
    high: float | None = None
    where: str = ""


def published(topic: str, found: Findings) -> Table:
    """The published numbers of a topic, with the user's result for the same method (and size, where they agree) beside.

    Raises
    ------
    UsageError
        If there is no such topic.
    """
    rows = []
    mine = _read(found)
    for fact in facts(topic):
        own = _own(fact, mine)
        rows.append(
            {
                "method": fact.method,
                "size": fact.size,
                "setting": fact.setting,
                "quantity": f"{fact.quantity} ({fact.unit})" if fact.unit else fact.quantity,
                "published": fact.value,
                "own": own.value if own else None,
                "own_low": own.low if own else None,
                "own_high": own.high if own else None,
                "own_where": own.where if own else None,
                "where": f"{fact.paper}, {fact.where}",
                "note": fact.note,
            }
        )
    columns = [
        Column(key="method", label="method"),
        Column(key="size", label="their size"),
        Column(key="setting", label="setting"),
        Column(key="quantity", label="quantity"),
        Column(key="published", label="published", kind="general"),
        Column(key="own", label="these runs [interval]", kind="estimate"),
        Column(key="own_where", label="at size"),
        Column(key="where", label="source"),
        Column(key="note", label="note"),
    ]
    for key in ("setting", "note"):
        if not any(row[key] for row in rows):
            columns = [column for column in columns if column.key != key]
    notes = {row["note"] for row in rows}
    said = ""
    if len(notes) == 1 and (note := str(notes.pop())):  # said once instead of in every row
        said, columns = f" Note: {note}.", [column for column in columns if column.key != "note"]
    papers = "; ".join(dict.fromkeys(SOURCES[fact.paper] for fact in facts(topic)))
    caption = (
        f"Published by {papers}. Their corpora, tokenizers, budgets and precisions differ from these runs: the "
        f"columns stand side by side and are not to be subtracted. –: these runs have nothing for it.{said}"
    )
    title = f"Published beside measured: {TITLES[topic]}"
    return Table(
        name=f"published-{topic}", title=title, caption=caption, columns=tuple(columns), frame=pd.DataFrame(rows)
    )


def relevant(found: Findings) -> list[str]:
    """Topics for which these runs have a number to stand beside a published one of a method."""
    topics = []
    mine = _read(found)
    for topic in TOPICS:
        told = [fact for fact in facts(topic) if _own(fact, mine) is not None]
        if any(fact.method != "baseline" for fact in told):
            topics.append(topic)
    return topics


def _read(found: Findings) -> _Mine:
    throughput = added = None
    if found.baseline is not None:
        try:
            frame = costs.throughput(found.compared, found.histories, baseline=found.baseline).frame
            throughput = frame.dropna(subset=["tokens_per_s_ratio"]) if "tokens_per_s_ratio" in frame else None
        except TableError:
            pass
        table = shapes.added(found.compared_usable, sizes=found.places, baseline=found.baseline)
        added = None if table is None else table.frame
    return _Mine(
        found=found,
        usable=found.usable,
        places=tuple(found.places),
        scores=found.scores,
        throughput=throughput,
        added=added,
    )


def _own(fact: Fact, mine: _Mine) -> _Own | None:
    find = _FINDERS.get(fact.quantity)
    return find(fact, mine) if find else None


def _matching(fact: Fact, mine: _Mine) -> pd.DataFrame:
    """Usable runs that are what the fact is about, named as comparisons name them.

    Other head counts count where no run has the fact's, but for the table about them.
    """
    runs = mine.usable
    right = runs["method"] == fact.method
    if fact.variant is not None:
        right &= runs["variant"].fillna("") == fact.variant
    if fact.heads is not None:
        exact = right & runs["heads"].eq(fact.heads).fillna(False)
        if fact.heads == 1:
            exact |= runs["method"] == "attnres"  # one head is what it is
        right = exact if fact.topic == "heads" or exact.any() else right
    return mine.found.compared.loc[runs.index[right]]


def _with_heads(fact: Fact, mine: _Mine, where: str) -> str:
    """The place of an own value, with its head count where the fact has another."""
    heads = sorted(set(_matching(fact, mine)["heads"].dropna().astype(int)))
    other = fact.heads is not None and heads and heads != [fact.heads]
    return f"{where}, H={', '.join(map(str, heads))}" if other else where


def _speedup(fact: Fact, mine: _Mine) -> _Own | None:
    arms = set(_matching(fact, mine)["method"])
    for item in mine.found.speedups:
        if item.method in arms and item.mean == item.mean:
            return _Own(value=item.mean, low=item.low, high=item.high, where=f"mean of {len(item.scales)}")
    return None


def _delta(fact: Fact, mine: _Mine) -> _Own | None:
    arms = set(_matching(fact, mine)["method"])
    by_size = {delta.size: delta for delta in mine.found.deltas if delta.method in arms}
    for size in (fact.size, OVER_SIZES, *reversed(mine.places)):
        if size in by_size:
            delta = by_size[size]
            return _Own(value=delta.mean, low=delta.low, high=delta.high, where=_with_heads(fact, mine, size))
    return None


def _loss(fact: Fact, mine: _Mine, *, column: str = "val_loss", anywhere: bool = False) -> _Own | None:
    runs = _matching(fact, mine).dropna(subset=[column])
    sizes = [fact.size] if not anywhere else [size for size in reversed(mine.places) if size in set(runs["size"])][:1]
    cell = runs[runs["size"].isin(sizes)][column].astype(float)
    return _Own(value=float(cell.mean()), where=sizes[0]) if len(cell) else None


def _probed(fact: Fact, mine: _Mine, *, what: str = "excess") -> _Own | None:
    order = {size: place for place, size in enumerate(mine.found.sizes)}
    probes = [probe for probe in mine.found.supplements.probes if probe.method == fact.method]
    if not probes:
        return None
    probe = max(probes, key=lambda probe: (probe.size == fact.size, order.get(probe.size, -1)))
    result = judge_disagreement(probe)
    bounds = (result.interval.low[what], result.interval.high[what]) if result.interval else (None, None)
    return _Own(value=result.estimate[what], low=bounds[0], high=bounds[1], where=probe.size or probe.name)


def _throughput(fact: Fact, mine: _Mine) -> _Own | None:
    if mine.throughput is None or fact.setting:  # a setting names their kernels of old
        return None
    rows = mine.throughput[mine.throughput["method"].isin(set(_matching(fact, mine)["method"]))]
    exact = rows[rows["size"] == fact.size]
    row = exact.iloc[0] if len(exact) else rows.iloc[-1] if len(rows) else None
    return None if row is None else _Own(value=float(row["tokens_per_s_ratio"]), where=str(row["size"]))


def _added(key: str) -> Callable[[Fact, _Mine], _Own | None]:
    def find(fact: Fact, mine: _Mine) -> _Own | None:
        if mine.added is None:
            return None
        rows = mine.added[mine.added["method"].isin(set(_matching(fact, mine)["method"]))]
        return _Own(value=float(rows[key].iloc[-1]) / 100, where=str(rows["size"].iloc[-1])) if len(rows) else None

    return find


def _score(fact: Fact, mine: _Mine) -> _Own | None:
    if mine.scores is None:
        return None
    rows = mine.scores[
        (mine.scores["method"] == fact.method) & (mine.scores["task"].str.lower() == fact.setting.lower())
    ]
    sizes = [size for size in (fact.size, *reversed(mine.places), "all") if size in set(rows["size"])]
    return _Own(value=float(rows[rows["size"] == sizes[0]]["score"].mean()), where=sizes[0]) if sizes else None


def _gain(fact: Fact, mine: _Mine) -> _Own | None:
    for name, result in mine.found.supplements.items.items():
        method, _, task = name.partition("/")
        if method == fact.method and task.lower() == fact.setting.lower() and result.interval:
            low, high = result.interval.low.get("difference"), result.interval.high.get("difference")
            if low is None or high is None:
                return None
            return _Own(value=100 * result.estimate["difference"], low=100 * low, high=100 * high, where="its items")
    return None


_FINDERS: Final[dict[str, Callable[[Fact, _Mine], _Own | None]]] = {
    "speedup": _speedup,
    "delta": _delta,
    "loss": _loss,
    "training loss": lambda fact, mine: _loss(fact, mine, column="train_loss", anywhere=True),
    "Pile loss": lambda fact, mine: _loss(fact, mine, anywhere=True),
    "learned excess": _probed,
    "disagreement": _probed,
    "trained queries": lambda fact, mine: _probed(fact, mine, what="learned"),
    "random queries": lambda fact, mine: _probed(fact, mine, what="random"),
    "throughput": _throughput,
    "parameters added": _added("n_params_added"),
    "FLOPs added": _added("flops_added"),
    "score": _score,
    "gain": _gain,
}
