"""The command line: one small file per command, no logic; heavy packages are imported inside commands."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import secrets
import sys
import tempfile
import traceback
from pathlib import Path

from aniso.cli.signals import Ended, ending_cleanly
from aniso.errors import AnisoError, InputError, ResourceError, StoppedError, UsageError, printable
from aniso.progress import set_progress

_NO_MEMORY = (
    "allocate memory",
    "out of memory",
    "failed to map segment",
    "bad_alloc",
    "can't start new thread",
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; no error leaves a traceback on the terminal."""
    args = sys.argv[1:] if argv is None else argv
    _escape_what_cannot_be_printed()
    set_progress(False)  # commands show progress themselves
    try:
        with ending_cleanly():
            from aniso.cli.app import app

            code = app(args=args, prog_name="aniso", standalone_mode=False)
            return code if isinstance(code, int) else 0
    except Ended as e:
        return _report(_stopped(e), as_json="--json" in args)
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # typer and rich make it an exit of their own
            return _pipe_closed()
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        return _pipe_closed()
    except Exception as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            print(e.format_message(), file=sys.stderr)  # type: ignore[attr-defined]  # noqa: T201
            return 2
        known = _user_error(e)
        return _report(known, as_json="--json" in args) if known else _bug()


def _stopped(request: Ended) -> StoppedError:
    return StoppedError(
        "STOPPED", "the command was stopped", signal=request.number, fix="run it again, or resume it"
    )


def _pipe_closed() -> int:
    """Exit without an error when the reader of a pipe has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _user_error(error: Exception) -> AnisoError | None:
    """Return the error as one that a user can act on, or None if it is a bug."""
    if isinstance(error, AnisoError):
        return error
    if hasattr(error, "format_message"):  # the command line's own: an unknown option, a missing argument
        message = " ".join(str(error.format_message()).split())
        return UsageError("USAGE", message or "nothing to do", fix="aniso --help")
    if _lacks_memory(error):
        return ResourceError(
            "OUT-MEMORY",
            "there is not enough memory",
            reason=printable(error, 200),
            fix="close other programs, or raise the limit (ulimit -v, or the container's)",
        )
    if isinstance(error, OSError):
        return InputError(
            "FILE-ACCESS",
            f"'{printable(error.filename or 'a file')}' cannot be used",
            reason=error.strerror or str(error),
            fix="check the path",
        )
    return None


def _lacks_memory(error: BaseException) -> bool:
    """Return True if memory ran out, as Python, torch, C++ or the loader of libraries put it."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if isinstance(error, SystemError) and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "exception" in str(
            error
        )  # "error return without exception set": the exception found no memory
    if isinstance(error, RuntimeError | ImportError | OSError):
        text = str(error)
        if any(words in text for words in _NO_MEMORY):
            return True
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return before is not None and _lacks_memory(before)


def _escape_what_cannot_be_printed() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def entry() -> None:
    """Entry point of the console script."""
    sys.exit(main())


def _report(error: AnisoError, *, as_json: bool) -> int:
    text = json.dumps(error.to_json()) if as_json else str(error)
    print(text, file=sys.stderr)  # noqa: T201
    return error.exit_code


def _bug() -> int:
    if os.environ.get("ANISO_DEBUG"):
        raise
    report = secrets.token_hex(4)
    log = Path(tempfile.gettempdir()) / f"aniso-{report}.log"
    log.write_text(traceback.format_exc())
    print(  # noqa: T201
        f"error[BUG]: this is a bug in aniso, report {report}\n"
        f"  log       {log}\n"
        f"  fix       please report it with the log and the command that you ran",
        file=sys.stderr,
    )
    return 1
