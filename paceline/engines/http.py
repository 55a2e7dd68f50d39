"""One client for all HTTP requests to servers: JSON in, JSON out, with deadlines and repetitions.

aiohttp, since an engine may have 10,000 requests open at one time: with 3,000 open, a request costs
0.5 ms of processor time here and 10 ms with httpx, whose pool goes through all connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from paceline.deadline import stop
from paceline.errors import EngineError, MissingExtraError

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

SHOWN = 400
"""Characters of a server's complaint that are passed on."""
MARKUP = re.compile(r"(?is)<(head|style|script)\b.*?</\1>|<[^>]*>")
KEEP_ALIVE_S = 3.0
"""Below the 5 s after which common servers close an idle connection: never send into a close."""
FIRST_PAUSE_S = 0.5
"""Before the first repetition; doubled for each further one."""
PARTING_S = 5.0
"""Seconds that messages of farewell, such as aborts, may take when the client closes."""


class LostServerError(EngineError):
    """A server can not be reached, did not answer in time, or failed: another one may serve."""

    def __init__(self, message: str, *, is_cut_off: bool = False) -> None:
        """is_cut_off: there was no connection, or it broke; not merely a bad or late answer."""
        super().__init__(message)
        self.is_cut_off = is_cut_off


class RefusedError(EngineError):
    """A server will never do what it was asked: status 4xx."""

    def __init__(self, message: str, status: int, text: str) -> None:
        super().__init__(message)
        self.status, self.text = status, text


class JsonClient:
    """Connections that are kept and used again, to any number of servers. Of one event loop."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        """headers: sent with every request, such as an authorization."""
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def request(
        self,
        url: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        retries: int = 0,
        method: str | None = None,
    ) -> Any:
        """What the server answers: JSON, or text if it is none.

        body: posted as JSON; absent: a GET. retries: after losses of the server. Raises
        LostServerError and RefusedError.
        """
        pause_s = FIRST_PAUSE_S
        for attempt in range(retries + 1):
            try:
                return await self._request(url, path, body, timeout_s, method)
            except LostServerError as error:
                if attempt == retries:
                    raise
                logger.warning("%s; trying again", error)
            await asyncio.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("not reached")

    def leave(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Let work go on by itself, such as an abort; its failure is only logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._left)
        return task

    def _left(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("%s", error)

    async def aclose(self) -> None:
        """Let what was left end, for a moment, and close all connections. Idempotent."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=PARTING_S)
        self._is_closed = True
        await stop(*self._tasks)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _request(
        self, url: str, path: str, body: Any, timeout_s: float, method: str | None
    ) -> Any:
        aiohttp = _aiohttp()
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        verb = method or ("GET" if data is None else "POST")
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open().request(verb, url + path, data=data, headers=headers) as response,
            ):
                status, content = response.status, await response.read()
        except TimeoutError:
            raise LostServerError(f"{url} did not answer {path} within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise LostServerError(
                f"{url} can not be reached ({reason})", is_cut_off=True
            ) from error
        return _content(f"{url} answered {path}", status, content)

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise LostServerError("the connections are closed")
        if self._session is None:
            aiohttp = _aiohttp()
            _allow_many_connections()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
            )
        return self._session


def _content(what: str, status: int, content: bytes) -> Any:
    if 200 <= status < 300:
        try:
            return json.loads(content) if content else None
        except ValueError:
            return content.decode("utf-8", "replace")
    text = _complaint(content)
    message = f"{what} with status {status}" + (f": {text}" if text else "")
    if status >= 500 or status in (408, 429):
        raise LostServerError(message)
    raise RefusedError(message, status, text)


def _complaint(content: bytes) -> str:
    """What a server says is wrong, wherever in its answer it says so."""
    text = content.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and key in found:
                found = found[key]
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        pass
    if text.lstrip().startswith("<"):
        text = MARKUP.sub(" ", text)
    return " ".join(text.split())[:SHOWN]


def _allow_many_connections() -> None:
    """Each one is an open file, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise MissingExtraError("an engine of servers", "aiohttp", "servers") from error
    return aiohttp
