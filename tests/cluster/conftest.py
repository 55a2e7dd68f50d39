from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_groups import LocalStarter, RayStarter, Starter


@pytest.fixture
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalStarter:
    return LocalStarter(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayStarter]:
    """One for all tests, with GPUs that exist in Ray's books only."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    starter = RayStarter(tmp_path_factory.mktemp("ray"))
    with starter.cluster_is_there():
        yield starter


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def starter(request: pytest.FixtureRequest) -> Starter:
    """Of each runtime."""
    found: Starter = request.getfixturevalue(
        {"local": "local", "ray": "ray_cluster"}[request.param]
    )
    return found
