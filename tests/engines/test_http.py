from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engines.sglang_server import StandIn, stand_in

from paceline.engines.http import JsonClient, LostServerError, RefusedError, _content


def with_server(scenario: Callable[[JsonClient, StandIn], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), stand_in() as server:
            client = JsonClient(**options)
            try:
                await scenario(client, server)
            finally:
                await client.aclose()

    asyncio.run(main())


def test_json_goes_there_and_back() -> None:
    async def scenario(client: JsonClient, server: StandIn) -> None:
        assert await client.request(server.url, "/model_info", timeout_s=5) == {
            "weight_version": "0"
        }
        body = {"new_version": "4"}
        await client.request(server.url, "/update_weight_version", body, timeout_s=5)
        assert server.calls[-1] == ("/update_weight_version", body)
        assert await client.request(server.url, "/flush_cache", {}, timeout_s=5) == "Cache flushed."

    with_server(scenario)


@pytest.mark.parametrize("status", [400, 404, 409])
def test_refusals_carry_the_servers_words(status: int) -> None:
    async def scenario(client: JsonClient, server: StandIn) -> None:
        server.faults["/generate"] = status
        with pytest.raises(RefusedError, match=f"status {status}: as ordered") as caught:
            await client.request(server.url, "/generate", {}, timeout_s=5, retries=3)
        assert (caught.value.status, caught.value.text) == (status, "as ordered")
        assert len(server.calls) == 1

    with_server(scenario)


def test_a_web_page_is_passed_on_as_text() -> None:
    page = b"<!DOCTYPE html><html><head><style>p {}</style></head><p>Not\n here</p></html>"
    with pytest.raises(RefusedError, match=r"status 404: Not here$"):
        _content("http://a answered /x", 404, page)


def test_losses_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: JsonClient, server: StandIn) -> None:
        server.faults["/model_info"] = 503
        asking = asyncio.create_task(
            client.request(server.url, "/model_info", timeout_s=5, retries=3)
        )
        await server.called("/model_info", 2)
        del server.faults["/model_info"]
        assert await asking == {"weight_version": "0"}
        server.faults["/model_info"] = "drop"
        with pytest.raises(LostServerError, match="can not be reached") as caught:
            await client.request(server.url, "/model_info", timeout_s=5, retries=1)
        assert caught.value.is_cut_off

    monkeypatch.setattr("paceline.engines.http.FIRST_PAUSE_S", 0.02)
    with_server(scenario)


def test_each_request_has_a_deadline() -> None:
    async def scenario(client: JsonClient, server: StandIn) -> None:
        server.faults["/model_info"] = "hang"
        with pytest.raises(LostServerError, match=r"did not answer /model_info within 0\.1 s"):
            await client.request(server.url, "/model_info", timeout_s=0.1)

    with_server(scenario)


def test_nobody_listens() -> None:
    async def main() -> None:
        client = JsonClient()
        with pytest.raises(LostServerError, match="can not be reached"):
            await client.request("http://127.0.0.1:9", "/x", timeout_s=5)
        await client.aclose()

    asyncio.run(main())


def test_an_authorization_is_sent() -> None:
    async def scenario(client: JsonClient, server: StandIn) -> None:
        await client.request(server.url, "/model_info", timeout_s=5)
        assert server.headers["Authorization"] == "Bearer secret"

    with_server(scenario, headers={"Authorization": "Bearer secret"})


def test_what_is_left_behind_may_end_before_the_client_closes() -> None:
    async def scenario(client: JsonClient, server: StandIn) -> None:
        client.leave(client.request(server.url, "/abort_request", {"rid": "x"}, timeout_s=5))
        client.leave(client.request(server.url, "/nothing_there", {}, timeout_s=5))
        await client.aclose()
        assert sorted(server.paths) == ["/abort_request", "/nothing_there"]
        with pytest.raises(LostServerError, match="connections are closed"):
            await client.request(server.url, "/model_info", timeout_s=5)

    with_server(scenario)


def test_many_requests_are_open_at_one_time() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), stand_in(manual=True) as server:
            client = JsonClient()
            count = 500
            body = {"sampling_params": {"max_new_tokens": 2}}
            tasks = [
                asyncio.create_task(
                    client.request(server.url, "/generate", body | {"rid": str(i)}, timeout_s=50)
                )
                for i in range(count)
            ]
            await server.until(count)
            server.advance(2)
            assert len(await asyncio.gather(*tasks)) == count
            await client.aclose()

    asyncio.run(main())
