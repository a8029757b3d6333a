"""A real Slurm on one host for tests: several nodes with fake GPUs, accounting, preemption, limits.

Started by the fixtures in ``conftest`` (``python tests/slurm/cluster.py DIR`` by hand). Needs root and Debian's
packages slurm-wlm, slurm-wlm-mysql-plugin, slurmdbd, munge, mariadb-server. Everything lives in one folder, on loopback
and on ports of its own; only processes that it started are ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "sacctmgr", "sbatch", "munged", "mariadbd", "mariadb-install-db")
TRUNCATE = {"capture_output": True, "text": True}


def missing_programs() -> list[str]:
    """Programs that a cluster needs and that are not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on; consecutive ones, since nodes take a range."""
    for base in range(21_000, 29_000, 37):
        sockets: list[socket.socket] = []
        try:
            for port in range(base, base + count):
                one = socket.socket()
                sockets.append(one)
                one.bind(("127.0.0.1", port))
            return list(range(base, base + count))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise RuntimeError("no free ports")


@dataclass
class Cluster:
    """A cluster in ``folder``; ``start`` and ``stop`` it, or end and restart single daemons."""

    folder: Path
    nodes: int = 4
    cpus: int = 4
    memory_mib: int = 4000
    gpus: int = 2
    max_array: int = 1001
    node_timeout_s: int = 15
    accounting: bool = True
    enforce: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)

    @property
    def conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for clients of this cluster."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "SLURM_CONF": str(self.conf), "PATH": kept.get("PATH", "") + ":/usr/sbin:/sbin"}

    def start(self) -> None:
        """From nothing to idle nodes."""
        for name in ("etc", "log", "state", "munge", "dev", "spool", "db"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.ports = free_ports(4 + self.nodes)
        for index in range(self.gpus):
            device = self.folder / "dev" / f"nvidia{index}"
            if not device.exists():  # Slurm binds GPUs that are character devices; a twin of /dev/null will do
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        self._write_configuration()
        self._start_munge()
        if self.accounting:
            self._start_accounting()
        self.start_controller()
        for index in range(1, self.nodes + 1):
            self.start_node(f"n{index}")
        self.wait(lambda: self._idle() >= self.nodes, 30, "idle nodes")

    def stop(self) -> None:
        """End everything that was started here, jobs first."""
        if self._alive("slurmctld"):
            self.run("scancel", "-u", "root", check=False)
            with contextlib.suppress(TimeoutError):
                self.wait(lambda: not self.run("squeue", "-h", check=False).strip(), 10, "an empty queue")
        self._end_stray_jobs()
        nodes = [name for name in self.processes if name.startswith("slurmd-")]
        for name in [*nodes, "slurmctld", "slurmdbd", "mariadbd", "munged"]:
            self.end(name, wait=name not in nodes)
        for name in nodes:
            self.end(name)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM, wait: bool = True) -> None:
        """End one daemon."""
        process = self.processes.get(name)
        if process is None or process.poll() is not None:
            return
        process.send_signal(number)
        if wait:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, *command: str, check: bool = True, timeout: float = 30) -> str:
        """Run a client command; its standard output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout

    def wait(self, ready: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll until ``ready``; ``TimeoutError`` names what was waited for."""
        end_s = time.monotonic() + limit_s
        while not ready():
            if time.monotonic() > end_s:
                raise TimeoutError(f"no {what} within {limit_s} s; see {self.folder / 'log'}")
            time.sleep(0.1)

    def start_controller(self) -> None:
        self._spawn("slurmctld", "slurmctld", "-D")
        self.wait(lambda: "UP" in self.run("scontrol", "ping", check=False), 30, "answer of slurmctld")

    def start_node(self, name: str) -> None:
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        self._spawn(f"slurmd-{name}", "slurmd", "-D", "-N", name)

    def lose_node(self, name: str) -> None:
        """End a node's daemon at once; what it started goes on unseen, as on a node that is out of touch."""
        self.end(f"slurmd-{name}", signal.SIGKILL)

    def _idle(self) -> int:
        return len(self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N", check=False).split())

    def _alive(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def _spawn(self, name: str, *command: str) -> None:
        if self._alive(name):
            return
        log = (self.folder / "log" / f"{name}.out").open("ab")
        self.processes[name] = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        log.close()

    def _end_stray_jobs(self) -> None:
        """End processes of jobs of this cluster that their daemons did not end."""
        mark = f"SLURM_CONF={self.conf}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                ours = mark in environment and any(word.startswith(b"SLURM_JOB_ID=") for word in environment)
                if ours or (mark in environment and (entry / "cmdline").read_bytes().startswith(b"slurmstepd")):
                    os.kill(int(entry.name), signal.SIGKILL)

    def _start_munge(self) -> None:
        key = self.folder / "munge" / "munge.key"
        if not key.exists():
            key.write_bytes(os.urandom(128))
            key.chmod(0o600)
        self._spawn(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self._socket}",
            f"--pid-file={self.folder}/munge/pid", f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={self.folder}/munge/seed",
        )  # fmt: skip
        self.wait(lambda: self._munge_works(), 10, "munge")

    def _munge_works(self) -> bool:
        done = subprocess.run(["munge", "-S", self._socket, "-n"], capture_output=True, check=False)
        return done.returncode == 0

    @property
    def _socket(self) -> str:
        return str(self.folder / "munge" / "socket")

    def _start_accounting(self) -> None:
        data, sock = self.folder / "db", self.folder / "db" / "socket"
        if not (data / "mysql").exists():
            subprocess.run(
                ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root",
                 "--auth-root-authentication-method=normal", "--skip-test-db"],
                check=True, capture_output=True,
            )  # fmt: skip
        self._spawn(
            "mariadbd", "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={sock}",
            "--bind-address=127.0.0.1", f"--port={self.ports[0]}", "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0",
            "--skip-name-resolve", f"--log-error={self.folder}/log/mariadbd.log", f"--pid-file={data}/pid",
        )  # fmt: skip
        query = ("create database if not exists slurm_acct_db; create user if not exists slurm@'127.0.0.1' identified "
                 "by 'slurm'; grant all on slurm_acct_db.* to slurm@'127.0.0.1';")  # fmt: skip
        sql = ["mariadb", "--no-defaults", "-uroot", "-S", str(sock), "-e", query]
        self.wait(lambda: subprocess.run(sql, capture_output=True, check=False).returncode == 0, 30, "database")
        self._spawn("slurmdbd", "slurmdbd", "-D")
        self.wait(lambda: self._ok("sacctmgr", "-n", "-i", "show", "cluster"), 60, "slurmdbd")
        if "lab" not in self.run("sacctmgr", "-n", "show", "cluster", "format=cluster"):
            self.run("sacctmgr", "-i", "-Q", "add", "cluster", "lab")
            self.run("sacctmgr", "-i", "-Q", "add", "account", "lab", check=False)
            self.run("sacctmgr", "-i", "-Q", "add", "user", "root", "account=lab", check=False)

    def _ok(self, *command: str) -> bool:
        try:
            done = subprocess.run(command, env=self.environment, capture_output=True, timeout=5, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _write_configuration(self) -> None:
        root, host = self.folder, socket.gethostname().split(".")[0]
        first = self.ports[4]
        account = [
            "AccountingStorageType=accounting_storage/slurmdbd", "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={self.ports[3]}", f"AccountingStoragePass={self._socket}",
            "AccountingStorageTRES=gres/gpu",
        ]  # fmt: skip
        if self.enforce:
            account.append(f"AccountingStorageEnforce={self.enforce}")
        if not self.accounting:
            account = ["AccountingStorageType=accounting_storage/none"]
        lines = [
            "ClusterName=lab", f"SlurmctldHost={host}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
            # A requeued job waits cred_expire before it may start again: 120 s by default, 5 s at least.
            "AuthType=auth/munge", f"AuthInfo=socket={self._socket},cred_expire=5", "CredType=cred/munge",
            f"SlurmctldPort={self.ports[1]}", f"SlurmdPort={self.ports[2]}",
            f"StateSaveLocation={root}/state", f"SlurmdSpoolDir={root}/spool/%n",
            f"SlurmctldPidFile={root}/state/slurmctld.pid", f"SlurmdPidFile={root}/spool/%n.pid",
            f"SlurmctldLogFile={root}/log/slurmctld.log", f"SlurmdLogFile={root}/log/slurmd-%n.log",
            "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny", "MailProg=/bin/true", "SwitchType=switch/none",
            "MpiDefault=none", "ReturnToService=2",
            "SlurmdParameters=config_overrides",  # nodes may claim more than this host has
            f"SlurmctldTimeout=30\nSlurmdTimeout={self.node_timeout_s}\nMessageTimeout=10\nKillWait=5\nMinJobAge=300",
            "InactiveLimit=0\nWaittime=0\nCompleteWait=0", f"MaxArraySize={self.max_array}", "MaxJobCount=10000",
            "JobRequeue=1", "SchedulerType=sched/backfill",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=100000,bf_interval=3",
            "PriorityType=priority/basic", "SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU_Memory",
            "DefMemPerCPU=200",  # else a job takes a node's whole memory
            "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", "GresTypes=gpu", *account,
            "JobCompType=jobcomp/none", "JobAcctGatherType=jobacct_gather/none", "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            f"NodeName=n[1-{self.nodes}] NodeHostname={host} NodeAddr=127.0.0.1 "
            f"Port=[{first}-{first + self.nodes - 1}] "
            f"CPUs={self.cpus} RealMemory={self.memory_mib} Gres=gpu:h100:{self.gpus} State=UNKNOWN",
            "PartitionName=main Nodes=ALL Default=YES MaxTime=2-00:00:00 PriorityTier=10 PreemptMode=OFF",
            "PartitionName=scavenge Nodes=ALL MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=5",
        ]  # fmt: skip
        self.conf.write_text("\n".join(lines) + "\n", encoding="utf-8")
        (root / "etc" / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=n[1-{self.nodes}] Name=gpu Type=h100 "
            f"File={root}/dev/nvidia[0-{self.gpus - 1}]\n",
            encoding="utf-8",
        )
        (root / "etc" / "cgroup.conf").write_text(  # else slurmd asks for cgroup/v2 and dbus
            "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n", encoding="utf-8"
        )
        dbd = root / "etc" / "slurmdbd.conf"
        dbd.touch(mode=0o600)
        dbd.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={self._socket}\nDbdHost=localhost\nDbdAddr=127.0.0.1\n"
            f"DbdPort={self.ports[3]}\nSlurmUser=root\nLogFile={root}/log/slurmdbd.log\nPidFile={root}/state/slurmdbd.pid\n"
            f"StorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\nStoragePort={self.ports[0]}\n"
            "StorageUser=slurm\nStoragePass=slurm\nStorageLoc=slurm_acct_db\n",
            encoding="utf-8",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a throw-away Slurm in a folder until interrupted.")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    cluster = Cluster(options.folder.resolve())
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # set here: a shell starts background jobs with SIGINT ignored
        signal.signal(number, lambda *_: over.set())
    begun_s = time.monotonic()
    try:
        cluster.start()
        print(f"up in {time.monotonic() - begun_s:.1f} s; export SLURM_CONF={cluster.conf}", flush=True)
        while not over.wait(1.0):
            pass
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
