"""A role played by an endpoint, against an HTTP server of this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rollout_fakes import FakeReward, ScriptedEngine, draws, renderer, said

from paceline.engines.base import CutSignal, Sampling
from paceline.errors import ConfigError, EngineError
from paceline.rollout.actor import Seat
from paceline.rollout.endpoint import EndpointSeat
from paceline.rollout.env import Reply
from paceline.rollout.runner import Runner
from paceline.rollout.settings import RolloutConfig
from paceline.types import Group, Prompt, Status

Answer = tuple[int, dict[str, str], str]
"""(status, headers, body)"""


def chat(text: str | None, finish: str = "stop", num_tokens: int = 3) -> Answer:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    body = {"choices": [choice], "usage": {"completion_tokens": num_tokens}}
    return 200, {}, json.dumps(body)


class Server:
    """Answers the n-th request by a function of (n, body); keeps what it was sent."""

    def __init__(self) -> None:
        self.answer: Callable[[int, dict[str, Any]], Answer] = lambda n, body: chat("yes")
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.num_open = 0
        self.most_open = 0
        self.release = threading.Event()
        self.release.set()
        self._changed = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._changed:
                    number = len(outer.bodies)
                    outer.bodies.append(body)
                    outer.headers.append({k.lower(): v for k, v in self.headers.items()})
                    outer.paths.append(self.path)
                    outer.num_open += 1
                    outer.most_open = max(outer.most_open, outer.num_open)
                    outer._changed.notify_all()
                outer.release.wait(20)
                with outer._changed:
                    outer.num_open -= 1
                status, headers, text = outer.answer(number, body)
                if status == 0:
                    self.close_connection = True
                    return
                data = text.encode()
                with suppress(ConnectionError):  # whoever asked has left
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def wait_open(self, num: int) -> None:
        """Until as many requests are being answered at one time."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_open >= num, timeout=20)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = Server()
    thread = threading.Thread(target=found.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.release.set()
        found.http.shutdown()
        thread.join(20)
        found.http.server_close()


def ask(seat: EndpointSeat, *contexts: Any, cut: CutSignal | None = None) -> list[Reply]:
    async def main() -> list[Reply]:
        actor = seat.actor("judge", draws("1")[0], episode=0, seed=lambda n: 2**40 + n, cut=cut)
        try:
            return [await actor(context) for context in contexts]
        finally:
            await seat.aclose()

    return asyncio.run(main())


def make(server: Server, sampling: Sampling | None = None, **options: Any) -> EndpointSeat:
    options = {"backoff_s": 0.0, **options}
    return EndpointSeat(server.url, "judge-7b", sampling or Sampling(), **options)


def test_what_is_asked_and_what_is_made_of_the_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    sampling = Sampling(temperature=0.25, max_tokens=9, stop=("\n",), top_p=0.5)
    seat = make(server, sampling, api_key_env="JUDGE_KEY")
    server.answer = lambda n, body: chat("well", "length" if n else "stop", n + 1)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    replies = ask(seat, "plain text", messages, Prompt(id="p", text="raw"))
    assert replies == [Reply("well", "stop", 1), Reply("well", "length", 2), replies[2]]
    assert server.paths == ["/v1/chat/completions"] * 3
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "plain text"}],
        messages,
        [{"role": "user", "content": "raw"}],
    ]
    rest = {k: v for k, v in server.bodies[1].items() if k != "messages"}
    assert rest == {
        "model": "judge-7b", "temperature": 0.25, "max_tokens": 9, "top_p": 0.5, "stop": ["\n"],
        "seed": (2**40 + 1) % 2**31,
    }  # fmt: skip
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_no_key_no_header_and_an_empty_answer_is_a_text(server: Server) -> None:
    server.answer = lambda n, body: chat(None)
    assert ask(make(server), "x")[0].text == ""
    assert "authorization" not in server.headers[0]
    assert "stop" not in server.bodies[0]


def test_a_key_that_is_not_set_and_settings_without_a_word_for_them() -> None:
    with pytest.raises(ConfigError, match="NO_SUCH_KEY holds no key"):
        EndpointSeat("http://x", "m", Sampling(), api_key_env="NO_SUCH_KEY")
    with pytest.raises(ConfigError, match="top_k = 4 can not be asked"):
        EndpointSeat("http://x", "m", Sampling(top_k=4))


@pytest.mark.parametrize("status", [429, 500, 503, 0])
def test_what_passes_is_asked_again(server: Server, status: int) -> None:
    server.answer = lambda n, body: chat("yes") if n == 2 else (status, {"retry-after": "0"}, "")
    assert ask(make(server), "x") == [Reply("yes", "stop", 3)]
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]


def test_tries_are_bounded_and_the_error_names_address_and_status(server: Server) -> None:
    server.answer = lambda n, body: (503, {}, "the model\nis loading")
    with pytest.raises(EngineError) as caught:
        ask(make(server, retries=2), "x")
    assert len(server.bodies) == 3
    assert f"{server.url}/chat/completions answered 503 Service Unavailable" in str(caught.value)
    assert "the model is loading; gave up after 3 tries" in str(caught.value)
    assert caught.value.__cause__ is None, "a cause would mean that the engine broke"


def test_what_is_wrong_for_good_is_not_asked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answer = lambda n, body: (401, {}, '{"error": "no such key"}')
    with pytest.raises(EngineError, match=r"answered 401 Unauthorized.*no such key") as caught:
        ask(make(server, api_key_env="JUDGE_KEY"), "x")
    assert "secret" not in str(caught.value)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "body", ["<html>", "{}", '{"choices": []}', '{"choices": [{"message": null}]}', "[]", "null"]
)
def test_an_answer_that_is_none_is_shown(server: Server, body: str) -> None:
    server.answer = lambda n, _: (200, {}, body)
    with pytest.raises(EngineError, match="gave no chat completion") as caught:
        ask(make(server), "x")
    assert str(caught.value).endswith(body)
    assert caught.value.__cause__ is None


def test_a_hung_endpoint_ends_at_its_time_limit(server: Server) -> None:
    server.release.clear()
    with pytest.raises(EngineError, match=r"did not answer within 0\.05 s; gave up after 2 tries"):
        ask(make(server, timeout_s=0.05, retries=1), "x")


def test_nobody_there(server: Server) -> None:
    server.http.server_close()
    with pytest.raises(EngineError, match=r"can not be reached .*gave up after 2 tries"):
        ask(make(server, retries=1), "x")


def play(server: Server, env: Any, *texts: str, **options: Any) -> tuple[Runner, Any]:
    policy = ScriptedEngine(lambda request: said("1"))
    seat = make(server, **options)
    reward: Any = FakeReward(lambda prompt, text: 1.0)
    runner = Runner(
        {"policy": Seat("policy", policy, renderer(), Sampling()), "judge": seat},
        env,
        reward,
        RolloutConfig(samples_per_prompt=2, episode_retries=0),
        run_seed=0,
    )

    async def main() -> list[Group]:
        try:
            return await runner.collect(draws(*texts), step=1)
        finally:
            await seat.aclose()

    return runner, main


async def judged(prompt: Prompt, actors: Any) -> dict[str, float]:
    reply = await actors["policy"](prompt)
    verdict = await actors["judge"](f"{prompt.text}{reply.text}")
    again = await actors["judge"]("sure?")
    return {"policy": float(verdict.text == again.text)}


def test_in_an_episode_its_words_are_kept_and_it_needs_no_reward(server: Server) -> None:
    server.answer = lambda n, body: chat(f"on {body['messages'][0]['content']}")
    _, main = play(server, judged, "1", "2")
    groups = asyncio.run(main())
    for group in groups:
        for episode in group.episodes:
            assert episode.is_trainable
            assert [(o.role, o.policy, o.text, o.tokens) for o in episode.others] == [
                ("judge", "judge-7b", f"on {group.prompt.text}1", []),
                ("judge", "judge-7b", "on sure?", []),
            ]
    assert len({body["seed"] for body in server.bodies}) == 8


def test_most_requests_at_one_time(server: Server) -> None:
    server.release.clear()
    _, main = play(server, judged, *"1234", max_in_flight=3)

    async def watched() -> None:
        task = asyncio.create_task(main())
        await asyncio.to_thread(server.wait_open, 3)
        server.release.set()
        await task

    asyncio.run(watched())
    assert server.most_open == 3
    assert len(server.bodies) == 16


def test_an_endpoint_that_fails_for_one_episode(server: Server) -> None:
    def answer(n: int, body: dict[str, Any]) -> Answer:
        is_bad = body["messages"][0]["content"] == "21"
        return (400, {}, "too long") if is_bad else chat("yes")

    server.answer = answer
    _, main = play(server, judged, "1", "2")
    good, bad = asyncio.run(main())
    assert all(episode.is_trainable for episode in good.episodes)
    for sample in bad.samples():
        assert (sample.status, sample.cause) == (Status.FAILED, "engine/refused")
        assert sample.detail.startswith(f"role 'judge': {server.url}/chat/completions answered 400")


def test_an_endpoint_that_serves_nobody_ends_the_run(server: Server) -> None:
    server.answer = lambda n, body: (404, {}, "no such model")
    _, main = play(server, judged, "1")
    with pytest.raises(EngineError, match="404 Not Found: no such model"):
        asyncio.run(main())


def test_cutting_a_draw_short_does_not_wait_for_it(server: Server) -> None:
    server.release.clear()
    runner, main = play(server, judged, "1")

    async def cut() -> list[Group]:
        task = asyncio.create_task(main())
        await asyncio.to_thread(server.wait_open, 2)
        assert runner.cut_short(draws("1")[0])
        return list(await task)

    (group,) = asyncio.run(cut())
    assert [o.text for e in group.episodes for o in e.others] == [""] * 4
    assert all(s.reward == 1.0 for s in group.samples())


def test_cancelling_ends_the_request(server: Server) -> None:
    server.release.clear()
    _, main = play(server, judged, "1")

    async def cancelled() -> None:
        task = asyncio.create_task(main())
        await asyncio.to_thread(server.wait_open, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(cancelled())
