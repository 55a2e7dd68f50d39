"""JSON over HTTP/1.1, one connection a request: cancellable, with one time limit for all of it."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
from http.client import HTTPException, HTTPResponse
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit


class HttpStatusError(Exception):
    """The server answered, but not with 200."""

    def __init__(self, status: int, body: str) -> None:
        text = " ".join(body.split())[:300]
        super().__init__(f"status {status}" + (f": {text}" if text else ""))
        self.status = status


class NoConnectionError(Exception):
    """The server can not be reached, or broke the connection off."""


class BadAnswerError(Exception):
    """The server answered with something else than JSON over HTTP."""


async def request_json(url: str, body: Any = None, *, timeout_s: float) -> Any:
    """What a POST of the body as JSON is answered by; without a body: a GET.

    Raises TimeoutError, NoConnectionError, BadAnswerError or HttpStatusError.
    """
    parts = urlsplit(url)
    async with asyncio.timeout(timeout_s):
        try:
            raw = await _exchange(parts, _message(parts, body))
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise NoConnectionError(str(error) or type(error).__name__) from error
    return _parse(raw)


def _message(parts: SplitResult, body: Any) -> bytes:
    path = parts.path or "/"
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {parts.netloc}"]
    lines += ["Connection: close", "Accept: application/json"]
    data = b""
    if body is not None:
        data = json.dumps(body, separators=(",", ":")).encode()
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + data


async def _exchange(parts: SplitResult, message: bytes) -> bytes:
    """Everything that the server sends until it closes, as we asked it to."""
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    context = ssl.create_default_context() if is_secure else None
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    try:
        writer.write(message)
        await writer.drain()  # ends: by the time limit of the request
        raw = await reader.read()  # ends: by the time limit of the request
    finally:
        writer.close()
    if not raw:
        raise EOFError("it closed the connection without an answer")
    return raw


class _Received:
    """Stands in for a socket from which everything has come."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _parse(raw: bytes) -> Any:
    response = HTTPResponse(cast("Any", _Received(raw)))
    try:
        response.begin()
        body = response.read()
    except HTTPException as error:
        # Cut short in the middle, or no HTTP at all.
        raise NoConnectionError(f"its answer is incomplete: {error!r}") from error
    if response.status != 200:
        raise HttpStatusError(response.status, body.decode("utf-8", "replace"))
    try:
        return json.loads(body)
    except ValueError as error:
        raise BadAnswerError(f"its answer is no JSON: {error}") from error
