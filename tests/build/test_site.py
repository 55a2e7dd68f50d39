from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from run_files import VALID, write_project

from paceline.build import site
from paceline.config import load_run_file
from paceline.drivers.dispose import Disposer


@pytest.mark.parametrize(("ranks", "is_told"), [(4, False), (5, True)])
def test_more_processes_than_the_cores_bear_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ranks: int,
    is_told: bool,
) -> None:
    monkeypatch.setattr(site, "available_cores", lambda: 2)
    options = ["trainer.kind=fsdp", f"trainer.ranks={ranks}", "trainer.device=cpu"]
    run_file = load_run_file(write_project(tmp_path, VALID), options)

    async def main() -> None:
        async with Disposer() as disposer:
            await site.open_site(run_file, disposer)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert ("5 worker processes share 2 CPU cores" in caplog.text) == is_told
