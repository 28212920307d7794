"""Several processes for one run: they start together, share the bank and every batch, and end together.

``torchrun`` starts them, or ``launch`` on one machine. All make the same calls; only the first writes and
prints. The others work in copies of the run's directory, which they remove.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from aniso.errors import ResourceError, UsageError, printable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from aniso.experiments.settings.setting import Setting

_STORE = "ANISO_PROCESS_STORE"
_PATIENCE = 20.0  # seconds that processes have to end by themselves when one of them has failed


@final
@dataclass(frozen=True)
class Processes:
    """The processes of one run, as one of them sees them."""

    rank: int
    world: int
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def from_environment(cls) -> Processes | None:
        """Return the processes that this one was started with; None if it is alone."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        given = [os.environ.get(name, "") for name in names]
        if not all(given) or not (os.environ.get(_STORE) or os.environ.get("MASTER_ADDR")):
            return None
        try:
            processes = cls(*map(int, given))
        except ValueError:
            raise UsageError(
                "USAGE",
                "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers",
                found=printable(", ".join(f"{n}={v}" for n, v in zip(names, given, strict=True))),
                fix="start the command with torchrun, or unset them",
            ) from None
        return processes if processes.world > 1 else None

    @property
    def leads(self) -> bool:
        """True for the process that writes and prints."""
        return self.rank == 0

    @contextlib.contextmanager
    def joined(self, device: str | None) -> Iterator[DeviceMesh]:
        """Connect to the other processes; yields the mesh that they share a bank over."""
        import torch
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        kind = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
        if kind == "cuda":
            torch.cuda.set_device(self.local_rank)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.local_world))
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        store = os.environ.get(_STORE)
        place = f"file://{store}" if store else "env://"
        distributed.init_process_group(backend, init_method=place, rank=self.rank, world_size=self.world)
        if store:
            threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
        with self._silent(), _explain_lost_processes():
            yield init_device_mesh(kind, (self.world,))
            distributed.barrier()  # who leaves early would close connections that others still read from
        distributed.destroy_process_group()

    def device(self, device: str | None) -> str | None:
        """Return the device of this process: of several GPUs each has its own."""
        return f"cuda:{self.local_rank}" if device == "cuda" else device

    @contextlib.contextmanager
    def own_directory(self, directory: Path | None) -> Iterator[Path | None]:
        """Yield the run's directory for the first process, and a copy of it for others."""
        from torch import distributed

        if self.leads or directory is None:
            distributed.barrier()  # before anything in it changes
            yield directory
            return
        with tempfile.TemporaryDirectory(prefix="aniso-process-") as place:
            own = Path(place) / "run"
            if directory.is_dir():
                shutil.copytree(directory, own, symlinks=True)
            distributed.barrier()
            yield own

    @contextlib.contextmanager
    def _silent(self) -> Iterator[None]:
        """Let only the first process print; errors are printed by all."""
        if self.leads:
            yield
            return
        out, err = contextlib.redirect_stdout, contextlib.redirect_stderr
        with Path(os.devnull).open("w") as nowhere, out(nowhere), err(nowhere):
            yield


@contextlib.contextmanager
def _explain_lost_processes() -> Iterator[None]:
    """Raise PROCESS-LOST where communication fails, which is when another process has ended."""
    from torch import distributed

    try:
        yield
    except RuntimeError as e:
        if not isinstance(e, distributed.DistError) and "gloo" not in str(e):
            raise
        raise ResourceError(
            "PROCESS-LOST",
            "another process of this run has ended",
            reason=str(e).splitlines()[0][:200],
            fix="look for its error message; --resume continues from the last checkpoint",
        ) from None


def require_shareable(setting: Setting) -> None:
    """Raise an error for a method whose work is not shared by several processes."""
    if setting.method.shares_work and not setting.calibrates:
        return
    raise UsageError(
        "USAGE",
        f"several processes cannot share the work of --method {setting.method.name} with these options",
        expected="--method coefficients without --factors, or --method search; no --calibrate",
        fix="leave --devices out",
    )


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``aniso`` with arguments in several processes on this machine; returns the exit code.

    They meet over a file, so no port has to be free. When one ends with an error, the others are asked to end
    as well.
    """
    with tempfile.TemporaryDirectory(prefix="aniso-processes-") as place:
        shared = {_STORE: f"{place}/store", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        if sys.platform == "linux":  # they are all here, and the machine's own name may not resolve
            shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, "-m", "aniso", *arguments]
        workers: list[subprocess.Popen[bytes]] = []
        error_files = [Path(place) / f"process-{rank}" for rank in range(count)]
        with _forwarding(workers):
            for rank in range(count):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with error_files[rank].open("wb") as errors:
                    workers.append(
                        subprocess.Popen(
                            command,
                            env=os.environ | shared | own,
                            stdin=subprocess.DEVNULL,
                            stderr=errors if rank else None,
                            start_new_session=True,  # a Ctrl-C is forwarded, once
                        )
                    )
            first = _ended(workers)
        if first is not None and first != 0:
            sys.stderr.write(
                f"process {first + 1} of {count} failed:\n{error_files[first].read_text()[-4000:]}"
            )
        return 0 if first is None else _exit_code(workers[first].returncode)


def _ended(workers: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all processes; returns the one that failed first, of several at once the first process."""
    first: int | None = None
    deadline = 0.0
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and first is None:
            first, deadline = failed[0], time.monotonic() + _PATIENCE
        if failed and 0 in failed and codes[0] == codes[first or 0]:
            first = 0  # they failed for the same reason, and the first process has printed it
        if None not in codes:
            return first
        if first is not None and time.monotonic() > deadline:
            for worker in workers:
                worker.terminate() if time.monotonic() < deadline + _PATIENCE else worker.kill()
        time.sleep(0.05)


def _exit_code(code: int) -> int:
    """Return an exit code as shells have it, where a signal is 128 and its number."""
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _forwarding(workers: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Send requests to end to all processes, which agree on the step to stop after."""

    def forward(number: int, frame: object) -> None:
        for worker in workers:
            worker.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, forward) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent(parent: int) -> None:
    """Ask this process to end when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
