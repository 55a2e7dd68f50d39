"""The command line: `paceline train run.toml`.

Exit codes: 0 done; 1 the run failed; 2 a run file, data or an argument is wrong; 130 Ctrl-C.
"""

from paceline.cli.entry import main

__all__ = ["main"]
