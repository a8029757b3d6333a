"""What was trained: the shape, budget and recipe of each size, and what each method added by the runs' own counts."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from scaling.analysis.tables.core import dropped_text
from scaling.analysis.tables.table import Column, Table

_SHAPE = (
    Column(key="layers", label="layers", kind="integer"),
    Column(key="width", label="width", kind="integer"),
    Column(key="ffn_width", label="feed-forward width", kind="integer"),
    Column(key="kv", label="KV heads"),
    Column(key="experts", label="experts", kind="integer"),
    Column(key="vocab_size", label="vocabulary", kind="integer"),
    Column(key="n_params", label="parameters", kind="integer"),
    Column(key="n_params_non_embedding", label="non-embedding", kind="integer"),
    Column(key="tokens", label="tokens", kind="integer"),
    Column(key="ratio", label="tokens a parameter", kind="number", digits=3),
    Column(key="steps", label="steps", kind="integer"),
    Column(key="batch_tokens", label="tokens a step", kind="integer"),
    Column(key="lr", label="peak LR"),
    Column(key="flops", label="training FLOPs", kind="number", digits=3),
    Column(key="methods", label="methods", kind="integer"),
    Column(key="seeds", label="seeds", kind="integer"),
    Column(key="n", label="runs", kind="integer"),
)
_LISTED = ("kv", "lr")  # varied within a size in many sweeps: all values are told
_MOST_VALUES = 6


def configurations(runs: pd.DataFrame, *, sizes: Sequence[str], baseline: str | None, dropped: int = 0) -> Table:
    """One row a size: shape and budget (the baseline's, where it was run at that size), learning rates, runs."""
    rows = []
    for place, size in enumerate(sizes):
        part = runs[runs["size"] == size]
        own = part[part["method"] == baseline]
        shaped = own if len(own) else part
        row: dict[str, object] = {
            "size": size,
            "size_sort": place,
            "methods": part["method"].nunique(),
            "seeds": part["seed"].nunique() or None,
            "n": len(part),
        }
        for column in _SHAPE:
            if column.key in _LISTED:
                row[column.key] = _listed(part[column.key])
            elif column.key in runs.columns:
                values = shaped[column.key].dropna().astype(float)
                row[column.key] = float(values.median()) if len(values) else None
        parameters, tokens = row.get("n_params_non_embedding"), row.get("tokens")
        if isinstance(parameters, float) and isinstance(tokens, float) and parameters > 0:
            row["ratio"] = tokens / parameters
        rows.append(row)
    frame = pd.DataFrame(rows)
    columns = [Column(key="size", label="size")]
    columns += [column for column in _SHAPE if column.key in frame and frame[column.key].notna().any()]
    whose = f"{baseline}'s where it was run, else the median over methods" if baseline else "medians over methods"
    caption = (
        f"What was trained at each size; counts are {whose}. Non-embedding: without the token embedding table. "
        f"Tokens a "
        f"parameter: training tokens over non-embedding parameters.{dropped_text(dropped)}"
    )
    return Table(
        name="configurations", title="Scaling configurations", caption=caption, columns=tuple(columns), frame=frame
    )


def added(runs: pd.DataFrame, *, sizes: Sequence[str], baseline: str) -> Table | None:
    """Parameters and training FLOPs a token of each method by the runs' own counts; ``None`` where they record none."""
    known = runs.dropna(subset=["size", "n_params", "flops", "tokens"])
    known = known[known["tokens"].astype(float) > 0]
    if baseline not in set(known["method"]):
        return None
    counted = known.assign(
        n_params=known["n_params"].astype(float), flops=known["flops"].astype(float) / known["tokens"].astype(float)
    )
    means = counted.groupby(["size", "method"], sort=False)[["n_params", "flops"]].median().reset_index()
    base = means[means["method"] == baseline].set_index("size")
    order = {size: place for place, size in enumerate(sizes)}
    means = means[means["size"].isin(base.index)]
    frame = means.assign(
        size_sort=means["size"].map(order),
        n_params_added=100 * (means["n_params"] / means["size"].map(base["n_params"]) - 1),
        flops_added=100 * (means["flops"] / means["size"].map(base["flops"]) - 1),
    ).sort_values(["size_sort", "n_params", "method"])
    columns = (
        Column(key="size", label="size"),
        Column(key="method", label="method"),
        Column(key="n_params", label="parameters", kind="integer"),
        Column(key="n_params_added", label="added (%)", kind="number", digits=2),
        Column(key="flops", label="training FLOPs a token", kind="number"),
        Column(key="flops_added", label="added (%)", kind="number", digits=2),
    )
    caption = f"As the runs recorded them; added: over {baseline} at the same size. FLOPs are counted, not measured."
    return Table(
        name="added", title="Parameters and FLOPs of these runs", caption=caption, columns=columns, frame=frame
    )


def _listed(values: pd.Series) -> str | None:
    """All values of a column, or its ends where there are many."""
    known = sorted(set(values.dropna().astype(float)))
    if not known:
        return None
    if len(known) > _MOST_VALUES:
        return f"{known[0]:g} to {known[-1]:g} ({len(known)} values)"
    return ", ".join(f"{value:g}" for value in known)
