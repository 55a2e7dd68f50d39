"""Ranks of sharded trainers that the tests of several files share: they take long to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsdp_hosts import Hosts, hosts


@pytest.fixture(scope="session", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    """One rank in this process; or two in processes of their own, on CPUs."""
    with hosts(request.param, tmp_path_factory.mktemp("logs")) as made:
        yield made
