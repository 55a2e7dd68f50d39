from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.engines.readback import choose, differences
from paceline.errors import WeightError
from paceline.weights.base import TensorInfo
from paceline.weights.buckets import describe
from paceline.weights.settings import WeightCheckConfig
from paceline.weights.tensors import checksums

TENSORS = {
    "embed.weight": torch.randn(5, 3),
    "layers.0.norm": torch.randn(4, dtype=torch.bfloat16),
    "layers.1.norm": torch.randn(4, dtype=torch.bfloat16),
}
INFOS = {name: describe(name, tensor) for name, tensor in TENSORS.items()}
SHOWN = {name: tensor.float().flatten().tolist() for name, tensor in TENSORS.items()}


def compare(shown: dict[str, list[float]], **check: Any) -> list[str]:
    async def read(info: TensorInfo) -> list[float] | None:
        return shown.get(info.name)

    async def numbers(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: TENSORS[name] for name in names}

    how = WeightCheckConfig(**check)
    return asyncio.run(differences(read, checksums(TENSORS), INFOS, numbers, how))


def test_equal_weights() -> None:
    assert compare(SHOWN) == []


def test_one_number_is_another() -> None:
    numbers = list(SHOWN["layers.1.norm"])
    numbers[2] += 0.5
    assert compare(SHOWN | {"layers.1.norm": numbers}) == ["layers.1.norm"]


def test_rounding_passes_within_a_tolerance() -> None:
    rounded = TENSORS["embed.weight"].to(torch.float16).flatten().tolist()
    shown = SHOWN | {"embed.weight": rounded}
    assert compare(shown) == ["embed.weight"]
    assert compare(shown, tolerance=1e-3) == []
    (wrong,) = compare(shown, tolerance=1e-6)
    assert wrong.startswith("embed.weight (relative error ")
    shown["layers.0.norm"] = [float("nan"), *SHOWN["layers.0.norm"][1:]]
    assert compare(shown, tolerance=0.5) == ["layers.0.norm (relative error nan)"]
    assert compare(SHOWN | {"embed.weight": [1.0]}, tolerance=0.5) == [
        "embed.weight (relative error inf)"
    ]


def test_some_tensors_are_looked_at() -> None:
    shown = SHOWN | {"embed.weight": [0.0] * 15}
    assert compare(shown, only=("layers.*",)) == []
    assert compare(shown, skip=("embed*",)) == []
    with pytest.raises(WeightError, match=r"'norms\.\*' names none of the 3 tensors"):
        compare(shown, only=("layers.*", "norms.*"))
    with pytest.raises(WeightError, match="leave no tensor"):
        compare(shown, skip=("*",))


def test_a_tensor_is_missing_or_of_another_shape() -> None:
    less = {name: numbers for name, numbers in SHOWN.items() if name != "layers.0.norm"}
    assert compare(less) == ["layers.0.norm"]
    assert compare(SHOWN | {"embed.weight": [1.0]}) == ["embed.weight"]


def test_a_server_that_shows_nothing() -> None:
    with pytest.raises(WeightError, match="can not be compared"):
        compare({})


def test_of_many_tensors_each_kind_is_looked_at() -> None:
    infos = [TensorInfo("embed", "float32", (100, 100))]
    for layer in range(10):
        infos += [
            TensorInfo(f"layers.{layer}.q", "float32", (10, 10)),
            TensorInfo(f"layers.{layer}.norm", "float32", (10,)),
        ]
    names = [info.name for info in choose(infos, 330)]
    assert names == [
        "layers.0.q", "layers.0.norm", "layers.9.q", "layers.9.norm", "layers.1.q",
        "layers.1.norm",
    ]  # fmt: skip
    assert len(choose(infos)) == len(infos)
