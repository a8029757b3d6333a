"""What the harness's answers say, in this project's terms: a row an item, a task's metrics, the right answer's bits.

Before ``downstream`` in the flow, which has the answers. Plain data in, plain data out.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from scaling.evaluate import ratio_estimate

# what counts as an item's being right, in this order
_RIGHT: Final = ("acc_norm", "acc", "exact_match", "pass@1")


def item_rows(samples: Sequence[Mapping[str, Any]], task: str, who: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a sample: whose it is, whether it was right, bits and bytes of the right answer, and every metric."""
    rows = []
    for sample in samples:
        if sample["filter"] != samples[0]["filter"]:  # the same answers, read in another way
            continue
        metrics = {name: sample[name] for name in sample["metrics"] if isinstance(sample.get(name), int | float)}
        right = next((name for name in _RIGHT if metrics.get(name) in (0, 1)), None)
        bits, size = _answer_bits(sample)
        rows.append(
            {
                "task": task,
                "item": sample["doc_id"],
                **who,
                "correct": "" if right is None else int(metrics[right]),
                "answer_bits": "" if bits is None else bits,
                "answer_bytes": "" if size is None else size,
                **{name: float(value) for name, value in metrics.items()},
                "filter": sample["filter"],
                "prompt_hash": sample["prompt_hash"],
            }
        )
    return rows


def _answer_bits(sample: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """Bits and bytes of the right answer, where the task says which text that is."""
    arguments, answers, target = sample["arguments"], sample["filtered_resps"], sample["target"]
    scored = [isinstance(answer, tuple | list) and len(answer) == 2 for answer in answers]
    if not all(scored) or len(arguments) != len(answers):
        return None, None
    if len(answers) == 1:
        chosen = 0
    elif isinstance(target, int) and 0 <= target < len(answers):
        chosen = target
    else:
        return None, None
    size = len(str(arguments[chosen][1]).encode("utf-8"))
    return (-float(answers[chosen][0]) / math.log(2), size) if size else (None, None)


def task_metrics(answer: Mapping[str, Any], task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A task's metrics with their standard errors, the one that reports show, and the answers' bits a byte."""
    named: dict[str, Any] = {}
    results = answer["results"][task]
    for key, value in results.items():
        metric, _, chain = key.partition(",")
        if chain and not metric.endswith("_stderr") and isinstance(value, int | float):
            error = results.get(f"{metric}_stderr,{chain}")
            name = metric if chain == "none" else f"{metric}_{chain}"
            named[name] = {"value": _finite(value), "stderr": _finite(error)}
    pairs = [(row["answer_bits"], row["answer_bytes"]) for row in rows if row["answer_bytes"] != ""]
    if pairs:
        # items are here what documents are for the held-out loss
        rate, error = ratio_estimate(*np.array(pairs, dtype=np.float64).T)
        named["answer_bpb"] = {"value": rate, "stderr": _finite(error)}
    main = next((name for name in _RIGHT if name in named), None)
    return {"metrics": named, "main": main, "items": len(rows), "shots": answer["n-shot"][task]}


def _finite(number: Any) -> float | None:
    """A number that JSON has; None for what the harness calls "N/A", overflow and not-a-number."""
    return float(number) if isinstance(number, int | float) and math.isfinite(number) else None


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same keys as a table."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
