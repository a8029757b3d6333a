"""``scaling data`` as a program: stdout, stderr, exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def scaling(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scaling", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n}", "source": "ab"[n % 2]}) + "\n" for n in range(200)))
    return path


def test_prepare_then_info(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    made = scaling("data", "prepare", corpus, "--out", out, "--held-out-fraction", "0.2", "--workers", "1", "--json")
    assert made.returncode == 0, made.stderr
    tree = json.loads(made.stdout)
    assert made.stderr.splitlines() == ["tokenize ...", "lay out ..."]
    assert tree["num_documents"] == 200 and [row["source"] for row in tree["sources"]] == ["a", "b"]
    assert tree["train_tokens"] + tree["held_out_tokens"] == tree["num_tokens"] == tree["text_bytes"] + 200
    assert json.loads(scaling("data", "info", out, "--json").stdout) == tree
    shown = scaling("data", "info", out).stdout
    assert tree["fingerprint"] in shown and "257 (plain bytes), " in shown and f"{tree['num_tokens']:,} tokens" in shown


def test_errors_are_one_line_and_status_1(tmp_path: Path) -> None:
    for arguments in (("data", "info", tmp_path), ("data", "prepare", tmp_path / "none", "--out", tmp_path / "s")):
        out = scaling(*arguments)
        assert out.returncode == 1 and out.stdout == ""
        assert out.stderr.startswith("error: ") and out.stderr.count("\n") == 1


def test_wrong_use_is_status_2(corpus: Path, tmp_path: Path) -> None:
    assert scaling("data", "prepare", "x").returncode == 2
    for wrong in (("--workers", "0"), ("--end-of-document", "<eos>")):
        out = scaling("data", "prepare", corpus, "--out", tmp_path / "s", *wrong)
        assert out.returncode == 2 and out.stdout == ""
        assert out.stderr.startswith("error: ") and out.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
