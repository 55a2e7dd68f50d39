"""What a key of a run file means, from the config classes: for the terminal and for the docs.

`python -m paceline.explain > docs/run-file.md` writes the reference.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from paceline.config import RunFile
from paceline.config.fields import Key, class_doc, join_words, keys_of, kind_of, type_words
from paceline.config.names import SYNONYMS, nearest
from paceline.errors import ConfigError
from paceline.observe.catalogue import describe
from paceline.observe.catalogue import nearest as nearest_metrics
from paceline.types import Config

WIDTH = 96

UNITS: tuple[tuple[str, str], ...] = (
    (r"(trainer|critic)\.lr", "change of a weight per optimizer step, at most about this much"),
    (r"(trainer|critic)\.lr_warmup_steps", "optimizer steps"),
    (r"teacher\.max_in_flight", "requests"),
    (r"teacher\.retries", "repetitions of a request"),
    (r"trainer\.updates_per_step", "optimizer steps per pass"),
    (r"trainer\.epochs_per_step", "passes over a step's answers"),
    (r"(trainer|critic)\.max_grad_norm", "L2 norm of the gradient"),
    (r".*\.temperature", "divisor of the logits"),
    (r".*\.top_p", "probability"),
    (r".*\.min_p", "share of the most likely token's probability"),
    (r".*_ratio", "share"),
    (r".*(_s|_seconds)", "seconds"),
    (r".*\.(\w*tokens\w*|max_context|overlong_window|top_k)", "tokens"),
    (r".*\.(prompts_per_step|limit|size)", "prompts"),
    (r".*\.(samples_per_prompt|max_batch|pass_at)", "answers"),
    (r".*\.max_samples_per_step", "samples"),
    (r".*\.(keep_last|keep_best)", "checkpoints"),
    (r".*\.workers", "processes"),
    (r".*\.threads", "threads"),
    (r".*\.num_epochs", "passes over the prompts"),
    (r".*\.(num_steps|warmup_steps|every|debug_exit_after|max_in_flight)", "steps"),
)
"""Pattern of a key -> its unit; the first that matches counts."""

INTERACTIONS: dict[str, tuple[str, ...]] = {
    "trainer.lr": ("trainer.lr_schedule", "trainer.lr_warmup_steps", "trainer.max_grad_norm"),
    "trainer.updates_per_step": ("trainer.epochs_per_step", "algorithm.clip_low"),
    "trainer.max_tokens_per_micro_batch": (
        "trainer.activation_checkpointing",
        "trainer.logprob_chunk_tokens",
    ),
    "trainer.lora": ("trainer.lr", "model.adapter"),
    "critic.lr": ("critic.warmup_steps", "algorithm.value_clip"),
    "model.dtype": ("trainer.autocast",),
    "teacher.url": ("rollout.sampling.temperature", "algorithm.top_k"),
    "teacher.model.path": ("algorithm.top_k", "memory.order"),
    "model.random_init": ("run.seed",),
    "engine.max_context": ("rollout.sampling.max_tokens", "data.max_prompt_tokens"),
    "engine.weights": ("evals.background", "memory.order"),
    "run.num_steps": ("run.num_epochs", "trainer.lr_schedule"),
}
"""Keys that are best read together, besides those that the docstrings name themselves."""


def explain(name: str = "") -> str:
    """The meaning of a key, a block, a kind of a block, a metric, or (empty) of the whole file.

    Raises ConfigError with the nearest names if there is no such key.
    """
    name = name.strip().strip("[]").replace("[]", "")
    if not name:
        return _explain_file()
    if "/" in name:
        return _explain_metric(name)
    name = _of_named_table(name)
    keys = keys_of(RunFile)
    if found := [key for key in keys if key.plain_path == name]:
        return _explain_found(found)
    for key in keys:
        for cls in key.classes:
            kind = kind_of(cls)
            if kind and name == f"{key.plain_path}.{kind}":
                return _explain_block(key, [cls])
            if kind and name.startswith(f"{key.plain_path}.{kind}."):
                inner = f"{key.plain_path}.{name.removeprefix(f'{key.plain_path}.{kind}.')}"
                found = [k for k in keys if k.plain_path == inner and k.owner is cls]
                if found:
                    return _explain_key(found)
    if found := [key for key in keys if key.name == name]:
        if len({key.path for key in found}) == 1:
            return _explain_found(found)
        paths = join_words(list(dict.fromkeys(key.plain_path for key in found)), "and")
        return f"{name} is a key of several blocks: {paths}."
    raise ConfigError(_unknown(name, keys))


def _of_named_table(name: str) -> str:
    """`policies.solver.trainer.lr` is explained as `trainer.lr`, which it stands for."""
    parts = name.split(".")
    tables = [key.plain_path.partition(".<")[0] for key in keys_of(RunFile) if "<name>" in key.path]
    if len(parts) < 2 or parts[0] not in tables:
        return f"{name}.<name>" if name in tables else name
    named = ".".join([parts[0], "<name>", *parts[2:]])
    is_known = named in _paths() or len(parts) < 4
    return named if is_known else ".".join(parts[2:])


def _unknown(name: str, keys: Sequence[Key]) -> str:
    if meant := SYNONYMS.get(name.rpartition(".")[2].lower()):
        return f"there is no key {name!r}; did you mean `{meant}`?"
    paths = [*_paths()]
    paths += [f"{k.plain_path}.{kind_of(cls)}" for k in keys for cls in k.classes if kind_of(cls)]
    near = nearest(name, paths, 3)
    last = nearest(name.rpartition(".")[2], list(dict.fromkeys(k.name for k in keys)), 1)
    near += [k.plain_path for k in keys if k.name in last and k.plain_path not in near]
    near = list(dict.fromkeys(near))[:4]
    if near:
        return f"there is no key {name!r}; did you mean {join_words([f'`{n}`' for n in near])}?"
    return f"there is no key {name!r}; blocks: {', '.join(RunFile.model_fields)}"


def _explain_metric(name: str) -> str:
    meaning = describe(name)
    if meaning is None:
        near = nearest_metrics(name)
        hint = f"; did you mean {join_words(near)}?" if near else ""
        raise ConfigError(f"there is no metric {name!r}{hint} (docs/metrics.md lists them all)")
    rows = [("over", meaning.over), ("unit", meaning.unit or "none")]
    return "\n".join([name, "", f"  {meaning.text}", "", *_columns(rows, indent="  ")])


def _explain_found(found: Sequence[Key]) -> str:
    return _explain_block(found[0], found[0].classes) if found[0].is_block else _explain_key(found)


def _explain_file() -> str:
    lines = ["A run file is TOML. Its blocks:", ""]
    rows = [(f"[{key.plain_path}]", key.doc) for key in keys_of(RunFile) if key.block == ""]
    lines += _columns(rows)
    lines += ["", "More: `paceline explain trainer`, `paceline explain trainer.lr`."]
    return "\n".join(lines)


def _explain_key(found: Sequence[Key]) -> str:
    """One key; where several kinds of a block have it, each differing meaning is shown."""
    key = found[0]
    lines = [key.plain_path]
    meanings: dict[tuple[str, str, str], list[str | None]] = {}
    for k in found:
        meanings.setdefault((k.doc, k.allowed, k.default), []).append(k.kind)
    for (doc, allowed, default), kinds in meanings.items():
        lines += ["", *textwrap.wrap(doc, WIDTH, initial_indent="  ", subsequent_indent="  "), ""]
        rows = [("allowed", allowed), ("default", default)]
        if unit := unit_of(key):
            rows.append(("unit", unit))
        if key.kind and has_kinds(key):
            rows.append(("kind", ", ".join(str(kind) for kind in kinds)))
        lines += _columns(rows, indent="  ")
    if related := interactions(key):
        lines += ["", *_columns([("see also", ", ".join(related))], indent="  ")]
    return "\n".join(lines)


def _explain_block(key: Key, classes: Sequence[type[Config]]) -> str:
    is_list = key.path.endswith("[]")
    lines = [f"[[{key.plain_path}]]" if is_list else f"[{key.plain_path}]"]
    lines += textwrap.wrap(key.doc, WIDTH, initial_indent="  ", subsequent_indent="  ")
    for cls in classes:
        kind = kind_of(cls)
        lines.append("")
        if kind and len(key.classes) > 1:
            text = f'kind = "{kind}": {class_doc(cls)}'
            lines += [*textwrap.wrap(text, WIDTH), ""]
        lines += _columns(
            [
                (name, f"{type_words(field.annotation, field.metadata)}; {_default(cls, name)}")
                for name, field in cls.model_fields.items()
            ]
        )
    lines += ["", f"More on one key: `paceline explain {key.plain_path}.<key>`."]
    return "\n".join(lines)


def _default(cls: type[Config], name: str) -> str:
    default = next(key.default for key in keys_of(cls) if key.plain_path == name)
    return default if default == "required" else f"default {default}"


def has_kinds(key: Key) -> bool:
    """True if the key's block is of several kinds."""
    blocks = [block for block in keys_of(RunFile) if block.path == key.block]
    return any(len(block.classes) > 1 for block in blocks)


def unit_of(key: Key) -> str | None:
    """The unit of a number; None for anything else."""
    if "number" not in key.allowed:
        return None
    found = (unit for pattern, unit in UNITS if re.fullmatch(pattern, key.plain_path))
    return next(found, "plain number")


def interactions(key: Key) -> list[str]:
    """Keys that this one's meaning depends on: those it names, those that name it, the table."""
    found = list(INTERACTIONS.get(key.plain_path, ()))
    found += [path for path, others in INTERACTIONS.items() if key.plain_path in others]
    found += _named_keys(key)
    for other in keys_of(RunFile):
        if other.block.count(".") == 0 and key.plain_path in _named_keys(other):
            found.append(other.plain_path)
    return [p for p in dict.fromkeys(found) if p != key.plain_path and p in _paths()]


@cache
def _paths() -> dict[str, None]:
    """Every key without brackets, in the order of the file."""
    return dict.fromkeys(key.plain_path for key in keys_of(RunFile))


def _named_keys(key: Key) -> list[str]:
    """Other keys that the docstring of this one names in backticks."""
    block = key.plain_path.rpartition(".")[0]
    words = [m.split("=")[0].strip() for m in re.findall(r"`([^`]+)`", key.doc)]
    options = [(f"{block}.{word}" if block else word, word) for word in words]
    return [path for pair in options for path in pair if path in _paths() and "." in path]


def _columns(rows: Iterable[tuple[str, str]], indent: str = "") -> list[str]:
    """Two columns, the second one wrapped."""
    rows = list(rows)
    width = max(len(left) for left, _ in rows) + 2
    lines: list[str] = []
    for left, right in rows:
        first = f"{indent}{left:<{width}}"
        rest = " " * len(first)
        lines += textwrap.wrap(right, WIDTH, initial_indent=first, subsequent_indent=rest) or [
            first
        ]
    return lines


INTRODUCTION = """\
# The run file

<!-- Written by `python -m paceline.explain > docs/run-file.md` from the config classes. -->

A run file is [TOML](https://toml.io). Every key has a type; unknown keys are errors, and all
errors of a file are reported at once by `paceline check run.toml`, which needs no GPU and loads no
model. `paceline explain trainer.lr` shows one key in the terminal.

- **Overrides** on the command line come after the file: `paceline train run.toml trainer.lr=1e-5
  'rollout.sampling.stop=["\\n"]'`. The value is read as TOML; a bare word is a text; an empty
  value (`trainer.threads=`) takes the key out; a number in the key is an item of a list
  (`evals.sets.0.limit=100`).
- **Relative paths** start from the folder of the run file (or from `run.base`, if it is set).
- **none** as a default means that the key is absent. TOML has no word for it: leave the key out.
- The run's folder holds the **resolved file** `run.toml`: every default spelled out. Loading it
  gives the same run.
"""


def reference() -> str:
    """The whole reference as Markdown."""
    parts = [INTRODUCTION]
    written: dict[tuple[type[Config], ...], str] = {}
    for key in keys_of(RunFile):
        if key.is_block:
            classes = tuple(key.classes)
            parts.extend(_reference_block(key, written.get(classes)))
            written.setdefault(classes, _title(key))
    return "\n".join(parts).rstrip() + "\n"


def _title(key: Key) -> str:
    return f"[[{key.plain_path}]]" if key.path.endswith("[]") else f"[{key.plain_path}]"


def _reference_block(key: Key, same_as: str | None) -> Iterator[str]:
    """Heading, meaning, and a table of the keys or the block that has the same ones."""
    level = "###" if key.block else "##"
    yield f"{level} `{_title(key)}`\n\n{key.doc}\n"
    if same_as is not None:
        yield f"Its keys are those of `{same_as}`.\n"
        return
    for cls in key.classes:
        if len(key.classes) > 1:
            yield f"#### kind `{kind_of(cls)}`\n\n{class_doc(cls)}\n"
        yield "| key | allowed | default | meaning |\n|---|---|---|---|"
        for inner in keys_of(cls):
            if not inner.block:
                cells = (f"`{inner.name}`", inner.allowed, _code(inner.default), inner.doc)
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _code(default: str) -> str:
    is_word = default in ("none", "required") or default.startswith("table of")
    return default if is_word else f"`{default}`"


if __name__ == "__main__":
    print(reference(), end="")
