"""``scaling eval``: the harness's tasks on a trained model, results and items, refusals, paired tests afterwards."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from scaling.analysis.supplements import collect
from scaling.cli.main import app
from scaling.config.tree import RunConfig
from scaling.corpus.preparation import prepare
from scaling.errors import ScalingError
from scaling.identity import run_key
from scaling.resolve import resolve
from scaling.train import train
from scaling.trained import load_model
from tests.conftest import missing

ITEMS: list[dict[str, Any]] = [
    {"question": f"question {i}:", "choices": [" yes", " no, never", " 17"], "label": i % 3, "answer": " yes"}
    for i in range(5)
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": ""}
TASKS: dict[str, dict[str, Any]] = {
    "pick": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "guess": {
        "output_type": "loglikelihood", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}} {{question}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "write": {
        "output_type": "generate_until", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        missing("lm-evaluation-harness (pip install 'isoloss[eval]')")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files beside their data."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS), encoding="utf-8")
    for name, task in TASKS.items():
        tree = {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}, **COMMON, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


@pytest.fixture
def trained(tmp_path: Path, make_config: Callable[..., RunConfig]) -> Callable[[str], Path]:
    """Train a tiny model of bytes with a method; its run folder."""
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"question {i}: yes\nquestion {i + 1}: no, never\n" * 3}) for i in range(40)]
    text.write_text("\n".join(lines), encoding="utf-8")
    prepare([text], tmp_path / "store", held_out_fraction=0.2)

    def run(method: str) -> Path:
        config = make_config(
            tmp_path / "store",
            model={"vocab_size": 257, "residual": {"method": method}},
            optimizer={"ema_decay": 0.5},
            schedule={"steps": 3, "warmup_steps": 1},
            evaluation={"every_steps": 3, "num_sequences": 2},
        )
        train(config, out=tmp_path / "runs")
        return tmp_path / "runs" / run_key(resolve(config))

    return run


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def log_probability(run: Path, context: str, continuation: str) -> float:
    """By one pass of the model in float64."""
    tokens = [*context.encode(), *continuation.encode()]
    model = load_model(run).double()
    with torch.no_grad():
        scores = model.logits(model(torch.tensor([tokens[:-1]])))[0].log_softmax(-1)
    wanted = torch.tensor(tokens[1:]).unsqueeze(-1)
    return float(scores.gather(-1, wanted)[-len(continuation.encode()) :].sum())


def test_every_kind_of_task(trained: Callable[[str], Path], tasks: Path) -> None:
    """Results, items with the right answers' bits, files that are merged task by task."""
    run = trained("mhar")
    paths = ",".join(str(tasks / f"{name}.yaml") for name in ("pick", "guess", "whole"))
    answer = call(run, "--tasks", paths, "--seq-len", "64", "--json")
    assert answer.exit_code == 0, answer.output
    tree = json.loads(answer.stdout.splitlines()[-1])
    assert tree["how"]["method"] == "mhar" and tree["how"]["weights"] == "final" and tree["how"]["positions"] == 64
    folder = run / "downstream" / "final"
    assert tree["folder"] == str(folder)
    with (folder / "pick.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row, item in zip(rows, ITEMS, strict=True):
        scores = [log_probability(run, item["question"], choice) for choice in item["choices"]]
        label = item["label"]
        assert float(row["answer_bits"]) == pytest.approx(-scores[label] / math.log(2), rel=1e-4)
        assert int(row["answer_bytes"]) == len(item["choices"][label].encode())
        assert float(row["acc"]) == float(max(scores) == scores[label])
        normed = [score / len(choice) for score, choice in zip(scores, item["choices"], strict=True)]
        assert int(row["correct"]) == int(float(row["acc_norm"])) == int(max(normed) == normed[label])
    metrics = tree["tasks"]["pick"]["metrics"]
    assert metrics["acc"]["value"] == pytest.approx(sum(float(row["acc"]) for row in rows) / len(rows))
    bits, size = sum(float(row["answer_bits"]) for row in rows), sum(int(row["answer_bytes"]) for row in rows)
    assert metrics["answer_bpb"]["value"] == pytest.approx(bits / size) and metrics["answer_bpb"]["stderr"] > 0
    guess = sum(log_probability(run, item["question"], " yes") for item in ITEMS) / len(ITEMS)
    assert tree["tasks"]["guess"]["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(-guess), rel=1e-4)
    assert tree["tasks"]["whole"]["metrics"]["bits_per_byte"]["value"] > 0
    assert call(run, "--tasks", tasks / "write.yaml").exit_code == 0
    assert set(json.loads((folder / "results.json").read_text("utf-8"))) == {"pick", "guess", "whole", "write"}


def test_words_and_paired_items(trained: Callable[[str], Path], tasks: Path) -> None:
    """What a person reads, and the paired test over the items of two methods; other weights are told apart."""
    runs = [trained(method) for method in ("baseline", "mhar")]
    for run in runs:
        answer = call(run, "--tasks", tasks / "pick.yaml", "--limit", "3")
        assert answer.exit_code == 0, answer.output
        assert "pick  3 items, 0 shots" in answer.stdout and "only the first 3 items of a task" in answer.stdout
    scores = collect(runs=str(runs[0].parent)).scores
    assert scores is not None and sorted(scores["method"]) == ["baseline", "mhar"]
    assert set(scores["task"]) == {"pick"} and scores["score"].between(0, 1).all() and scores["se"].notna().all()
    compare = ["compare", "items", "--runs", str(runs[0].parent), "--baseline", "baseline", "--json"]
    answer = CliRunner().invoke(app, compare)
    assert answer.exit_code == 0 and "mhar" in answer.stdout
    assert call(runs[1], "--tasks", tasks / "pick.yaml", "--ema").exit_code == 0
    with pytest.raises(ScalingError, match="occurs twice; its rows differ in weights: choose with --where weights=="):
        CliRunner().invoke(app, compare, catch_exceptions=False)


def test_refusals(trained: Callable[[str], Path], tasks: Path, tmp_path: Path) -> None:
    """Tasks and data that are not there are named, with what to do."""
    run = trained("baseline")

    def refused(*arguments: object) -> str:
        with pytest.raises(ScalingError) as caught:
            CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)
        message = str(caught.value)
        assert "\n" not in message
        return message

    assert "names no task" in refused(run, "--tasks", " , ")
    (run / "checkpoints" / "final").rename(run / "checkpoints" / "elsewhere")
    assert "the run has no final weights yet; name one of its checkpoints" in refused(run, "--tasks", "pick")
    (run / "checkpoints" / "elsewhere").rename(run / "checkpoints" / "final")
    assert "no such file" in refused(run, "--tasks", tmp_path / "absent.yaml")
    message = refused(run, "--tasks", "hellaswagg")
    assert "unknown task 'hellaswagg'; did you mean 'hellaswag'" in message and len(message) < 200
    empty = tmp_path / "empty.yaml"
    empty.write_text("dataset_path: json\n", encoding="utf-8")
    assert "a task file has a line" in refused(run, "--tasks", empty)
    empty.write_text("group: nothing\n", encoding="utf-8")
    assert "nothing: groups without a task" in refused(run, "--tasks", empty)
    lost = tmp_path / "lost"
    lost.mkdir()
    tree = {
        "task": "lost",
        "dataset_kwargs": {"data_files": {"test": str(lost / "no.jsonl")}},
        **COMMON,
        **TASKS["pick"],
    }
    (lost / "lost.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert "cannot be loaded (FileNotFoundError" in refused(run, "--tasks", lost / "lost.yaml")
    assert "no such run, checkpoint or model" in refused(
        tmp_path / "none", "--tasks", tasks / "pick.yaml", "--out", lost
    )
