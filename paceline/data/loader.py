"""From the `[data]` block to prompt sets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paceline.data.files import read_file
from paceline.data.gym import read_task
from paceline.data.huggingface import read_dataset
from paceline.data.prompts import Fit, PromptSet, gather
from paceline.data.python import read_function
from paceline.data.rows import RawRow
from paceline.data.sources import (
    DataConfig,
    FileSource,
    HuggingFaceSource,
    PythonSource,
    ReasoningGymSource,
    SourceConfig,
    Table,
)
from paceline.errors import ConfigError


def load_data(
    config: DataConfig, *, base: Path, fit: Fit | None = None, supervised: bool = False
) -> tuple[PromptSet, ...]:
    """All sources of `[data]`, in order; parameters and errors as of `load_source`.

    Raises:
        ConfigError: if there is no source.
    """
    if not config.all_sources:
        raise ConfigError("[data] names no prompts: set data.path or [[data.sources]]")
    return tuple(
        load_source(source, base=base, fit=fit, rules=config, supervised=supervised)
        for source in config.all_sources
    )


def load_source(
    source: SourceConfig,
    *,
    base: Path,
    fit: Fit | None = None,
    rules: DataConfig | None = None,
    supervised: bool = False,
) -> PromptSet:
    """Read one source.

    Args:
        source: its block of the run file.
        base: folder that relative paths start from.
        fit: looks at the tokens of each prompt; None: nothing is filtered.
        rules: template, system message, length limit and treatment of bad rows.
        supervised: rows must have a completion (`supervised_pair`). Without it, messages that end
            with the assistant's are bad rows.

    Raises:
        DataError: if the source can not be read, has bad rows that are not to be skipped, or
            leaves no prompt.
        ConfigError: if it names something that is not there.
        MissingExtraError: if it needs a package that is not installed.
    """
    return gather(
        _rows(source, base),
        name=source.label,
        origin=source.path if isinstance(source, FileSource) else source.label,
        columns=source if isinstance(source, Table) else Table(),
        rules=rules or DataConfig(),
        fit=fit,
        supervised=supervised,
        weight=source.weight,
    )


def _rows(source: SourceConfig, base: Path) -> Iterable[RawRow]:
    match source:
        case FileSource():
            return read_file(base / Path(source.path).expanduser(), source.path, source.format)
        case HuggingFaceSource():
            return read_dataset(source, base)
        case ReasoningGymSource():
            return read_task(source)
        case PythonSource():
            return read_function(source, base)
