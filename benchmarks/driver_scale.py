"""What the driver itself can carry: 1,000 engines and 10,000 requests open at one time.

    python benchmarks/driver_scale.py [--runtime ray] [--engines 1000] [--in-flight 10000]

Stub engines behind real HTTP, placed and started by `cluster.runtime`, asked through the product's
router, replicas and connections. Prints, per interval: answers a second, what a request took beyond
the time that its engine took for it (median, 99th percentile), the driver's processor time a
request, its memory and open files. Engines take time but no work, so the rate is in-flight requests
over service time unless the driver is the limit: raise it by --service-s.

Fails if a request fails, an engine is lost, the requests in flight are not reached, or memory or
open files grow from the second third of the time to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import resource
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from driver_scale_stub import service_s

from paceline.cluster.open import open_cluster
from paceline.cluster.placement import Need
from paceline.cluster.settings import ClusterConfig
from paceline.engines.base import Request, Sampling
from paceline.engines.http import JsonClient
from paceline.engines.router import RoutedEngine
from paceline.engines.served import Served
from paceline.engines.server import HOST, PORT, ServerCommand
from paceline.engines.sglang import SGLangReplica

STUB = Path(__file__).with_name("driver_scale_stub.py")
GROWTH = {"memory": 1.03, "open files": 1.1}
"""Largest ratio of the last third to the middle one. Files come and go with idle connections."""
POLICY = "policy"
PER_GROUP = 8


class Stub:
    """One engine of a stub process, as the router is given it."""

    is_ours = False

    def __init__(self, url: str, client: JsonClient, served: Served, index: int) -> None:
        self.name = url
        self._replica = SGLangReplica(url, client, served, index=index, is_ours=False)

    async def start(self, version: int) -> SGLangReplica:
        await self._replica.look()
        return self._replica

    async def problem(self) -> str | None:
        return None

    async def stop(self) -> None: ...


@dataclass
class Interval:
    """What happened since the last look."""

    start: float
    cpu_s: float
    added_s: list[float] = field(default_factory=list)


@dataclass
class Load:
    """Keeps requests in flight until it is told to stop."""

    engine: RoutedEngine
    prompt: list[int]
    sampling: Sampling
    mean_s: float
    now: Interval
    is_over: bool = False
    seeds: itertools.count[int] = field(default_factory=itertools.count)

    async def one(self, first_delay_s: float) -> None:
        await asyncio.sleep(first_delay_s)
        while not self.is_over:
            seed = next(self.seeds)
            request = Request(self.prompt, self.sampling, seed, group=str(seed // PER_GROUP))
            start = time.perf_counter()
            await self.engine.generate(request)
            took_s = time.perf_counter() - start
            self.now.added_s.append(took_s - service_s(seed, self.mean_s))


def memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def start_stubs(options: argparse.Namespace, stack: AsyncExitStack) -> list[str]:
    """Their urls."""
    needs = [Need("engines", options.processes, on_gpu=False)]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    cluster = await open_cluster(ClusterConfig(runtime=options.runtime), needs, folder)
    stack.push_async_callback(cluster.aclose)
    launcher = cluster.launcher(cluster.devices("engines"))
    urls: list[str] = []
    for number in range(options.processes):
        count = options.engines // options.processes
        argv = (sys.executable, str(STUB), HOST, PORT, str(count))
        argv += (str(options.service_s), str(options.num_tokens))
        server = await launcher.start(ServerCommand(f"stub-{number}", argv, replica=number))
        stack.push_async_callback(server.aclose)
        host = server.url.rpartition(":")[0]
        urls += [f"{host}:{port}" for port in await ports_of(server.url)]
    return urls


async def ports_of(url: str) -> list[int]:
    def read() -> list[int]:
        with urllib.request.urlopen(f"{url}/ports", timeout=5) as answer:
            found: list[int] = json.load(answer)
        return found

    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.to_thread(read)
            except OSError:
                await asyncio.sleep(0.2)


async def run(options: argparse.Namespace) -> list[str]:
    """What went wrong."""
    async with AsyncExitStack() as stack:
        start = time.perf_counter()
        urls = await start_stubs(options, stack)
        print(f"{len(urls)} engines in {time.perf_counter() - start:.1f} s ({options.runtime})")
        client = JsonClient()
        stack.push_async_callback(client.aclose)
        served = Served(POLICY, frozenset({2}), 8192, 32000, None, request_timeout_s=600.0)
        stubs = [Stub(url, client, served, index) for index, url in enumerate(urls)]
        start = time.perf_counter()
        engine = RoutedEngine(stubs, policy=POLICY)
        stack.push_async_callback(engine.aclose)
        await engine.open()
        print(f"engine open in {time.perf_counter() - start:.1f} s")
        sampling = Sampling(max_tokens=options.num_tokens)
        prompt = [5] * options.prompt_tokens
        now = Interval(time.perf_counter(), cpu_s())
        load = Load(engine, prompt, sampling, options.service_s, now)
        # The first ones are spread over a service time: as they would be in the middle of a run.
        tasks = [
            asyncio.ensure_future(load.one(options.service_s * number / options.in_flight))
            for number in range(options.in_flight)
        ]
        try:
            return await watch(options, load, tasks)
        finally:
            load.is_over = True
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=60)


async def watch(
    options: argparse.Namespace, load: Load, tasks: list[asyncio.Task[None]]
) -> list[str]:
    print("   time  in flight  answers/s  added p50  added p99  cpu/answer   memory  files")
    memory, files, most, least = [], [], 0, options.engines
    begun = time.perf_counter()
    while (at := time.perf_counter() - begun) < options.seconds:
        await asyncio.sleep(options.interval_s)
        last, load.now = load.now, Interval(time.perf_counter(), cpu_s())
        if failed := [task for task in tasks if task.done()]:
            return [f"{len(failed)} requests failed: {failed[0].exception()}"]
        memory.append(memory_mb())
        files.append(len(os.listdir("/proc/self/fd")))
        most = max(most, load.engine.num_running)
        least = min(least, load.engine.num_serving)
        if len(last.added_s) < 2:
            continue
        cuts = statistics.quantiles(last.added_s, n=100)
        count = len(last.added_s)
        print(
            f"{at:6.0f} s {load.engine.num_running:10d} "
            f"{count / (load.now.start - last.start):10.0f} {cuts[49]:8.3f} s {cuts[98]:8.3f} s "
            f"{(load.now.cpu_s - last.cpu_s) / count * 1e3:8.2f} ms {memory[-1]:6.0f} MB "
            f"{files[-1]:6d}",
            flush=True,
        )
    problems = []
    third = len(memory) // 3
    for name, values in (("memory", memory), ("open files", files)) if third else ():
        middle, last_third = max(values[third : 2 * third]), max(values[2 * third :])
        if last_third > GROWTH[name] * middle:
            problems.append(f"{name} grew from {middle:.0f} to {last_third:.0f}")
    if most < 0.99 * options.in_flight:
        problems.append(f"{most} requests in flight at most")
    print(f"{load.engine.num_serving} engines of {options.engines} serve, {least} at least")
    if least < options.engines:
        problems.append(f"{least} engines of {options.engines} were left")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="that the engines stand in")
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--service-s", type=float, default=60.0)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--interval-s", type=float, default=10.0)
    logging.disable()  # of lost engines; they are counted
    problems = asyncio.run(run(parser.parse_args()))
    for problem in problems:
        print(f"FAILED: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
