"""Many engines in one process, for `driver_scale.py`: HOST PORT COUNT SERVICE_S NUM_TOKENS.

Speaks as much of SGLang's HTTP API as a replica asks for. An answer takes between half and one and
a half times SERVICE_S, by the request's seed, and costs next to nothing to make.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
SEED = re.compile(rb'"sampling_seed": ?(\d+)')


def service_s(seed: int, mean_s: float) -> float:
    return mean_s * (0.5 + seed % 1000 / 1000)


def reply(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


class Connection(asyncio.Protocol):
    """Takes one request after the other."""

    def __init__(self, ports: list[int], mean_s: float, num_tokens: int) -> None:
        self._mean_s = mean_s
        self._received = b""
        made = {
            "output_ids": [7] * num_tokens,
            "meta_info": {
                "output_token_logprobs": [[-0.693147, 7, None]] * num_tokens,
                "finish_reason": {"type": "length", "length": num_tokens},
                "weight_version": "0",
                "cached_tokens": 0,
            },
        }
        self._answer = reply(json.dumps(made).encode())
        self._info = reply(b'{"tp_size": 1, "weight_version": "0"}')
        self._ports = reply(json.dumps(ports).encode())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        found = LENGTH.search(head)
        length = int(found.group(1)) if found else 0
        if not end or len(rest) < length:
            return
        self._received = rest[length:]
        if head.startswith(b"POST /generate"):
            seed = SEED.search(rest)
            delay_s = service_s(int(seed.group(1)) if seed else 0, self._mean_s)
            asyncio.get_running_loop().call_later(delay_s, self._write, self._answer)
        elif head.startswith(b"GET /ports"):
            self._write(self._ports)
        else:
            self._write(self._info)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


async def serve(host: str, port: int, count: int, mean_s: float, num_tokens: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = asyncio.get_running_loop()
    ports: list[int] = []

    def connection() -> Connection:
        return Connection(ports, mean_s, num_tokens)

    for number in range(count):
        server = await loop.create_server(connection, host, 0 if number else port, backlog=1024)
        ports.append(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


if __name__ == "__main__":
    host, port, count, mean_s, num_tokens = sys.argv[1:]
    asyncio.run(serve(host, int(port), int(count), float(mean_s), int(num_tokens)))
