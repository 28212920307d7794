"""The command line: one small file per command, no logic; heavy packages are imported inside commands."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import traceback
from pathlib import Path

from aniso.errors import AnisoError


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; no error leaves a traceback on the terminal."""
    args = sys.argv[1:] if argv is None else argv
    try:
        from aniso.cli.app import app

        app(args=args, prog_name="aniso")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except AnisoError as e:
        return _report(e, as_json="--json" in args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        # whoever read our output has gone, which is their right; keep Python from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        return _our_bug()
    return 0


def entry() -> None:
    """Where the console script begins."""
    sys.exit(main())


def _report(error: AnisoError, *, as_json: bool) -> int:
    text = json.dumps(error.to_json()) if as_json else str(error)
    print(text, file=sys.stderr)  # noqa: T201
    return error.exit_code


def _our_bug() -> int:
    if os.environ.get("ANISO_DEBUG"):
        raise
    report = secrets.token_hex(4)
    log = Path(tempfile.gettempdir()) / f"aniso-{report}.log"
    log.write_text(traceback.format_exc())
    print(  # noqa: T201
        f"error[BUG]: this is a fault of aniso's own, report {report}\n"
        f"  log       {log}\n"
        f"  fix       please send the log with the command that you ran",
        file=sys.stderr,
    )
    return 1
