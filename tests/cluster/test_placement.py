from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.placement import Device, Need, Node, gpus_by_node, place
from paceline.errors import ConfigError

ONE = (Node("local", "127.0.0.1", gpus=4, cpus=8),)
TWO = (Node("a", "10.0.0.1", gpus=4, cpus=8), Node("b", "10.0.0.2", gpus=4, cpus=8))


def gpus(devices: tuple[Device, ...]) -> list[tuple[str, int | None]]:
    return [(device.node, device.gpu) for device in devices]


def test_engine_and_trainer_of_a_policy_share_devices() -> None:
    needs = [Need("trainer", 2, share="p"), Need("engine", 4, group=2, share="p")]
    placed = place(needs, ONE)
    assert placed["trainer"] == placed["engine"][:2]
    assert gpus(placed["engine"]) == [("local", i) for i in range(4)]
    assert gpus_by_node(placed) == {"local": 4}


def test_apart_they_have_their_own() -> None:
    placed = place([Need("trainer", 2), Need("engine", 2)], ONE)
    assert gpus(placed["trainer"]) == [("local", 0), ("local", 1)]
    assert gpus(placed["engine"]) == [("local", 2), ("local", 3)]


def test_policies_have_their_own() -> None:
    needs = [
        Need(f"{part} of {policy}", 2, share=policy)
        for policy in ("solver", "verifier")
        for part in ("trainer", "engine")
    ]
    placed = place(needs, ONE)
    assert not set(placed["trainer of solver"]) & set(placed["trainer of verifier"])
    assert placed["engine of verifier"] == placed["trainer of verifier"]


def test_what_must_stay_together_does_not_cross_nodes() -> None:
    nodes = (Node("a", "10.0.0.1", gpus=3), Node("b", "10.0.0.2", gpus=4))
    placed = place([Need("small", 3), Need("engine", 4, group=4)], nodes)
    assert {device.node for device in placed["engine"]} == {"b"}
    assert {device.node for device in placed["small"]} == {"a"}


def test_more_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        place([Need("trainer of p", 8), Need("engine of p", 8, share="p")], TWO)
    text = str(caught.value)
    assert "requested 16, available 8" in text
    assert "trainer of p: 8; engine of p: 8" in text
    assert "a (10.0.0.1): 4, b (10.0.0.2): 4" in text
    assert "cluster.colocate" in text


def test_enough_in_all_but_not_on_one_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine needs 8 GPUs on one node, and no node has more"):
        place([Need("engine", 8, group=8)], TWO)


def test_cpu_ranks_are_spread_and_never_refused() -> None:
    needs = [Need("trainer", 4, on_gpu=False), Need("engine", 2, group=2, on_gpu=False)]
    placed = place(needs, TWO)
    assert [device.node for device in placed["trainer"]] == ["a", "b", "a", "b"]
    assert all(device.gpu is None for device in chain(*placed.values()))
    assert len({device.node for device in placed["engine"]}) == 1
    assert len(place([Need("trainer", 64, on_gpu=False)], (Node("x", "y"),))["trainer"]) == 64


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 4), st.sampled_from(["", "p", "q"])),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(0, 8), min_size=1, max_size=4),
)
def test_nobody_gets_what_another_has(needs: list[tuple[int, int, str]], gpus: list[int]) -> None:
    asked = [
        Need(f"n{i}", size * group, group=group, share=share)
        for i, (size, group, share) in enumerate(needs)
    ]
    nodes = [Node(f"node{i}", str(i), gpus=count) for i, count in enumerate(gpus)]
    try:
        placed = place(asked, nodes)
    except ConfigError:
        return
    owners: dict[Device, str] = {}
    for need in asked:
        devices = placed[need.name]
        assert len(set(devices)) == len(devices) == need.size
        for start in range(0, need.size, need.group):
            assert len({device.node for device in devices[start : start + need.group]}) == 1
        for device in devices:
            assert owners.setdefault(device, need.share or need.name) == (need.share or need.name)
