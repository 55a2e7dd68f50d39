"""A process that takes weights as a server of another program does: JSON lines in and out.

It holds tensors by name. It knows nothing of Paceline but what it is told to check with.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


class ReceiverProcess:
    """The near end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path]),
            },
        )

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the receiver ended: {self.process.wait(timeout=30)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


@contextmanager
def receiver_processes(number: int) -> Iterator[list[ReceiverProcess]]:
    started = [ReceiverProcess() for _ in range(number)]
    try:
        yield started
    finally:
        for receiver in started:
            receiver.kill()


class FarEnd:
    """What the process does when asked."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.group: Any = None
        self.seen: list[Any] = []

    def ready(self) -> bool:
        return True

    def handles(self, text: str, *, copy: bool = True) -> int:
        named = pickle.loads(b64decode(text))
        if copy:
            self.held |= {name: tensor.clone() for name, tensor in named}
        else:
            self.seen = named
        return len(named)

    def unpacked(self, text: str) -> int:
        """As this package reads handles: of GPU memory, too."""
        from paceline.weights.handles import unpack

        named = unpack(text)
        self.held |= {name: tensor.cpu() for name, tensor in named}
        return len(named)

    def join_nccl(self, address: str, port: int, rank: int, size: int, name: str) -> None:
        import torch

        from paceline.weights.base import Meeting
        from paceline.weights.collective import join

        meeting = Meeting(name, address, port, size, "nccl")
        self.group = join(meeting, rank, 60, device=torch.device("cuda", rank))

    def receive_nccl(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        import torch

        from paceline.weights.base import TensorInfo
        from paceline.weights.buckets import num_bytes, views
        from paceline.weights.collective import broadcast

        parts = zip(names, dtypes, shapes, strict=True)
        infos = [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in parts]
        size = sum(map(num_bytes, infos))
        flat = torch.empty(size, dtype=torch.uint8, device=self.group.device)
        broadcast(self.group, flat, 60)
        self.held |= {name: tensor.cpu() for name, tensor in views(flat, infos)}

    def let_go(self) -> None:
        self.seen = []

    def join(self, address: str, port: int, rank: int, size: int, name: str, limit: float) -> None:
        """As SGLang does: through torch's own functions, beside a default group."""
        from torch import distributed as dist
        from torch.distributed import distributed_c10d as c10d

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        timeout = timedelta(seconds=limit)
        where = f"tcp://{address}:{port}"
        store, rank, size = next(dist.rendezvous(where, rank, size, timeout=timeout))
        self.group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend("gloo"),
            c10d.PrefixStore(name, store),
            group_name=name,
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[self.group] = {i: i for i in range(size)}

    def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        import torch

        empty = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        flat = torch.empty(sum(t.nbytes for t in empty), dtype=torch.uint8)
        torch.distributed.broadcast(flat, src=0, group=self.group)
        parts = flat.split([t.nbytes for t in empty])
        for name, part, like in zip(names, parts, empty, strict=True):
            self.held[name] = part.view(like.dtype).reshape(like.shape)

    def checksums(self) -> dict[str, str]:
        from paceline.weights.tensors import checksums

        return checksums(self.held)


def main() -> None:
    import torch.multiprocessing  # noqa: F401  (pickles of tensors name it)

    far = FarEnd()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"value": getattr(far, asked.pop("do"))(**asked)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
