"""One server that is started here: with another port where its was taken, and its last words."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from paceline.engines.server import (
    Launcher,
    Server,
    ServerCommand,
    last_words,
    wait_until_healthy,
)
from paceline.errors import EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES = 3
"""Ports that are tried: another program may take one just before the server does."""
PORT_TAKEN = ("address already in use", "port is already in use", "is not available")


class OwnedServer:
    """A place for a server: started, looked after, ended; then perhaps started anew."""

    def __init__(self, name: str, launcher: Launcher, *, timeout_s: float, folder: Path) -> None:
        """name: for messages. timeout_s: for a start. folder: of its log."""
        self.name = name
        self._launcher, self._timeout_s, self._folder = launcher, timeout_s, folder
        self._server: Server | None = None
        self._where = ""

    async def start(
        self,
        command: ServerCommand,
        make: Callable[[str], T],
        look: Callable[[T], Awaitable[object]],
    ) -> T:
        """What is made of the server's url, when a look at it is well. What is left of an earlier
        server is ended before.

        look: raises LostServerError while the server is starting. Raises EngineError with the
        server's own last words.
        """
        for attempt in range(TRIES):
            await self.stop()
            try:
                return await self._start(command, make, look)
            except EngineError as error:
                taken = any(words in str(error).lower() for words in PORT_TAKEN)
                if not taken or attempt == TRIES - 1:
                    raise
                logger.warning("%s: its port was taken; trying another", self.name)
        raise AssertionError("not reached")

    async def _start(
        self,
        command: ServerCommand,
        make: Callable[[str], T],
        look: Callable[[T], Awaitable[object]],
    ) -> T:
        logger.info("%s: starting", self.name)
        server = self._server = await self._launcher.start(command)
        made = make(server.url)
        self._where = f"\nIts log: {self._folder / command.name}.log"
        try:
            await wait_until_healthy(
                server,
                lambda: look(made),
                name=self.name,
                timeout_s=self._timeout_s,
                where=self._where,
            )
        except BaseException:
            await self.stop()
            raise
        logger.info("%s: ready at %s", self.name, server.url)
        return made

    async def problem(self) -> str | None:
        """How its process ended, with its last words; None while it runs."""
        server = self._server
        if server is None:
            return f"{self.name} does not run"
        if (end := await server.ended()) is None:
            return None
        return f"{self.name} {end}: {last_words(await server.last_output())}{self._where}"

    async def stop(self) -> None:
        """Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.aclose()
