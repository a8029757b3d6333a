"""One process's training loop: steps, logging, evaluations, checkpoints, in an order that a resume cannot change.

Between the parts (``feed``, ``loss``, ``optim``, ``schedule``, ``meter``, ``evaluate``, ``checkpoint``) and ``train``,
which owns the run folder's life. After each update, at the same steps whatever happened before: a journal line, then an
evaluation, then a checkpoint, then the question whether to leave.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaling import precision
from scaling.accounting import count_flops
from scaling.checkpoint import EMA, MODEL, Checkpoint, Checkpoints, Entry
from scaling.config.tree import RunConfig
from scaling.distributed import World, forget_gathered, prepare, synchronise_gradients, wrap
from scaling.errors import CheckpointError
from scaling.evaluate import Evaluation, Evaluator, advice
from scaling.feed import Feed
from scaling.loader import Loader
from scaling.loss import TrainingLoss
from scaling.meter import Meter, Rates
from scaling.models.transformer import Transformer
from scaling.optim import MOMENTS, Optimizer
from scaling.schedule import learning_rate
from scaling.stop import STOP, Interrupted
from scaling.tokens import TokenStore
from scaling.tracking.system import SystemMetrics

logger = logging.getLogger(__name__)

Write = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is: for a person's display, once a journal line."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    val_loss: float | None
    eta_s: float


class Loop:
    """A model in training on this process.

    Parameters
    ----------
    config
        Resolved configuration.
    store
        The tokens.
    world
        This process's place.
    rows
        Sequences in one micro-batch.
    write
        Takes a step and its metrics to the journal (without effect on other processes than the first).
    keep_evaluation
        Stores an evaluation's losses.
    """

    def __init__(
        self,
        config: RunConfig,
        store: TokenStore,
        world: World,
        *,
        rows: int,
        write: Write,
        keep_evaluation: Callable[[Evaluation], None],
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        assert config.schedule.steps is not None, "resolve the config first"
        self.config, self.world = config, world
        self.steps: int = config.schedule.steps
        self.step = 0
        self.evaluations: list[float] = []  # losses of the evaluations so far
        self.last_evaluation: Evaluation | None = None
        self._evaluated_step = 0
        self._saved_step, self._saved_s = 0, 0.0
        self.final: dict[str, float] = {}
        self._write, self._keep_evaluation, self._progress = write, keep_evaluation, progress
        self._rows = rows
        self._arithmetic = precision.compute_arithmetic(config.precision, world.device)
        self._loader = Loader(
            store,
            seq_len=config.data.seq_len,
            batch_size=config.data.batch_size,
            seed=config.run.seed,
            weights=config.data.weights,
            document_masking=config.data.document_masking,
        )
        self.evaluator = Evaluator(store, config, world)
        self._build()
        self._flops_per_token = count_flops(config.model, config.data.seq_len).training
        rates = Rates(tokens_per_step=config.data.tokens_per_step, flops_per_token=self._flops_per_token)
        self._meter = Meter(world, rates, arithmetic=self._arithmetic, skipping=config.optimizer.skip_nonfinite)
        self._system = SystemMetrics() if config.run.system_metrics and world.is_first else None
        self._trained_s = 0.0  # wall time of work that is part of the run, over all attempts
        self._mark_s = time.perf_counter()

    def _build(self) -> None:
        config, world = self.config, self.world
        with torch.device(world.device):
            self.transformer = Transformer(config.model)
        self.transformer.init_weights(config.run.seed)
        precision.cast_weights(self.transformer, config.precision)
        prepare(self.transformer, config.run)
        compiled = config.run.compile and world.device.type == "cuda"
        loss = TrainingLoss(self.transformer, z_loss=config.optimizer.z_loss, compiled=compiled)
        self.module = wrap(loss, self.transformer, config.run, world)
        self.module.train()
        self.optimizer = Optimizer(
            dict(self.transformer.named_parameters()), config.optimizer, self.transformer.connection_parameters(), world
        )

    def run(self, checkpoints: Checkpoints) -> bool:
        """Train to the last step; ``False`` if asked to leave before, with the state saved.

        Raises
        ------
        Diverged
            If a loss or gradient is not finite.
        """
        feed = Feed(self._loader, self.world, rows=self._rows, first_step=self.step)
        first = self.step
        self._saved_step, self._saved_s = self.step, time.monotonic()
        try:
            try:
                # nothing has been trained yet, so nothing is lost; of several processes none may leave by itself
                with STOP.interruptible(self.world.size == 1):
                    if self.config.run.compile:
                        self.evaluator.warm_up(self.module)
                    left = self._evaluate_if_due() if self.step else False  # one that an interruption broke off
                    if not left and self.step < self.steps:
                        self._advance(feed)
            except Interrupted:
                left = True
            if self.step > first:
                self._meter.fetch(self.step)
                self._meter.forget_time()  # compilation and first allocations are not the speed of training
                gc.freeze()  # what exists now lives as long as the run; the collector need not look at it again
            while not left:
                if self.step > first:
                    self._log(feed)
                    left = self._evaluate_if_due()
                done = self.step >= self.steps and not left
                left = left or (not done and self.world.any(STOP.requested))
                self._save_if_due(checkpoints, leaving=left)
                if done:
                    self._meter.require_progress(self.step)
                    return True
                if not left:
                    self._advance(feed)
            self._save(checkpoints, wait=True)
            return False
        finally:
            gc.unfreeze()
            feed.close()

    def _advance(self, feed: Feed) -> None:
        """One update."""
        self._meter.start()
        pieces, num_targets = feed.take()
        # wrappers average gradients over processes, each of which has its part of the sum
        scale = self.world.size / num_targets
        total: Tensor | None = None
        for number, piece in enumerate(pieces):
            synchronise_gradients(self.module, number == len(pieces) - 1)
            with precision.autocast(self.config.precision, self.world.device):
                objective, loss = self.module(piece.tokens_BT, piece.targets_BT, piece.document_BT)
            (objective * scale).backward()
            total = loss if total is None else total + loss
        assert total is not None, "a step has at least one micro-batch"
        norm = self.optimizer.update(learning_rate(self.config.schedule, self.config.optimizer.lr, self.step))
        self.transformer.after_step(self.world.sum_)
        self._meter.take(total / num_targets, norm)
        self.step += 1

    def _log(self, feed: Feed) -> None:
        if self.step % self.config.run.log_every_steps and self.step != self.steps:
            return
        self._meter.fetch(self.step)
        skipped = self._meter.skipped_since_line
        metrics = self._meter.line(waited_s=feed.waited_s)
        if skipped > 0 and self.world.is_first:
            logger.warning(
                "step %d: %d updates skipped since the last line, loss or gradient not finite", self.step, skipped
            )
        feed.waited_s = 0.0
        metrics["train/lr"] = learning_rate(self.config.schedule, self.config.optimizer.lr, self.step - 1)
        metrics |= self.totals() | self.transformer.statistics()
        if self._system is not None:
            metrics |= self._system()
        self._write(self.step, metrics)
        self.final |= metrics
        if self._progress is not None:
            left = self.steps - self.step
            self._progress(
                Progress(
                    step=self.step,
                    steps=self.steps,
                    loss=metrics["train/loss"],
                    tokens_per_s=metrics.get("perf/tokens_per_s", 0.0),
                    val_loss=self.last_evaluation.loss if self.last_evaluation else None,
                    eta_s=left * metrics.get("perf/step_time_s", 0.0),
                )
            )

    def _evaluate_if_due(self) -> bool:
        """Evaluate where due; whether to leave."""
        if self.step % self.config.evaluation.every_steps and self.step != self.steps:
            return False
        if self._evaluated_step == self.step:
            return False
        self._meter.fetch(self.step)
        start_s = time.perf_counter()
        alone = self.world.size == 1
        try:
            with STOP.interruptible(alone):  # an evaluation changes nothing and is made again after a resume
                evaluation = self.evaluator.run(self.module, self.step, lambda: self.world.any(STOP.requested))
                metrics = {} if evaluation is None else evaluation.metrics()
                if evaluation is not None and self.optimizer.ema:
                    with self.averaged():
                        averaged = self.evaluator.run(self.module, self.step, lambda: self.world.any(STOP.requested))
                    if averaged is None:
                        return True
                    metrics |= {"val/loss_ema": averaged.loss}
        except Interrupted:
            self.module.train()
            return True
        if evaluation is None:
            return True
        if not self.evaluations and (text := advice(evaluation, self.config.evaluation.num_sequences)):
            logger.info("%s", text)
        self.evaluations = [*self.evaluations, evaluation.loss][-self.config.evaluation.tail :]
        self.last_evaluation, self._evaluated_step = evaluation, self.step
        metrics["val/loss_tail"] = sum(self.evaluations) / len(self.evaluations)
        metrics["perf/eval_time_s"] = time.perf_counter() - start_s
        self._keep_evaluation(evaluation)
        self._write(self.step, metrics)
        self.final |= metrics
        return False

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the model has the moving average for weights."""
        try:
            with self.optimizer.averaged():
                forget_gathered(self.module)
                yield
        finally:
            forget_gathered(self.module)

    @property
    def permanent_due(self) -> bool:
        """Whether the state after this step is to be kept for good."""
        every = self.config.run.permanent_every_steps
        return every is not None and self.step % every == 0

    def _save_if_due(self, checkpoints: Checkpoints, *, leaving: bool) -> None:
        settings = self.config.run
        if self.permanent_due:
            self._save(checkpoints)
        elif leaving or self.step >= self.steps:
            return  # saved on leaving; ``ending`` sees to the end
        elif settings.checkpoint_every_steps and self.step % settings.checkpoint_every_steps == 0:
            self._save(checkpoints)
        elif settings.checkpoint_every_minutes is not None and self.step % settings.log_every_steps == 0:
            late = time.monotonic() - self._saved_s > 60 * settings.checkpoint_every_minutes
            if self.world.any(late):
                self._save(checkpoints)

    def _save(self, checkpoints: Checkpoints, *, wait: bool = False) -> None:
        if self.step > self._saved_step:
            self._meter.fetch(self.step)
            checkpoints.save(self.step, self.entries(), self.state(), permanent=self.permanent_due)
        self._saved_step, self._saved_s = self.step, time.monotonic()
        if wait:
            checkpoints.finish(required=True)

    def save_end(self, checkpoints: Checkpoints, *, after_s: float = 0.0, otherwise: str = "") -> bool:
        """Save the state of a finished run, unless the last save is younger than ``after_s``; whether it is saved.

        Where it cannot be written, the log says so, and ``otherwise`` what that means.
        """
        checkpoints.finish()
        if self.world.share(checkpoints.holds(self.step)):
            return True
        if not self.world.any(time.monotonic() - self._saved_s >= after_s):
            return False
        self._saved_step = -1  # one that was begun at this step and not written does not count
        problem: str | None = None
        try:
            self._save(checkpoints, wait=True)
        except CheckpointError as error:
            problem = str(error)
        problem = next((found for found in self.world.gather(problem) if found is not None), None)
        if problem is not None and self.world.is_first:
            logger.warning("%s%s", problem.partition(";")[0], f"; {otherwise}" if otherwise else "")
        return problem is None

    def totals(self) -> dict[str, float]:
        """Tokens, FLOPs and time so far, work that was lost to an interruption left out."""
        tokens = float(self.step * self.config.data.tokens_per_step)
        wall_time_s = self._trained_s + time.perf_counter() - self._mark_s
        gpus = self.world.size if self.world.device.type == "cuda" else 0
        return {
            "train/tokens": tokens,
            "train/flops": self._flops_per_token * tokens,
            "perf/wall_time_s": wall_time_s,
            "perf/gpu_seconds": wall_time_s * gpus,
        }

    def batch_starts(self, step: int) -> list[int]:
        """The sequences that update number ``step`` (from 1) was made on, by their first token in the store."""
        starts: list[int] = self._loader.batch(step - 1).start_B.tolist()
        return starts

    def entries(self) -> dict[str, Entry]:
        """Every tensor of the training state."""
        entries = {f"{MODEL}{name}": Entry.whole(tensor) for name, tensor in self.transformer.state_dict().items()}
        for shard in self.optimizer.shards:
            for moment in MOMENTS:
                local = self.optimizer.moment(shard, moment)
                entries[f"optimizer/{moment}/{shard.name}"] = Entry(local=local, layout=shard.parameter)
            if self.optimizer.ema:
                entries[f"{EMA}{shard.name}"] = Entry(local=self.optimizer.ema[shard.name], layout=shard.parameter)
        return entries

    def state(self) -> dict[str, Any]:
        """Everything of the training state that is not a tensor; the loader's cursor is the step."""
        return {
            "updates": self.optimizer.updates,
            "meter": self._meter.state(),
            "evaluations": self.evaluations,
            "evaluated_step": self._evaluated_step,
            "final": self.final,
            "wall_time_s": self.totals()["perf/wall_time_s"],
            "random": self.world.gather([state.hex() for state in self._random()]),
        }

    def restore(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        checkpoints.load(checkpoint, self.entries())
        progress = checkpoint.progress
        self.step = checkpoint.step
        self.optimizer.updates = progress["updates"]
        self._meter.restore(progress["meter"])
        self.evaluations = [float(loss) for loss in progress["evaluations"]]
        self.final = {name: float(value) for name, value in progress["final"].items()}
        self._evaluated_step = int(progress["evaluated_step"])
        self._trained_s = float(progress["wall_time_s"])
        if checkpoint.world_size == self.world.size:
            self._set_random([bytes.fromhex(text) for text in progress["random"][self.world.rank]])

    def _random(self) -> list[bytes]:
        """States of this process's generators. No module draws from them today; a method that does must resume too."""
        states = [torch.get_rng_state()]
        if self.world.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.world.device))
        return [bytes(state.numpy()) for state in states]

    def _set_random(self, states: list[bytes]) -> None:
        tensors = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
        torch.set_rng_state(tensors[0])
        if self.world.device.type == "cuda" and len(tensors) > 1:
            torch.cuda.set_rng_state(tensors[1], self.world.device)
