"""One process, two with DDP, two with FSDP2: the same curve; and a checkpoint that any of them can go on from."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from scaling import peers, shards
from scaling.checkpoint import Checkpoints
from scaling.config.training import RunSettings
from scaling.config.tree import RunConfig, to_dict
from scaling.distributed import World, join
from scaling.errors import ConfigError, ProcessLost
from scaling.identity import run_key
from scaling.record import RunFolder
from scaling.resolve import resolve
from scaling.stop import STOP
from scaling.tracking.standing import standing
from scaling.train import train

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5  # nat; summation orders differ


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(
    config: RunConfig, out: Path, folder: Path, *, processes: int = 2, slurm: bool = False
) -> list[subprocess.Popen[str]]:
    """Start ``scaling train`` as torchrun (or srun) would, one process a rank."""
    path = folder / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump(to_dict(config)), encoding="utf-8")
    command = [sys.executable, "-m", "scaling", "train", str(path), "--out", str(out), "--json"]
    started = []
    port = str(free_port())
    for rank in range(processes):
        place = (
            {
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": str(processes),
                "SLURM_LOCALID": str(rank),
                "SLURM_NNODES": "1",
                "MASTER_PORT": port,
            }
            if slurm
            else {
                "RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
        )
        env = {**os.environ, **place, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        started.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return started


def finish(processes: list[subprocess.Popen[str]], status: int = 0) -> dict[str, Any]:
    outputs = [process.communicate(timeout=240) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == status, errors
    assert all(not out for out, _ in outputs[1:]), "only the first process prints"
    result: dict[str, Any] = json.loads(outputs[0][0])
    return result


def losses(config: RunConfig, out: Path) -> dict[tuple[int, str], float]:
    folder = RunFolder(out / run_key(resolve(config)))
    names = ("train/loss", "train/grad_norm", "val/loss", "val/loss_se", "val/loss_ema", "val/loss/a")
    return {(p.step, name): p.metrics[name] for p in folder.points() for name in names if name in p.metrics}


@pytest.fixture
def config(store: Path, make_config: Callable[..., RunConfig]) -> RunConfig:
    # a batch that two processes cannot halve, micro-batches that do not divide it, and everything else switched on
    return make_config(
        store,
        data={"batch_size": 7, "micro_batch_size": 2, "document_masking": True},
        optimizer={"ema_decay": 0.9, "z_loss": 1e-4, "skip_nonfinite": True, "grad_clip": 0.5},
        model={"residual": {"method": "mhar", "heads": 4}},
        run={"checkpoint_every_steps": 5, "permanent_every_steps": 5},
    )


def with_parallel(config: RunConfig, parallel: str) -> RunConfig:
    from dataclasses import replace

    return replace(config, run=replace(config.run, parallel=parallel))  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_process_is_two_with_ddp_is_two_with_fsdp2(config: RunConfig, tmp_path: Path) -> None:
    train(config, out=tmp_path / "one")
    expected = losses(config, tmp_path / "one")
    assert len(expected) > 20
    final = tmp_path / "one" / run_key(resolve(config)) / "checkpoints" / "final" / "model.safetensors"
    whole = load_file(final)
    for parallel in ("ddp", "fsdp2"):
        spread = with_parallel(config, parallel)
        end = finish(launch(spread, tmp_path / parallel, tmp_path, slurm=parallel == "ddp"))
        assert end["status"] == "done" and end["run_key"] == run_key(resolve(config))
        found = losses(config, tmp_path / parallel)
        assert found.keys() == expected.keys()
        assert max(abs(found[key] - expected[key]) for key in expected) < TOLERANCE
        weights = load_file(Path(end["folder"]) / "checkpoints" / "final" / "model.safetensors")
        assert weights.keys() == whole.keys()
        # AdamW divides by the gradient's own size, which turns rounding of tiny gradients into rounding of updates
        assert max(float((weights[name] - whole[name]).abs().max()) for name in whole) < 1e-3

    # a checkpoint of two sharded processes is continued by one, and by two with DDP
    for parallel, source in (("none", "fsdp2"), ("ddp", "fsdp2")):
        out = tmp_path / f"{source}-{parallel}"
        run = out / run_key(resolve(config))
        (run / "checkpoints").mkdir(parents=True)
        origin = tmp_path / source / run.name
        (origin / "checkpoints" / "step-00000005").rename(run / "checkpoints" / "step-00000005")
        again = with_parallel(config, parallel)
        if parallel == "none":
            train(again, out=out)
            (run / "checkpoints" / "step-00000005").rename(origin / "checkpoints" / "step-00000005")
        else:
            finish(launch(again, out, tmp_path))
        assert [attempt.resumed_from_step for attempt in RunFolder(run).attempts()] == [5]
        found = losses(config, out)
        late = {key: value for key, value in found.items() if key[0] > 6}  # the line of step 6 began before the cut
        assert late and max(abs(late[key] - expected[key]) for key in late) < TOLERANCE


@pytest.mark.slow
def test_experts_on_one_process_and_on_two(store: Path, make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Routed experts too give the same losses; biases stand still, for a load's sign can turn on one rounding."""
    experts = {"num_experts": 4, "top_k": 2, "d_expert": 16, "bias_update_rate": 0.0}
    config = make_config(store, data={"batch_size": 7, "micro_batch_size": 2}, model={"moe": experts})
    train(config, out=tmp_path / "one")
    expected = losses(config, tmp_path / "one")
    for parallel in ("ddp", "fsdp2"):
        finish(launch(with_parallel(config, parallel), tmp_path / parallel, tmp_path))
        found = losses(config, tmp_path / parallel)
        assert found.keys() == expected.keys()
        assert max(abs(found[key] - expected[key]) for key in expected) < TOLERANCE


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_of_them(
    store: Path, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    long = make_config(store, schedule={"steps": 100_000}, run={"parallel": "ddp", "log_every_steps": 10})
    processes = launch(long, tmp_path / "out", tmp_path)
    folder = RunFolder(tmp_path / "out" / run_key(resolve(long)))
    deadline = time.monotonic() + 120
    while not list(folder.points()):
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGUSR2)
    end = finish(processes, status=1)
    assert end["status"] == "cancelled" and "a signal to another process" in end["reason"]
    assert (folder.path / "checkpoints" / f"step-{end['step']:08d}" / "complete.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "parallel"), [(0, "ddp"), (1, "fsdp2")])
def test_a_killed_process_ends_the_others_with_one_line(
    killed: int, parallel: str, store: Path, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The line says what happened and where the run goes on; the first process, where it lives, records the failure."""
    settings = {"parallel": parallel, "log_every_steps": 5, "checkpoint_every_steps": 10}
    config = make_config(store, schedule={"steps": 100_000}, run=settings)
    processes = launch(config, tmp_path / "out", tmp_path)
    folder = RunFolder(tmp_path / "out" / run_key(resolve(config)))
    deadline = time.monotonic() + 120
    while not list((folder.path / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline, "it never saved a checkpoint"
        time.sleep(0.05)
    processes[killed].kill()
    left = 1 - killed
    out, errors = processes[left].communicate(timeout=60)
    assert processes[left].returncode == 1 and not out
    shown = [line for line in errors.splitlines() if not line.startswith(("step ", "INFO ", "d16-"))]
    assert len(shown) == 1, errors
    steps = [int(path.name.removeprefix("step-")) for path in (folder.path / "checkpoints").glob("step-*")]
    line = (
        rf"rank {left} of 2 ends: another process of the run was lost \(.*(reset|closed) by peer\); see the other "
        rf"ranks' logs for the reason, then run again: it goes on from its last checkpoint, of step {max(steps)}"
    )
    assert re.fullmatch(f"error: {line}", shown[0])
    processes[killed].communicate()
    end = folder.end()
    if left == 0:
        assert end is not None and end.status == "failed" and re.fullmatch(f"ProcessLost: {line}", end.reason)
    else:
        assert end is None, "who has no lease writes no record"
        assert standing(folder, folder.attempts(), None, None).status == "failed", "nobody asked it to leave"
    assert RunFolder(folder.path).attempts()[-1].attempt == 1
    STOP.signal = signal.SIGTERM  # the next start leaves at once, and has taken the run up by then
    try:
        assert train(with_parallel(config, "none"), out=tmp_path / "out").step == max(steps)
    finally:
        STOP.signal = None


def test_a_lost_process_is_told_from_other_errors(tmp_path: Path) -> None:
    """By the libraries' words; a run on one process has no other to lose."""
    reset = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. GLHF!")
    own = (RuntimeError("shape mismatch"), ValueError("Broken pipe"), BrokenPipeError("Broken pipe"))
    unknown = r"rank 1 of 2 ends: .*\(Connection reset by peer\);.* or starts over where there is none$"
    with pytest.raises(ProcessLost, match=unknown):
        with peers.explained(1, 2):
            raise reset
    with pytest.raises(ProcessLost, match=r"it starts over, since no checkpoint was saved yet"):
        with peers.explained(0, 2, tmp_path):
            raise torch.distributed.DistBackendError(
                "NCCL error: remote process exited, ncclRemoteError: a call failed"
            )
    for size, error in ((1, reset), *((2, error) for error in own)):
        with pytest.raises(type(error)) as caught, peers.explained(0, size):
            raise error
        assert caught.value is error


def test_processes_that_do_not_meet_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that something else listens on."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(
            ProcessLost, match=rf"rank 0 of 2 ends: the run's processes did not meet at 127.0.0.1:{port} \(EADDRINUSE\)"
        ):
            join(RunSettings(device="cpu", parallel="ddp"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_process_that_waits_for_the_others_can_be_stopped(number: signal.Signals) -> None:
    """The wait is not Python's, which would note the request and never read it."""
    port = free_port()
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_USE_AGENT_STORE"}
    alone = (
        "from scaling.config.training import RunSettings\nfrom scaling.distributed import join\n"
        "from scaling.stop import STOP\nSTOP.listen()\njoin(RunSettings(device='cpu', parallel='ddp'))"
    )
    process = subprocess.Popen([sys.executable, "-c", alone], cwd=ROOT, env={**environment, **place})
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(20) == -number
    finally:
        process.kill()
        process.wait()


def test_signals_are_requests_again_after_a_meeting() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert STOP.listen()
    try:
        with STOP.at_once():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)
        assert STOP.requested
    finally:
        STOP.forget()
    with STOP.at_once():  # where nobody listens, nothing changes
        assert signal.getsignal(signal.SIGINT) == before


def test_a_process_lost_while_a_checkpoint_is_written_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the saving thread meets is raised where the run waits for it, not logged as if training went on."""

    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")

    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: object())
    monkeypatch.setattr(torch.distributed, "all_gather_object", gone)
    monkeypatch.setattr(shards, "write", lambda folder, staged, group: None)
    checkpoints = Checkpoints(tmp_path, World(size=2), keep=1)
    checkpoints.save(1, {}, {})
    with pytest.raises(RuntimeError, match="closed by peer"):
        checkpoints.finish()


def test_initial_weights_depend_on_seed_and_name_only(store: Path, make_config: Callable[..., RunConfig]) -> None:
    from scaling.models.transformer import Transformer

    narrow = Transformer(make_config(store).model)
    deep = Transformer(make_config(store, model={"num_layers": 3}).model)
    narrow.init_weights(3)
    deep.init_weights(3)
    other = dict(deep.named_parameters())
    assert all(torch.equal(parameter, other[name]) for name, parameter in narrow.named_parameters())


def test_slurm_places_are_read_only_for_spread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert join(RunSettings(device="cpu")) == World()


def test_nodes_that_cannot_be_expanded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PROCID": "1", "NTASKS": "4", "NNODES": "2", "STEP_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        ConfigError, match=r"cannot expand SLURM_STEP_NODELIST=n\[1-2\] without scontrol; set MASTER_ADDR"
    ):
        join(RunSettings(device="cpu", parallel="ddp"))
