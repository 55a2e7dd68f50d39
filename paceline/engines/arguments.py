"""Further command-line arguments that a user gives to a server, and which of them are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.errors import ConfigError

SHORTEST_PREFIX = 6
"""`--mem-f` is understood as `--mem-fraction-static` by a server; `--tp` is a name of its own."""


def flags_of(extra: Sequence[str]) -> list[str]:
    """Without their values, in the spelling with dashes."""
    return [
        argument.partition("=")[0].replace("_", "-")
        for argument in extra
        if argument.startswith("-") and not _is_number(argument)
    ]


def refuse_own(flags: Sequence[str], own: Mapping[str, str]) -> None:
    """Raise ConfigError for what is set elsewhere: the flag -> where."""
    for flag in flags:
        name = next((name for name in own if _means(flag, name)), None)
        if name is not None:
            raise ConfigError(
                f"engine.extra_arguments: {flag} is not to be set there, but by {own[name]}"
            )


def _means(flag: str, own: str) -> bool:
    """True if the server reads the flag as `own`, or may do so."""
    return flag == own or (len(flag) > SHORTEST_PREFIX and own.startswith(flag))


def _is_number(argument: str) -> bool:
    return argument[1:2].isdigit()
