"""Kills a small run at its n-th event, resumes it, and prints what both left. Run by test_crash.

    python crash_runs.py FOLDER FIRST LAST STRIDE [--ppo | --distill | --lora | --two | --three]
        [--second] [--foreground | --slow-disk] [--apart]

An event is the begin or end of a phase, or an operation on files. Every run is a forked child, so
that the libraries are loaded once. `--ppo` trains with a critic, which warms up over two steps,
`--distill` from a loaded teacher, `--lora` an adapter. `--two` trains a solver and a verifier in
joint episodes, `--three` one more with prompts of its own; both in the deterministic mode.
`--second` kills the resumed run once more, at the same event. Saves go on in the background, unless
`--foreground` is given; with `--slow-disk` each lasts over several phases of the run. `--apart`:
evals, whose scores wait for a save, come at every second save alone.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tiny import tiny_model, tiny_tokenizer

from paceline.build import train
from paceline.config import load_run_file
from paceline.observe.files import Files
from paceline.observe.recorder import Recorder

RUN_FILE = """
[run]
name = "{name}"
dir = "{folder}"
num_epochs = 3
seed = 5
[model]
path = "{folder}/model"
[data]
path = "{folder}/prompts.jsonl"
[reward]
kind = "regex"
pattern = "[0-4]"
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
[rollout.sampling]
max_tokens = 6
[trainer]
lr = 0.01
lr_schedule = "cosine"
threads = 1
[checkpoint]
every = 2
best_metric = "eval/held/reward"
[evals]
every = 2
[[evals.sets]]
name = "held"
data = {{ path = "{folder}/held.jsonl" }}
samples_per_prompt = 2
[observe]
console = "off"
"""

PPO = """
[algorithm]
kind = "ppo"
gae_lambda = 0.9
bootstrap_truncated = true
[critic]
lr = 0.02
warmup_steps = 2
"""


DISTILL = """
[algorithm]
kind = "distill"
top_k = 4
[teacher]
model.path = "{folder}/teacher"
"""

LORA = """
[algorithm]
kind = "grpo"
kl_coef = 0.1
[trainer.lora]
rank = 4
"""

TWO = """
[policies.solver]
[policies.verifier]
trainer.lr = 0.02
"""

THREE = """
[policies.pupil]
data.path = "{folder}/own.jsonl"
rollout.prompts_per_step = 3
rollout.env = "single_turn"
reward = {{ kind = "regex", pattern = "[0-4]" }}
trainer.lr = 0.03
"""

ENV = '''
async def play(prompt, actors):
    """The solver answers, the verifier judges; what each earns depends on both."""
    reply = await actors["solver"](prompt)
    right = float(any(c in "01234" for c in reply.text))
    verdict = await actors["verifier"](prompt.text + reply.text + "?")
    said_yes = float(any(c in "56789" for c in verdict.text))
    return {"solver": right, "verifier": float(said_yes == right)}
'''


class Events:
    """Counts events and kills this process at one of them. They come from several threads."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.count = 0
        self.names: list[str] = []
        self._guard = threading.Lock()

    def happen(self, name: str) -> None:
        with self._guard:
            self.count += 1
            self.names.append(name)
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def watch(events: Events, sync_s: float = 0.0) -> None:
    """Report every file operation and phase of this process to `events`.

    sync_s: seconds that the disk takes, in the background, for a file.
    """
    for name in ("make_folder", "write", "append", "sync", "rename", "remove", "remove_tree"):
        real = getattr(Files, name)

        def watched(self: Files, *a: object, _real=real, _name=name, **k: object) -> object:
            if _name in ("write", "append") and events.count + 1 == events.kill_at:
                # Leave half of the data behind, as a torn write does.
                path, data = a
                with open(path, "ab" if _name == "append" else "wb") as file:
                    file.write(data[: len(data) // 2])
            events.happen(_name)
            if _name == "sync" and threading.current_thread() is not threading.main_thread():
                time.sleep(sync_s)
            return _real(self, *a, **k)

        setattr(Files, name, watched)
    real_phase = Recorder.phase

    @contextmanager
    def phase(self: Recorder, name: str, policy: str | None = None):
        events.happen(f"begin {name}")
        with real_phase(self, name, policy):
            yield
        events.happen(f"end {name}")

    Recorder.phase = phase


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a forked child that does the work; a negative one is a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True)
    tiny_model(seed=3).save_pretrained(folder / "model")
    tiny_model(seed=4).save_pretrained(folder / "teacher")
    for name in ("model", "teacher"):
        tiny_tokenizer().save_pretrained(folder / name)
    rows = [{"prompt": f"{i}+{i}=", "answer": "0", "id": f"p{i}"} for i in range(6)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(text)
    (folder / "own.jsonl").write_text(text.replace("+", "-"))
    (folder / "env.py").write_text(ENV)
    (folder / "held.jsonl").write_text('{"prompt": "7+1=", "answer": "0"}\n')


def run_file_text(options: Sequence[str]) -> str:
    """What the options ask for; `{name}` and `{folder}` are still to be filled in."""
    text = _blocks(options)
    if "--foreground" in options:
        text = text.replace("[checkpoint]\n", "[checkpoint]\nbackground = false\n")
    if "--apart" in options:
        text = text.replace("num_epochs = 3\n", "num_steps = 7\n")
        text = text.replace("[evals]\nevery = 2\n", "[evals]\nevery = 4\n")
    return text


def _blocks(options: Sequence[str]) -> str:
    if "--two" in options or "--three" in options:
        text = RUN_FILE.replace("seed = 5\n", "seed = 5\ndeterministic = true\n")
        text = text.replace('[reward]\nkind = "regex"\npattern = "[0-4]"\n', "")
        text = text.replace("[rollout]\n", '[rollout]\nenv = "{folder}/env.py:play"\n')
        return text + TWO + (THREE if "--three" in options else "")
    text = RUN_FILE + (PPO if "--ppo" in options else "") + (LORA if "--lora" in options else "")
    return text + (DISTILL if "--distill" in options else "")


def run(folder: Path, name: str, events_file: Path, kill_at: int = 0) -> int:
    text = run_file_text(sys.argv)

    def work() -> None:
        torch.set_num_threads(1)
        events = Events(kill_at)
        watch(events, sync_s=0.01 if "--slow-disk" in sys.argv else 0.0)
        file = folder / f"{name}.toml"
        file.write_text(text.format(name=name, folder=folder))
        train(load_run_file(file, []))
        events_file.write_text(json.dumps(events.names))

    return in_child(work)


def outcome(run_dir: Path) -> dict[str, object]:
    """Everything that must not depend on crashes."""
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    hashes = {
        str(file.relative_to(newest)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((newest / "policies").rglob("*.safetensors"))
    }
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: (row["policy"], row["step"]))  # whose step ends first is a race
    kept = [{k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in rows]
    samples = {
        str(file.relative_to(run_dir)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((run_dir / "samples").rglob("*.gz"))
    }
    leftovers = [p.name for p in (run_dir / "checkpoints").iterdir() if p.name.startswith(".tmp")]
    return {
        "newest": newest.name,
        "hashes": hashes,
        "rows": kept,
        "samples": samples,
        "data": json.loads((newest / "data.json").read_text()),
        "best": json.loads((run_dir / "checkpoints/best.json").read_text()),
        "leftovers": leftovers,
    }


def main() -> None:
    folder, first, last, stride = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    twice = "--second" in sys.argv
    if "--lora" in sys.argv:
        importlib.import_module("peft")
    prepare(folder)
    events_file = folder / "events.json"
    if run(folder, "whole", events_file) != 0:
        raise SystemExit("the run that is not killed failed")
    expected = outcome(folder / "whole")
    names = json.loads(events_file.read_text())
    print(json.dumps({"events": len(names), "steps": len(expected["rows"]), "expected": expected}))
    for kill_at in range(first, min(last, len(names)) + 1, stride):
        name = f"killed{kill_at}"
        statuses = [run(folder, name, events_file, kill_at)]
        if twice:
            statuses.append(run(folder, name, events_file, kill_at))
        statuses.append(run(folder, name, events_file))
        found = outcome(folder / name) if statuses[-1] == 0 else {}
        different = [key for key in expected if found.get(key) != expected[key]]
        line = {"at": kill_at, "event": names[kill_at - 1], "statuses": statuses}
        print(json.dumps({**line, "different": different}), flush=True)
        if not different:
            shutil.rmtree(folder / name)


if __name__ == "__main__":
    main()
