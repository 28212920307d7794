"""A process in which reading files must stay reading: no connection, no unpickling, no code, no programs.

``run_guarded`` starts a Python process, lets it import the libraries, and then watches it with an audit hook:
whatever is forbidden is recorded and prevented. Libraries may swallow the exception; the record stays.
Limits on CPU time and memory are the kernel's and count from the moment the guard is on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOSTILE = "ANISO_HOSTILE"
"""Text that every planted program carries, so that compiling one is noticed wherever it comes from."""
_NEVER = (
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind",
    "urllib.Request", "http.client.connect", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec",
    "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn", "webbrowser.open",
)  # fmt: skip
LIBRARIES = """
import aniso.models, aniso.vectors, aniso.compose, aniso.learn.heads, aniso.data, aniso.experiments.banks
import torch, transformers, timm, open_clip, open_clip.tokenizer, tokenizers, huggingface_hub, safetensors
import transformers.models.auto.tokenization_auto, transformers.models.auto.modeling_auto
"""


class ForbiddenError(BaseException):
    """Not an Exception, so that few handlers swallow it."""


@dataclass
class Report:
    """What a guarded process did."""

    violations: list[str] = field(default_factory=list)
    result: Any = None
    cpu_seconds: float = 0.0
    memory_mb: float = 0.0
    """Growth of the resident memory at its peak."""
    returncode: int = 0
    stderr: str = ""

    @property
    def finished(self) -> bool:
        """Whether the process came to its end, within its limits and without an error."""
        return self.returncode == 0


def run_guarded(
    body: str,
    given: Any = None,
    *,
    root: Path,
    canaries: tuple[Path, ...] = (),
    cpu_seconds: int = 120,
    memory_mb: int | None = None,
    libraries: str = LIBRARIES,
) -> Report:
    """Run ``body``, which finds ``given`` and leaves ``result``, both JSON.

    ``root`` is the directory with the strangers' files: no code below it may be compiled, imported or loaded.
    ``canaries`` are files that must not even be opened; ``libraries`` are imported before the watch begins.
    """
    out = root / "guard-report.json"
    job = {
        "body": textwrap.dedent(body),
        "libraries": libraries,
        "given": given,
        "root": str(root),
        "canaries": [str(path) for path in canaries],
        "cpu": cpu_seconds,
        "memory": memory_mb,
        "out": str(out),
    }
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "ANISO_OFFLINE")}
    home = root / "guard-home"
    environment |= {"HF_HOME": str(home), "ANISO_CACHE": str(home / "aniso"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        timeout=600,
        check=False,
    )
    said = json.loads(out.read_text()) if out.exists() else {}
    return Report(**said, returncode=done.returncode, stderr=done.stderr[-4000:])


class Guard:
    """An audit hook that can be switched on once everything is imported."""

    def __init__(self, root: str, canaries: list[str]) -> None:
        self.root, self.canaries = root, {os.path.realpath(path) for path in canaries}
        self.on, self.violations = False, []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and (event in _NEVER or self._is_code(event, args)):
            self.forbid(f"{event} {str(args)[:200]}")

    def forbid(self, what: str) -> None:
        self.on = False  # describing it must not be watched
        try:
            self.violations.append(what)
        finally:
            self.on = True
        raise ForbiddenError(what)

    def _is_code(self, event: str, args: tuple[Any, ...]) -> bool:
        """Whether an event is about a program from a file, or opens a file that nothing may open."""
        if event == "open":
            return isinstance(args[0], str) and args[0] in self.canaries
        if event == "compile":
            return self._is_hostile(args[0]) or self._below(args[1])
        if event == "exec":
            return self._below(getattr(args[0], "co_filename", "")) or self._is_hostile(_texts(args[0]))
        if event == "import":
            return self._below(args[1])  # an extension module; others are compiled
        return event == "ctypes.dlopen" and self._below(args[0])

    def _below(self, path: object) -> bool:
        return isinstance(path, str) and path.startswith(self.root)

    @staticmethod
    def _is_hostile(source: object) -> bool:
        source = source.decode(errors="replace") if isinstance(source, bytes) else source
        return isinstance(source, str) and HOSTILE in source


def _texts(code: object) -> str:
    parts = (*getattr(code, "co_consts", ()), *getattr(code, "co_names", ()))
    return " ".join(part for part in parts if isinstance(part, str))


def _forbid_unpickling(guard: Guard) -> None:
    """Audit hooks see the classes of a pickle; these see the attempt, also of one without any."""
    import pickle

    import torch

    def refuse(name: str) -> Any:
        return lambda *args, **kwargs: guard.forbid(name)

    torch.load = torch.serialization.load = refuse("torch.load")
    pickle.load, pickle.loads = refuse("pickle.load"), refuse("pickle.loads")
    pickle.Unpickler = refuse("pickle.Unpickler")


def _limit(cpu: int, memory: int | None) -> None:
    import resource

    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used + cpu, used + cpu + 5))
    if memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGESIZE") + (memory << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _main() -> None:
    import contextlib
    import resource

    job = json.load(sys.stdin)
    exec(job["libraries"], {})  # noqa: S102
    code = compile(job["body"], "<guarded>", "exec")
    guard = Guard(job["root"], job["canaries"])
    _forbid_unpickling(guard)
    _limit(job["cpu"], job["memory"])
    before = resource.getrusage(resource.RUSAGE_SELF)
    names: dict[str, Any] = {"given": job["given"], "result": None}
    guard.on = True
    with contextlib.suppress(ForbiddenError):
        exec(code, names)  # noqa: S102
    guard.on = False
    after = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        "violations": guard.violations,
        "result": names["result"],
        "cpu_seconds": sum(after[:2]) - sum(before[:2]),
        "memory_mb": (after.ru_maxrss - before.ru_maxrss) / 1024,
    }
    Path(job["out"]).write_text(json.dumps(report))


if __name__ == "__main__":
    sys.path.pop(0)  # the helpers beside this file must not stand for installed packages
    _main()
