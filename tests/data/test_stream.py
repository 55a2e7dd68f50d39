from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.prompts import PromptSet, prompts_from_rows
from paceline.data.stream import PromptStream, steps_for_epochs
from paceline.errors import CheckpointError, ConfigError, DataError, ResumeMismatchError
from paceline.types import Draw, Prompt, derive_seed


def make_set(name: str = "a", n: int = 5, weight: float | None = None) -> PromptSet:
    rows = [Prompt(id=f"{name}{i}", text=f"{name}{i}") for i in range(n)]
    return prompts_from_rows(rows, name, weight=weight)


def make_stream(*sets: PromptSet, seed: int = 0, shuffle=True, num_epochs: int | None = 1):
    return PromptStream(sets or (make_set(),), seed=seed, shuffle=shuffle, num_epochs=num_epochs)


def ids(draws: list[Draw]) -> list[str]:
    return [draw.prompt.id for draw in draws]


# Order


def test_without_shuffle_the_order_is_that_of_the_source():
    stream = make_stream(shuffle=False, num_epochs=2)
    assert ids(stream.take(7)) == ["a0", "a1", "a2", "a3", "a4", "a0", "a1"]


def test_each_epoch_has_all_prompts_in_an_order_of_its_own():
    stream = make_stream(make_set(n=30), num_epochs=3)
    epochs = [ids(stream.take(30)) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_order_depends_on_seed_and_source_name_not_on_how_many_are_taken():
    def order(seed, name, sizes):
        stream = make_stream(make_set(name, 20), seed=seed, num_epochs=2)
        draws = [draw for size in sizes for draw in stream.take(size)]
        return [(draw.ordinal, draw.epoch, draw.prompt.id[1:]) for draw in draws]

    one = order(0, "a", [40])
    assert order(0, "a", [1, 0, 13, 19, 7]) == one
    assert order(1, "a", [40]) != one
    assert order(0, "b", [40]) != one


def test_the_order_is_stable_over_releases():
    assert ids(make_stream(make_set(n=8), seed=3).take(8)) == [
        f"a{i}" for i in (6, 1, 7, 5, 3, 2, 0, 4)
    ]


def test_ordinals_count_on_and_epochs_follow_them():
    draws = make_stream(num_epochs=3).take(100)
    assert [draw.ordinal for draw in draws] == list(range(15))
    assert [draw.epoch for draw in draws] == [0] * 5 + [1] * 5 + [2] * 5


def test_seeds_of_draws_are_distinct_and_rerun_alike():
    def seeds(run_seed):
        draws = make_stream(num_epochs=4).take(20)
        return [
            derive_seed(run_seed, "policy", "sample", draw.ordinal, draw.prompt.id, episode)
            for draw in draws
            for episode in range(8)
        ]

    assert len(set(seeds(0))) == 160
    assert seeds(0) == seeds(0)
    assert not set(seeds(0)) & set(seeds(1))


# Ends


def test_a_stream_gives_fewer_then_none():
    stream = make_stream()
    assert [len(stream.take(2)) for _ in range(5)] == [2, 2, 1, 0, 0]
    assert stream.num_left == 0


def test_a_source_smaller_than_a_batch_crosses_epochs_inside_a_batch():
    stream = make_stream(make_set(n=3), num_epochs=3)
    assert [len(stream.take(4)) for _ in range(4)] == [4, 4, 1, 0]
    assert steps_for_epochs(3, 3, 4) == 3


def test_without_num_epochs_a_stream_never_ends():
    stream = make_stream(make_set(n=3), num_epochs=None)
    assert len(stream.take(100)) == 100
    assert stream.num_left is None


@pytest.mark.parametrize(
    ("num_prompts", "num_epochs", "prompts_per_step", "expected"),
    [(8, 1, 4, 2), (9, 1, 4, 3), (3, 2, 4, 2), (1, 1, 64, 1), (3, 1, 1, 3), (5, 4, 20, 1)],
)
def test_steps_for_epochs(num_prompts, num_epochs, prompts_per_step, expected):
    assert steps_for_epochs(num_prompts, num_epochs, prompts_per_step) == expected
    stream = make_stream(make_set(n=num_prompts), num_epochs=num_epochs)
    steps = 0
    while stream.take(prompts_per_step):
        steps += 1
    assert steps == expected


def test_epoch_counts_finished_epochs():
    stream = make_stream(make_set(n=5), num_epochs=2)
    finished = []
    while draws := stream.take(3):
        finished.append(stream.epoch)
    assert finished == [0, 1, 1, 2]
    stream.give_back(draws)
    assert stream.epoch == 2


def test_an_epoch_is_not_finished_while_one_of_its_draws_is_back():
    stream = make_stream(make_set(n=5), num_epochs=3)
    draws = stream.take(7)
    assert stream.epoch == 1
    stream.give_back(draws[6:])
    assert stream.epoch == 1
    stream.give_back(draws[4:5])
    assert stream.epoch == 0
    stream.take(1)
    assert stream.epoch == 1


# Giving back


def test_given_back_draws_come_first_in_order_and_keep_their_ordinals():
    stream = make_stream(num_epochs=2)
    draws = stream.take(6)
    stream.give_back([draws[5], draws[2]])
    stream.give_back([draws[4]])
    again = stream.take(4)
    assert again[:3] == [draws[2], draws[4], draws[5]]
    assert again[3].ordinal == 6
    assert stream.num_left == 3


def test_given_back_draws_come_out_of_an_exhausted_stream():
    stream = make_stream()
    draws = stream.take(5)
    assert stream.take(1) == []
    stream.give_back(draws[1:3])
    assert stream.num_left == 2
    assert stream.take(9) == draws[1:3]
    assert stream.take(1) == []


def test_only_draws_that_are_out_can_be_given_back():
    stream = make_stream()
    draws = stream.take(2)
    stream.give_back(draws[:1])
    with pytest.raises(DataError, match="draw 0 can not be given back: it is back already"):
        stream.give_back([draws[1], draws[0]])
    assert stream.take(1) == draws[:1]
    with pytest.raises(DataError, match="draw 2 can not be given back: it was never taken"):
        stream.give_back([Draw(2, 0, draws[0].prompt)])
    with pytest.raises(DataError, match="prompt 'zz' of 'x', which is not in this stream"):
        stream.give_back([Draw(1, 0, Prompt(id="zz", text="z", source="x"))])
    stream.give_back(draws)
    with pytest.raises(DataError, match="back already"):
        stream.give_back([draws[1]])


# Several sources


def test_without_weights_each_prompt_comes_once_an_epoch():
    stream = make_stream(make_set("a", 7), make_set("b", 3), make_set("c", 1), num_epochs=4)
    for epoch in range(4):
        draws = stream.take(11)
        assert len(set(ids(draws))) == 11
        assert {draw.epoch for draw in draws} == {epoch}


def test_weights_are_kept_exactly_and_no_prompt_gets_ahead_inside_its_source():
    sets = make_set("a", 4, 0.75), make_set("b", 8, 0.25)
    draws = make_stream(*sets, num_epochs=10).take(1000)
    assert len(draws) == 120
    for k in range(0, 120, 4):
        assert Counter(draw.prompt.source for draw in draws[k : k + 4]) == {"a": 3, "b": 1}
    for name, n in (("a", 4), ("b", 8)):
        own = [draw.prompt.id for draw in draws if draw.prompt.source == name]
        for k in range(0, len(own) - n + 1, n):
            assert len(set(own[k : k + n])) == n


def test_the_same_id_in_two_sources_is_fine():
    rows = [Prompt(id="1", text="x")]
    sets = prompts_from_rows(rows, "a"), prompts_from_rows(rows, "b")
    stream = make_stream(*sets)
    draws = stream.take(2)
    assert {draw.prompt.source for draw in draws} == {"a", "b"}
    stream.give_back(draws)
    assert stream.take(2) == draws


@pytest.mark.parametrize(
    ("sets", "num_epochs", "error", "message"),
    [
        ([], 1, DataError, "no source is given"),
        ([PromptSet("empty", ())], 1, DataError, "source 'empty' holds no prompts"),
        ([make_set("a"), make_set("a")], 1, ConfigError, "two sources are named 'a'"),
        ([make_set("a", weight=1.0), make_set("b")], 1, ConfigError, "'b' has no weight"),
        ([make_set("a", weight=0.0)], 1, ConfigError, "'a' has the weight 0.0: a finite number"),
        ([make_set("a")], 0, ConfigError, "num_epochs is 0"),
        (
            [PromptSet("a", (Prompt(id="1", text="x"), Prompt(id="1", text="y")))],
            1,
            DataError,
            "same id",
        ),
    ],
)
def test_streams_that_can_not_be(sets, num_epochs, error, message):
    with pytest.raises(error, match=message):
        PromptStream(sets, seed=0, num_epochs=num_epochs)


# Saving and restoring


def test_trained_draws_do_not_come_again_and_untrained_ones_do():
    """Eight prompts, batches of four generated, two trained on: after a restart [2, 3] is next."""
    sets = make_set(n=8)
    trained = []
    stream = make_stream(sets, shuffle=False)
    draws = stream.take(4)
    trained += ids(draws[:2])
    state = stream.state(unfinished=draws[2:])
    stream.take(2)  # lost in the crash

    stream = make_stream(sets, shuffle=False)
    stream.restore(json.loads(json.dumps(state)))
    draws = stream.take(2)
    assert ids(draws) == ["a2", "a3"]
    trained += ids(draws)
    trained += ids(stream.take(100))
    assert trained == [f"a{i}" for i in range(8)]


@pytest.mark.parametrize("stop", [3, 5, 6])
def test_a_resumed_stream_goes_on_as_if_it_never_stopped(stop):
    straight = make_stream(num_epochs=3, seed=5)
    expected = [straight.take(1) for _ in range(15)]
    first = make_stream(num_epochs=3, seed=5)
    found = [first.take(1) for _ in range(stop)]
    second = make_stream(num_epochs=3, seed=5)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.epoch == first.epoch == stop // 5
    found += [second.take(1) for _ in range(15 - stop)]
    assert found == expected
    assert second.take(1) == []


def test_a_run_may_be_resumed_with_more_epochs_or_fewer():
    stream = make_stream(num_epochs=2)
    draws = stream.take(10)
    longer, shorter = make_stream(num_epochs=3), make_stream(num_epochs=1)
    longer.restore(stream.state())
    assert [draw.ordinal for draw in longer.take(99)] == [10, 11, 12, 13, 14]
    shorter.restore(stream.state(unfinished=draws[9:]))
    assert shorter.take(99) == draws[9:]


@pytest.mark.parametrize(
    ("sets", "changes", "message"),
    [
        ([make_set("b", 5)], {}, "sources were a, are b"),
        ([make_set("a", 6)], {}, "prompts of 'a': was 5, is 6; hash of 'a': was .*, is "),
        ([make_set("a", 5), make_set("b")], {}, "sources were a, are a, b"),
        ([make_set("a", 5, weight=2.0)], {}, "weight of 'a': was None, is 2.0"),
        ([prompts_from_rows(["x", "y", "z", "v", "w"], "a")], {}, "hash of 'a': was [0-9a-f]"),
        ([make_set()], {"seed": 1}, "seed was 0, is 1"),
        ([make_set()], {"shuffle": False}, "shuffle was True, is False"),
    ],
)
def test_the_state_of_other_data_is_refused_with_what_differs(sets, changes, message):
    state = json.loads(json.dumps(make_stream().state()))
    other = make_stream(*sets, **changes)
    with pytest.raises(ResumeMismatchError, match=message):
        other.restore(state)
    assert other.take(1)[0].ordinal == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2; this Paceline reads version 1"),
        ({"version": None}, "has version None"),
        ({"drawn": [1, 2]}, "is damaged"),
        ({"drawn": "x"}, "is damaged"),
        ({"returned": [[99, 0, 0]]}, "is damaged"),
        ({"returned": [[0, 0, 77]]}, "is damaged"),
        ({"returned": [[0, 0]]}, "is damaged"),
        ({"returned": None}, "is damaged"),
        ({"fingerprint": "x", "identity": None}, "is damaged"),
    ],
)
def test_damaged_states_are_refused(change, message):
    stream = make_stream()
    stream.take(3)
    with pytest.raises(CheckpointError, match=message):
        stream.restore({**stream.state(), **change})
    assert stream.take(1)[0].ordinal == 3


def test_the_identity_names_each_source():
    stream = make_stream(make_set("a", 5), make_set("b", 3), shuffle=False)
    assert stream.identity == {
        "shuffle": False,
        "sources": {
            "a": {"prompts": 5, "weight": None, "fingerprint": make_set("a", 5).fingerprint},
            "b": {"prompts": 3, "weight": None, "fingerprint": make_set("b", 3).fingerprint},
        },
    }


def test_fingerprints_tell_streams_apart():
    sets = [
        make_stream(),
        make_stream(seed=1),
        make_stream(shuffle=False),
        make_stream(make_set("a", 6)),
        make_stream(make_set("a", 5, weight=1.0)),
        make_stream(make_set("a", 5), make_set("b", 5)),
        make_stream(make_set("b", 5), make_set("a", 5)),
    ]
    assert len({stream.fingerprint for stream in sets}) == len(sets)
    assert make_stream(num_epochs=9).fingerprint == make_stream().fingerprint


# Properties

SOURCES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), SOURCES, st.integers(1, 3), st.booleans())
def test_each_prompt_is_consumed_exactly_num_epochs_times(data, sizes, num_epochs, shuffle):
    """Take, give some back, save now and then, crash and replay, in any order."""
    sets = [make_set(f"s{i}-", n) for i, n in enumerate(sizes)]

    def fresh() -> PromptStream:
        return make_stream(*sets, shuffle=shuffle, num_epochs=num_epochs)

    stream, consumed = fresh(), []
    saved, num_saved = stream.state(), 0
    for _ in range(data.draw(st.integers(0, 20))):
        match data.draw(st.sampled_from(["step", "step", "save", "crash"])):
            case "step":
                draws = stream.take(data.draw(st.integers(0, 4)))
                unused = data.draw(st.lists(st.sampled_from(draws), unique_by=id)) if draws else []
                stream.give_back(unused)
                consumed += [draw for draw in draws if draw not in unused]
            case "save":
                saved, num_saved = json.loads(json.dumps(stream.state())), len(consumed)
            case "crash":
                stream = fresh()
                stream.restore(saved)
                del consumed[num_saved:]
    while draws := stream.take(3):
        consumed += draws
    assert Counter(draw.prompt.id for draw in consumed) == {
        prompt.id: num_epochs for prompts in sets for prompt in prompts.prompts
    }
    assert sorted(draw.ordinal for draw in consumed) == list(range(sum(sizes) * num_epochs))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), SOURCES, st.booleans())
def test_restoring_changes_nothing_in_what_follows(data, sizes, is_weighted):
    weights = [data.draw(st.integers(1, 4)) if is_weighted else None for _ in sizes]
    pairs = zip(sizes, weights, strict=True)
    sets = [make_set(f"s{i}-", n, weight) for i, (n, weight) in enumerate(pairs)]
    straight = make_stream(*sets, num_epochs=3)
    restored = make_stream(*sets, num_epochs=3)
    seen = []
    for size, back in data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)))):
        draws = straight.take(size)
        assert restored.take(size) == draws
        straight.give_back(draws[:back])
        restored.give_back(draws[:back])
        seen += draws[back:]
        state = json.loads(json.dumps(restored.state()))
        restored = make_stream(*sets, num_epochs=3)
        restored.restore(state)
        assert restored.state() == straight.state() == state
        assert (restored.epoch, restored.num_left) == (straight.epoch, straight.num_left)
    rest = straight.take(10**6)
    assert restored.take(10**6) == rest
    ordinals = sorted(draw.ordinal for draw in seen + rest)
    assert all(b == a + 1 for a, b in pairwise(ordinals))
    assert len(ordinals) == 3 * sum(sizes)
