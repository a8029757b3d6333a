"""Downstream evaluation of a checkpoint through lm-evaluation-harness: an adapter, results, and items for paired tests.

After ``scoring`` in the flow; the command line's ``scaling eval`` calls it. The harness has the tasks and the metrics;
here are tokens and scores. What a folder of results holds: ``results.json`` (a task's metrics with their errors, and
how they were made) and one table of items a task, ``<task>.csv``, which ``scaling compare items`` takes: whether each
item was answered right, every metric of it, and the bits a byte of its right answer, which says more than accuracy
where models are small.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from lm_eval import evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from scaling.answers import as_csv, item_rows, task_metrics
from scaling.checkpoint import FINAL
from scaling.config.training import PrecisionConfig
from scaling.corpus.tokenizer import Encoder, store_encoder
from scaling.errors import CheckpointError, RecordError, UsageError
from scaling.identity import label, size_label
from scaling.kernels import dispatch
from scaling.record import (
    CHECKPOINTS,
    DOWNSTREAM,
    DOWNSTREAM_FINAL,
    DOWNSTREAM_RESULTS,
    RunFolder,
    write_atomically,
)
from scaling.scoring import Scorer
from scaling.trained import load_model, run_of, store_of

logger = logging.getLogger(__name__)
logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default that a task file leaves to it

_LENGTH: Final = 1024  # positions where the checkpoint does not say what it was trained with
_SEED: Final = 1234  # of the examples before an item; the harness's own default
_GENERATED: Final = 256  # tokens a continuation may have where its task does not say; the harness's own default


@dataclass(frozen=True, kw_only=True, slots=True)
class Downstream:
    """Metrics of some tasks: ``tasks`` maps a task to ``items``, ``shots``, and ``metrics`` with value and error."""

    folder: Path
    tasks: Mapping[str, Mapping[str, Any]]
    how: Mapping[str, Any]


class TrainedModel(TemplateLM):  # type: ignore[misc]
    """What the harness asks of a model, answered by a :class:`~scaling.scoring.Scorer`."""

    def __init__(self, scorer: Scorer, encoder: Encoder) -> None:
        super().__init__()
        self.scorer, self.encoder = scorer, encoder

    @property
    def eot_token_id(self) -> int:
        """What documents end with, and so what stands before the first token of one."""
        return self.encoder.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, without an end."""
        ids, _ = self.encoder.encode([string.encode("utf-8")])
        return [int(index) for index in ids[:-1]]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As the harness does it, without its bar: the scorer says how far it is."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scores

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        return self.scorer.log_likelihoods([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, every token once, in windows as long as the model sees."""
        windows: list[tuple[list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.scorer.max_length,
                context_len=1,
            )
            own = [make_disjoint_window(pair) for pair in pairs]
            windows += own
            counts.append(len(own))
        scores = iter(self.scorer.log_likelihoods(windows))
        return [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to the first stop."""
        prompts, counts, stops = [], [], []
        for context, options in (request.args for request in requests):
            if options.get("do_sample") and options.get("temperature", 0.0) > 0.0:
                raise UsageError(
                    "a task asks for sampled continuations; only greedy ones are made: set do_sample: false"
                )
            prompts.append(self.tok_encode(context) or [self.prefix_token_id])
            counts.append(int(options.get("max_gen_toks", _GENERATED)))
            until = options.get("until") or []
            stops.append([until] if isinstance(until, str) else list(until))

        def finished(index: int, tokens: list[int]) -> bool:
            if tokens[-1] == self.eot_token_id:
                return True
            return any(stop in self.encoder.decode(tokens) for stop in stops[index] if stop)

        made = self.scorer.continuations(prompts, counts, finished)
        return [_cut(self.encoder.decode(tokens), stop) for tokens, stop in zip(made, stops, strict=True)]


def evaluate_downstream(
    checkpoint: Path,
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    average: bool = False,
    out: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    seq_len: int | None = None,
    say: Callable[[str], None] = logger.info,
) -> Downstream:
    """Evaluate a checkpoint on tasks of the harness, or on task files, and write results and items.

    Parameters
    ----------
    checkpoint
        Run folder, checkpoint or converted model.
    tasks
        Names that the harness knows, or files of its kind (``.yaml``).
    data
        Token store whose tokenizer is the model's; by default the run's.
    average
        The moving average of the weights.
    out
        Where to write; by default within the run's folder.
    shots, limit
        Examples before each item, and items a task, as the harness has them.
    seq_len
        Positions that the model sees; by default those it was trained with.

    Raises
    ------
    UsageError
        If a task is unknown or its data cannot be had, or the checkpoint needs ``data``, ``out``.
    CheckpointError
        If there are no weights to load.
    RecordError
        If results cannot be written.
    """
    if not checkpoint.exists():
        raise CheckpointError(
            f"{checkpoint}: no such run, checkpoint or model; `scaling train` makes runs in its --out"
        )
    run = run_of(checkpoint)
    weights = _weights(checkpoint, run, average)
    model = load_model(checkpoint, average=average)
    config = run.config() if run is not None else None
    store = store_of(checkpoint, model, data)
    if out is not None:
        folder = out
    elif run is not None:
        folder = run.path / DOWNSTREAM / weights
    else:
        raise UsageError(f"{checkpoint}: lies in no run folder; say where results go with --out")
    loaded = _load(tasks)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer = Scorer(
        model,
        arithmetic=config.precision if config else PrecisionConfig(),
        device=device,
        max_length=seq_len or (config.data.seq_len if config else _LENGTH),
        pad=store.meta.end_of_document,
        say=say,
    )
    say(f"{len(loaded['tasks'])} tasks on {device}, {scorer.max_length} positions")
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        task.set_config(key="num_fewshot", value=own or 0 if shots is None else shots)
        task.set_fewshot_seed(seed=_SEED)
    answer = evaluate(
        TrainedModel(scorer, store_encoder(store)), loaded, limit=limit, log_samples=True, bootstrap_iters=1000
    )
    who = {
        "method": config.model.residual.method if config else checkpoint.name,
        "name": (config.run.name or label(config)) if config else checkpoint.name,
        "size": size_label(config.model) if config else size_label(model.config),
        "seed": config.run.seed if config else "",
        "run": run.key if run is not None else "",
        "weights": weights,
    }
    how = who | {
        "checkpoint": str(checkpoint),
        "tokenizer_sha256": store.meta.tokenizer_sha256,
        "positions": scorer.max_length,
        "tokens_per_batch": scorer.tokens_per_batch,
        "precision": scorer.arithmetic.mode,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "kernels": dispatch.describe(device),
        "lm_eval": importlib.metadata.version("lm_eval"),
        "limit": limit,
    }
    found: dict[str, dict[str, Any]] = {}
    for task in loaded["tasks"]:
        rows = item_rows(answer["samples"][task], task, who)
        found[task] = task_metrics(answer, task, rows)
        _write(folder / f"{task}.csv", as_csv(rows))
    known = _known(folder / DOWNSTREAM_RESULTS)
    known |= {task: {**metrics, "how": how} for task, metrics in found.items()}
    _write(folder / DOWNSTREAM_RESULTS, json.dumps(known, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return Downstream(folder=folder, tasks=found, how=how)


def _load(tasks: Sequence[str]) -> dict[str, Any]:
    """The harness's tasks and groups, with their data; of a file's folder only the tasks of that file are run."""
    files = {Path(task) for task in tasks if task.endswith((".yaml", ".yml"))}
    for path in files:
        if not path.is_file():
            raise UsageError(f"--tasks: {path}: no such file; give a task's name or its .yaml file")
    names = [task for task in tasks if Path(task) not in files]
    manager = TaskManager(include_path=[str(path.resolve().parent) for path in files], include_defaults=bool(names))
    known = manager.task_index
    for path in sorted(files):
        own = [name for name, entry in known.items() if entry.yaml_path == path.resolve()]
        if not own:
            raise UsageError(f"--tasks: {path}: names no task; a task file has a line `task: NAME`")
        names += own
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)  # there are some ten thousand
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`lm-eval ls tasks` lists them"
            raise UsageError(f"--tasks: unknown task {name!r}; {hint}")
    try:
        loaded: dict[str, Any] = manager.load(names)
    except Exception as error:  # whatever the harness, its tasks and the libraries that fetch their data raise
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"--tasks {','.join(names)}: cannot be loaded ({type(error).__name__}: {reason}); tasks fetch their data "
            "from the Hugging Face hub: without it, give a .yaml with dataset_path: json and dataset_kwargs.data_files"
        ) from error
    if not loaded["tasks"]:
        raise UsageError(f"--tasks {','.join(names)}: groups without a task; name tasks, or groups that have some")
    return loaded


def _weights(checkpoint: Path, run: RunFolder | None, average: bool) -> str:
    """What the weights are called: the checkpoint's folder; of a run itself only the last ones have a name."""
    if run is not None and checkpoint.resolve() == run.path.resolve():
        if not (run.path / CHECKPOINTS / FINAL).is_dir():
            raise UsageError(
                f"{checkpoint}: the run has no final weights yet; name one of its checkpoints ({CHECKPOINTS}/step-...)"
            )
        name = DOWNSTREAM_FINAL
    else:
        name = checkpoint.stem
    return f"{name}-ema" if average else name


def _known(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read ({error}); move it away") from None
    return dict(found)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"{path.parent}: cannot be made ({error.strerror}); choose another --out") from None
    write_atomically(path, text)


def _cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first of its stops."""
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text
