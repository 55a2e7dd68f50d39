"""Where the command starts, and what an error looks like."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from paceline.cli.app import app
from paceline.errors import ConfigError, DataError, PacelineError

USER_ERRORS = (ConfigError, DataError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors and `--help` exit by themselves."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        app(words, prog_name="paceline")
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error, with_traceback="--debug" in words)
    return 0


def report(error: Exception, *, with_traceback: bool) -> int:
    """Print an error once, to stderr, and return the exit code."""
    if not isinstance(error, PacelineError):
        traceback.print_exception(error)
        print(
            "\nerror: this was not expected. If the lines above point into your own code (a "
            "reward, an environment, a data source), mend it there. Otherwise please report it "
            "to the issue tracker of Paceline, with those lines, the run file and the output of "
            "`paceline --version`.",
            file=sys.stderr,
        )
        return 1
    if with_traceback:
        traceback.print_exception(error)
    else:
        print(f"error: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
    return 2 if isinstance(error, USER_ERRORS) else 1
