"""The ledger's file, and the check of it against what a checkpoint keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.observe.audit import Data, audit, data_of
from paceline.observe.ledger import Entry, Ledger, read_ledger
from paceline.types import Group, Prompt


def group(draw: int, source: str = "") -> Group:
    return Group(Prompt(f"p{draw % 4}", text="1=", source=source), [], draw)


def entry(step: int, *trained: int, policy: str = "policy", **dropped: list[int]) -> Entry:
    one = Entry(policy, step, step)
    one.trains(group(draw) for draw in trained)
    for reason, draws in dropped.items():
        for draw in draws:
            one.drops(group(draw), reason)
    return one


def test_lines_come_back_and_those_after_the_checkpoint_are_cut(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.start({})
    first = entry(1, 0, 1, failed=[2])
    first.loses(3, "a/p3", "oldest")
    first.returns([group(4, source="b")])
    for one in (first, entry(1, 0, policy="other"), entry(2, 5), entry(3, 6)):
        ledger.write(one)
    with ledger.path.open("ab") as file:
        file.write(b'{"policy": "policy", "st')  # a write that a kill cut off
    assert [(e.policy, e.step) for e in read_ledger(tmp_path)] == [
        ("policy", 1), ("other", 1), ("policy", 2), ("policy", 3),
    ]  # fmt: skip
    found = read_ledger(tmp_path)[0]
    assert found == first
    assert found.prompts == {0: "p0", 1: "p1", 2: "p2", 3: "a/p3", 4: "b/p0"}
    ledger.start({"policy": 2, "other": 0})
    assert [(e.policy, e.step) for e in read_ledger(tmp_path)] == [("policy", 1), ("policy", 2)]


def test_a_run_without_ledger_or_with_a_damaged_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has not begun"):
        read_ledger(tmp_path)
    (tmp_path / "ledger.jsonl").write_text('{"policy": 3}\n{"policy": 3}\n')
    with pytest.raises(DataError, match=r"ledger.jsonl:1 is no line"):
        read_ledger(tmp_path)


def data(drawn: int = 8, **places: Any) -> Data:
    return Data(drawn, places.pop("returned", {}), num_prompts=4, **places)


def test_every_draw_in_one_place_comes_out_even() -> None:
    entries = [entry(1, 0, 1, zero_variance=[2]), entry(2, 3), entry(3, 4)]
    held = data(returned={6: "p2"}, ready={4: "p0", 5: "p1"}, dropped={7: ("p3", "oldest")})
    account = audit("policy", entries, held, step=2)
    assert account.violations == []
    assert (account.num_trained, account.num_committed) == (4, 3)
    assert (account.num_sampled, account.num_running) == (2, 1)
    assert account.dropped == {"zero_variance": 1, "oldest": 1}
    by_name = {life.name: life for life in account.prompts}
    assert by_name["p0"].versions == [1, 3]
    assert (by_name["p0"].committed, by_name["p0"].drawn) == (1, 2)
    assert (by_name["p2"].running, by_name["p2"].dropped.total()) == (1, 1)


@pytest.mark.parametrize(
    ("entries", "held", "told"),
    [
        ([entry(1, 0, 1), entry(2, 1, 2)], data(3), r"draw 1 \('p1'\) .* steps \[1, 2\], not once"),
        ([entry(1, 0, failed=[1]), entry(2, 1)], data(2), "trained on in step 2 and dropped"),
        ([entry(1, 0), entry(1, 1)], data(2), r"the steps are \[1, 1\]"),
        ([entry(1, 0, 1)], data(2, returned={1: "p1"}), "draws 1: trained on, and the checkpoint"),
        ([entry(1, 0, 1)], data(2, ready={0: "p0"}), "would train on them again"),
        ([entry(1, 0, 9)], data(1), "draws 9: .* has drawn 1 only"),
        ([entry(1, 0, 3)], data(4), "draws 1, 2: drawn, and neither"),
        ([entry(1, 0)], data(2, returned={1: "p0"}), "'p0' was drawn twice in epoch 0: 0, 1"),
    ],
)  # fmt: skip
def test_what_does_not_come_out_even_is_told(entries: Any, held: Data, told: str) -> None:
    account = audit("policy", entries, held, step=2)
    assert len(account.violations) == 1

    assert re.search(told, account.violations[0]), account.violations


def test_what_the_end_of_the_data_told_may_come_out_otherwise_later() -> None:
    entries = [entry(1, 0, 1), entry(1, zero_variance=[2, 3]), entry(2, 2)]
    account = audit("policy", entries, data(4), step=2)
    assert account.violations == []
    assert account.dropped == {"zero_variance": 1}


def stream(*returned: list[int], drawn: int = 3, weight: float | None = None) -> dict[str, Any]:
    source = {"name": "a", "prompts": 4, "weight": weight}
    return {"drawn": [drawn], "returned": [*returned], "identity": {"sources": [source]}}


def test_the_data_of_every_driver_is_read() -> None:
    sync = stream([2, 0, 1])
    assert data_of("policy", sync) == Data(3, {2: "a, row 1"}, num_prompts=4)
    assert data_of("policy", stream(weight=1.0)).num_prompts is None
    prompt = {"id": "x", "source": "a"}
    buffer = {"ready": [[0, 0, 0]], "awaited": [2], "dropped": [[1, "a/y", "failed", False]]}
    shared = {"stream": sync, "buffers": {"one": buffer}, "groups": {"0": {"prompt": prompt}}}
    state = {"feeds": {"shared": shared, "two": {"stream": stream()}}}
    assert data_of("one", json.loads(json.dumps(state))) == Data(
        3, {2: "a, row 1"}, {0: "a/x"}, {1: ("a/y", "failed")}, num_prompts=4
    )
    assert data_of("two", state) == Data(3, {}, num_prompts=4)
