"""Bytes per second of each way that weights take between processes, against a plain copy.

    python benchmarks/publish.py --parameters 150 --receivers 1

Tensors of the shapes of a Llama model with random numbers in bfloat16 go from this process to
receivers in processes of their own, which copy them into tensors of theirs. `plain copy` is the
same copy in one process: what no publish can beat by much. Each path is taken several times, and
the fastest one counts; the first one is shown too, since it meets and makes its memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.weights.base import Meeting, Parcel
from paceline.weights.collective import broadcast, join
from paceline.weights.disk import read_folder
from paceline.weights.handles import unpack
from paceline.weights.source import Outbox

Tensors = dict[str, torch.Tensor]
LIMIT_S = 120.0


def shapes(millions: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of a Llama with so many parameters, about."""
    width = 1024
    yield "model.embed_tokens.weight", (32000, width)
    per_layer = 12 * width * width
    for i in range(max(1, round((millions * 1e6 - 32000 * width) / per_layer))):
        layer = f"model.layers.{i}"
        for part in "qkvo":
            yield f"{layer}.self_attn.{part}_proj.weight", (width, width)
        yield f"{layer}.mlp.gate_proj.weight", (8 * width // 3, width)
        yield f"{layer}.mlp.up_proj.weight", (8 * width // 3, width)
        yield f"{layer}.mlp.down_proj.weight", (width, 8 * width // 3)
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)


def blank(millions: int) -> Tensors:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes(millions)}


class Receiver:
    """In the other process: answers each line with one."""

    def __init__(self, millions: int) -> None:
        self.tensors = blank(millions)
        self.flat = torch.empty(0, dtype=torch.uint8)
        self.group: Any = None

    def ready(self) -> None:
        pass

    def handles(self, text: str) -> None:
        for name, tensor in unpack(text):
            self.tensors[name].copy_(tensor)

    def disk(self, folder: str) -> None:
        for name, tensor in read_folder(Path(folder)):
            self.tensors[name].copy_(tensor)

    def join(self, meeting: dict[str, Any], rank: int) -> None:
        self.group = join(Meeting(**meeting), rank, LIMIT_S)

    def collective(self, names: list[str]) -> None:
        size = sum(self.tensors[name].nbytes for name in names)
        if len(self.flat) < size:
            self.flat = torch.empty(size, dtype=torch.uint8)
        flat = self.flat[:size]
        broadcast(self.group, flat, LIMIT_S)
        start = 0
        for name in names:
            held = self.tensors[name]
            end = start + held.nbytes
            held.copy_(flat[start:end].view(held.dtype).view(held.shape))
            start = end

    def total(self) -> float:
        return sum(float(tensor.double().sum()) for tensor in self.tensors.values())


def serve(millions: int) -> None:
    receiver = Receiver(millions)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(receiver, method)(*arguments)), flush=True)


class Far:
    """A receiver, seen from the sender."""

    def __init__(self, millions: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--parameters", str(millions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, method: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps([method, arguments]), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=LIMIT_S)


@contextmanager
def receivers(number: int, millions: int) -> Iterator[list[Far]]:
    started = [Far(millions) for _ in range(number)]
    try:
        ask(started, "ready")
        yield started
    finally:
        for far in started:
            far.close()


def ask(far: list[Far], method: str, *arguments: Any) -> list[Any]:
    for one in far:
        one.tell(method, *arguments)
    return [one.answer() for one in far]


def send(box: Outbox, far: list[Far], transport: Any, bucket_bytes: int, folder: Path) -> None:
    box.open(1, transport, bucket_bytes, folder)
    while (parcel := box.next_parcel()) is not None:
        hand_over(box, far, transport, parcel)
    box.close()


def hand_over(box: Outbox, far: list[Far], transport: str, parcel: Parcel) -> None:
    match transport:
        case "handles":
            ask(far, "handles", parcel.handles[0])
        case "disk":
            ask(far, "disk", parcel.changed or parcel.folder)
        case "collective":
            for one in far:
                one.tell("collective", [info.name for info in parcel.tensors])
            box.broadcast()
            for one in far:
                one.answer()


def meet(box: Outbox, far: list[Far]) -> None:
    address, port = box.meeting_point()
    meeting = Meeting("weights", address, port, 1 + len(far), "gloo")
    for rank, one in enumerate(far, 1):
        one.tell("join", asdict(meeting), rank)
    box.meet(meeting)
    for one in far:
        one.answer()


def timed(work: Callable[[], object], times: int) -> list[float]:
    """Seconds of each."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return took


def show(name: str, took: list[float], size: int, copy_s: float) -> None:
    best = min(took)
    print(
        f"{name:24} {took[0]:8.3f} {best:8.3f} {size / best / 1e9:8.2f} {copy_s / best:8.0%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=150, help="millions")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=128)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.serve:
        serve(given.parameters)
        return
    sent = blank(given.parameters)
    for tensor in sent.values():
        tensor.normal_()
    size = sum(tensor.nbytes for tensor in sent.values())
    target = blank(given.parameters)
    print(f"{size / 2e6:.0f} M parameters, {size / 1e6:.0f} MB, {given.receivers} receivers")
    print(f"{'path':24} {'first s':>8} {'best s':>8} {'GB/s':>8} {'of copy':>8}")
    took = timed(lambda: [target[name].copy_(t) for name, t in sent.items()], given.times)
    copy_s = min(took)
    show("plain copy", took, size, copy_s)
    expected = sum(float(tensor.double().sum()) for tensor in sent.values())
    with receivers(given.receivers, given.parameters) as far, tempfile.TemporaryDirectory() as top:
        for transport in ("handles", "collective", "disk"):
            box = Outbox(sent.items, timeout_s=LIMIT_S)
            if transport == "collective":
                meet(box, far)

            def publish(box: Outbox = box, transport: str = transport) -> None:
                send(box, far, transport, given.bucket_mb << 20, Path(top) / "weights")

            first = timed(publish, 1)
            assert ask(far, "total") == [expected] * len(far)
            if transport != "disk":
                show(transport, first + timed(publish, given.times - 1), size, copy_s)
            else:
                show("disk, all", first, size, copy_s)
                sent["model.norm.weight"] += 1
                show("disk, one tensor changed", timed(publish, 1), size, copy_s)
            box.dispose()


if __name__ == "__main__":
    main()
