from __future__ import annotations

import copy
import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.group_codec import decode_group, encode_group
from paceline.errors import CheckpointError
from paceline.types import Episode, Group, Message, Prompt, Sample, Status

TEXT = st.text(max_size=8)
NUMBER = st.floats(allow_nan=True, allow_infinity=True)
KEYS = TEXT | st.sampled_from(["$float", "$tuple", "$dict", "$"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBER | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=2)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(st.builds(Message, role=TEXT, content=TEXT), max_size=2).map(tuple)
PROMPTS = st.builds(
    Prompt,
    id=TEXT,
    text=st.none() | TEXT,
    messages=st.none() | MESSAGES,
    answer=VALUES,
    metadata=st.dictionaries(KEYS, VALUES, max_size=3),
    source=TEXT,
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 4))

    def column(items: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(items, min_size=length, max_size=length))

    return Sample(
        policy=draw(TEXT),
        prompt_id=draw(TEXT),
        episode=draw(st.integers(0, 9)),
        tokens=column(st.integers(0, 200_000)),
        mask=column(st.booleans()),
        logprobs=column(NUMBER),
        versions=column(st.integers(-1, 10**6)),
        status=draw(st.sampled_from(Status)),
        temperature=draw(NUMBER),
        role=draw(TEXT),
        row=draw(st.integers(0, 3)),
        reward=draw(st.none() | NUMBER),
        reward_parts=draw(st.dictionaries(KEYS, NUMBER, max_size=2)),
        text=draw(TEXT),
        finish=draw(TEXT),
        cause=draw(st.none() | TEXT),
        detail=draw(TEXT),
    )


SAMPLES = st.lists(samples(), max_size=2)
EPISODES = st.builds(
    Episode,
    prompt_id=TEXT,
    index=st.integers(0, 9),
    samples=SAMPLES,
    metrics=st.dictionaries(TEXT, NUMBER, max_size=2),
    **{field.name: SAMPLES for field in fields(Episode) if field.name == "others"},
)
GROUPS = st.builds(
    Group, prompt=PROMPTS, episodes=st.lists(EPISODES, max_size=2), draw=st.integers(0, 10**9)
)


def through_a_file(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False, indent=1))


def make_group() -> Group:
    sample = Sample(
        "policy", "a", 0, [5, 6, 7], [False, True, True], [0.0, -0.1, -0.30000000000000004],
        [-1, 4, 5], Status.COMPLETED, reward=1.0, reward_parts={"right": 1.0},
    )  # fmt: skip
    prompt = Prompt("a", text="1+1=", answer="2", metadata={"level": 3})
    return Group(prompt, [Episode("a", 0, [sample], {"turns": 2.0})], 17)


@settings(max_examples=300, deadline=None)
@given(GROUPS)
def test_a_group_comes_back_from_a_file_as_it_was(group: Group) -> None:
    value = through_a_file(encode_group(group))
    # The text of a value tells NaN from other floats, 0.0 from -0.0 and a tuple from a list.
    assert repr(decode_group(value)) == repr(group)
    assert encode_group(decode_group(value)) == value


def test_every_field_is_written() -> None:
    value = encode_group(make_group())
    assert value.keys() == {f.name for f in fields(Group)}
    assert value["prompt"].keys() == {f.name for f in fields(Prompt)}
    assert value["episodes"][0].keys() == {f.name for f in fields(Episode)}
    assert value["episodes"][0]["samples"][0].keys() == {f.name for f in fields(Sample)}


def test_columns_are_short_texts() -> None:
    sample = encode_group(make_group())["episodes"][0]["samples"][0]
    assert (sample["tokens"], sample["mask"]) == ("5 6 7", "0 1 1")
    assert sample["logprobs"] == "0.0 -0.1 -0.30000000000000004"


def test_what_is_no_json_value_is_named() -> None:
    group = make_group()
    group.prompt = Prompt("a", text="x", metadata={"when": [b"bytes"]})
    with pytest.raises(CheckpointError, match=r"group\.prompt\.metadata\.when\[0\].*type bytes"):
        encode_group(group)


DAMAGES: dict[str, tuple[Any, Any, str]] = {
    "nothing": ((), None, r"group is None, no dict"),
    "lacks a field": (("draw",), ..., r"group lacks \['draw'\]"),
    "unknown field": (("extra",), 1, r"group lacks \[\], has unknown \['extra'\]"),
    "wrong type": (("draw",), "17", r"group\.draw is '17', no int"),
    "a truth for a number": (("draw",), True, r"group\.draw is True, no int"),
    "no list": (("episodes",), {}, r"group\.episodes is \{\}, no list"),
    "status": (("episodes", 0, "samples", 0, "status"), "fine", r"'fine', no Status"),
    "tokens": (("episodes", 0, "samples", 0, "tokens"), "5 x 7", r"tokens is no column of int"),
    "mask": (("episodes", 0, "samples", 0, "mask"), "0 1 2", r"mask is no column of bool"),
    "short": (("episodes", 0, "samples", 0, "tokens"), "5 6", r"lengths \[2, 3, 3, 3\]"),
    "reward": (("episodes", 0, "samples", 0, "reward"), "big", r"reward is 'big', no number"),
    "metadata": (("prompt", "metadata"), {"$what": 1}, r"unknown key '\$what'"),
    "pairs": (("prompt", "metadata"), {"$dict": [[1]]}, r"metadata holds no pairs"),
    "no object": (("prompt", "metadata"), [], r"metadata is \[\], no dict"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_where_it_is(name: str) -> None:
    path, new, message = DAMAGES[name]
    value = copy.deepcopy(encode_group(make_group()))
    if not path:
        value = new
    else:
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        if new is ...:
            del holder[path[-1]]
        else:
            holder[path[-1]] = new
    with pytest.raises(CheckpointError, match=message):
        decode_group(value)
