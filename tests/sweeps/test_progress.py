"""Progress of a local sweep where nobody looks at a terminal: one line a change of state, with its reason."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from scaling.sweeps.burial import bury
from scaling.sweeps.display import Progress
from scaling.sweeps.plan import plan
from scaling.sweeps.spec import load_spec

SPEC = """name: tiny
base:
  model: {size: 6k, vocab_size: 512}
  data: {path: store, seq_len: 64, batch_size: 4}
  optimizer: {lr: 1e-2}
  schedule: {steps: 4}
  run: {device: cpu}
grid:
  seed: [0, 1]
"""


def test_a_failed_run_is_told_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(SPEC, encoding="utf-8")
    sweep = plan(load_spec(path), tmp_path / "runs")
    written = io.StringIO()
    with Progress(sweep, terminal=Console(file=written, width=220)):
        bury(sweep.out, sweep.runs[0].config, kind="crash", reason="store: no token store here [none]")
    assert written.getvalue() == f"{sweep.runs[0].label}: failed:crash: store: no token store here [none]\n"
