"""Run files: loading, checking and writing them. Imports no heavy library.

    run.toml + overrides --source--> plain tables --problems--> typed blocks --checks--> RunFile

All errors of a run file are found before any is raised, and raised as one `ConfigError`.
"""

from paceline.config.blocks import POLICY, SHARED, RunConfig, RunFile, locate_model
from paceline.config.load import (
    load_block,
    load_run_file,
    load_settings,
    render_run_file,
    write_run_file,
)

__all__ = [
    "POLICY",
    "SHARED",
    "RunConfig",
    "RunFile",
    "load_block",
    "load_run_file",
    "load_settings",
    "locate_model",
    "render_run_file",
    "write_run_file",
]
