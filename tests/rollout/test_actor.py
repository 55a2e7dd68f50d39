from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from rollout_fakes import EOS, ScriptedEngine, ids, renderer, said, text_of

from paceline.engines.base import Completion, Request, Sampling
from paceline.errors import EngineError, RolloutError
from paceline.rollout.actor import RecordingActor, Seat
from paceline.types import NO_VERSION, Draw, Message, Prompt, Sample, Status

KEEPS = (
    "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
DROPS = KEEPS.replace("m['content']", "m['content'].split('</think>')[-1].split('!')[-1]")
CHAT = Prompt(id="p", messages=({"role": "user", "content": "hi"},))


def make(
    answer: Callable[[Request], Completion | Exception],
    template: str | None = None,
    prompt: Prompt = CHAT,
) -> tuple[RecordingActor, ScriptedEngine]:
    engine = ScriptedEngine(answer)
    seat = Seat("policy", engine, renderer(template), Sampling(temperature=0.5))
    draw = Draw(7, 0, prompt)
    return RecordingActor("policy", seat, draw, episode=2, seed=lambda turn: 100 + turn), engine


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def check(samples: list[Sample]) -> None:
    for sample in samples:
        sample.validate()
        outside = [t for t, trained in enumerate(sample.mask) if not trained]
        assert all(sample.logprobs[t] == 0.0 for t in outside)
        assert all(sample.versions[t] == NO_VERSION for t in outside)


def test_one_answer_becomes_one_sample() -> None:
    prompt = Prompt(id="p", text="1+1=")
    actor, engine = make(lambda request: said("2"), prompt=prompt)
    engine.version = 4
    reply = asyncio.run(actor(prompt))
    assert (reply.text, reply.finish, reply.num_tokens) == ("2", "stop", 2)
    (sample,) = actor.samples()
    check([sample])
    assert sample.tokens == [*ids("1+1="), *ids("2"), EOS]
    assert sample.mask == [False] * 4 + [True] * 2
    assert sample.logprobs == [0.0] * 4 + [-0.5, -0.625]
    assert sample.versions == [NO_VERSION] * 4 + [4, 4]
    assert (sample.status, sample.finish, sample.text) == (Status.COMPLETED, "stop", "2")
    assert (sample.prompt_id, sample.episode, sample.temperature) == ("p", 2, 0.5)
    assert engine.requests[0].tokens == ids("1+1=")
    assert (engine.requests[0].seed, engine.requests[0].group) == (100, "policy/7")


def test_sampled_ids_go_on_as_they_were_sampled() -> None:
    """Case 39. Ids that no encoding of their text gives: two tokens where the tokenizer has one."""
    odd = [*ids("he"), 2, *ids("llo"), EOS]

    def answer(request: Request) -> Completion:
        return Completion(list(odd), [-1.0] * len(odd), [0] * len(odd), "stop", stop=EOS)

    actor, engine = make(answer, KEEPS)

    async def play() -> None:
        first = await actor(CHAT)
        assert first.text == "hello"
        await actor([user("hi"), assistant(first.text), user("more")])

    asyncio.run(play())
    start, second = engine.requests[0].tokens, engine.requests[1].tokens
    assert second[: len(start) + len(odd)] == [*start, *odd]
    assert text_of(second[len(start) + len(odd) :]) == "u=more<eos>a="
    (sample,) = actor.samples()
    check([sample])
    assert sample.tokens == [*second, *odd]
    assert [t for t, m in zip(sample.tokens, sample.mask, strict=True) if m] == odd + odd
    assert sample.mask[len(start) : len(start) + len(odd)] == [True] * len(odd)
    assert [request.seed for request in engine.requests] == [100, 101]


def test_a_template_that_rewrites_old_turns_gives_one_row_a_turn() -> None:
    """Case 40."""
    actor, engine = make(lambda request: said("x!y"), DROPS)

    async def play() -> None:
        first = await actor(CHAT)
        await actor([user("hi"), assistant(first.text), user("more")])

    asyncio.run(play())
    samples = actor.samples()
    check(samples)
    assert [sample.row for sample in samples] == [0, 1]
    assert text_of(engine.requests[1].tokens) == "u=hi<eos>a=y<eos>u=more<eos>a="
    assert [sum(sample.mask) for sample in samples] == [4, 4]


def test_another_conversation_begins_a_new_row() -> None:
    actor, engine = make(lambda request: said("1"), KEEPS)

    async def play() -> None:
        await actor(CHAT)
        await actor([user("hi"), assistant("something else"), user("more")])
        await actor(CHAT)

    asyncio.run(play())
    assert len(actor.samples()) == 3
    assert engine.requests[2].tokens == engine.requests[0].tokens


def test_calls_at_the_same_time_do_not_share_a_row() -> None:
    actor, _ = make(lambda request: said("1"), KEEPS)

    async def play() -> None:
        reply = await actor(CHAT)
        more = [user("hi"), assistant(reply.text)]
        await asyncio.gather(actor([*more, user("a")]), actor([*more, user("b")]))

    asyncio.run(play())
    samples = actor.samples()
    check(samples)
    assert [sum(sample.mask) for sample in samples] == [4, 2]


def test_plain_text_goes_on_with_the_same_ids() -> None:
    prompt = Prompt(id="p", text="a=")
    actor, engine = make(lambda request: said("1", stop="1"), prompt=prompt)

    async def play() -> None:
        reply = await actor(prompt)
        assert reply.text == ""
        await actor("a=" + reply.text + "b=")
        await actor("other")

    asyncio.run(play())
    assert [text_of(request.tokens) for request in engine.requests] == ["a=", "a=1b=", "other"]
    assert [sum(sample.mask) for sample in actor.samples()] == [2, 1]


def test_an_answer_cut_off_by_length_gets_nothing_appended() -> None:
    """Case 43."""
    actor, _ = make(lambda request: said("12", "length"), KEEPS)
    reply = asyncio.run(actor(CHAT))
    (sample,) = actor.samples()
    assert reply.finish == "length"
    assert sample.tokens[-2:] == ids("12")
    assert (sample.status, sample.finish) == (Status.TRUNCATED, "length")


def test_after_a_cut_off_answer_the_template_closes_the_turn() -> None:
    actor, engine = make(lambda request: said("12", "length"), KEEPS)

    async def play() -> None:
        reply = await actor(CHAT)
        await actor([user("hi"), assistant(reply.text), user("more")])

    asyncio.run(play())
    assert text_of(engine.requests[1].tokens) == "u=hi<eos>a=12<eos>u=more<eos>a="
    (sample,) = actor.samples()
    check([sample])
    assert sum(sample.mask) == 4


def test_the_stop_text_is_cut_from_the_reply_alone() -> None:
    prompt = Prompt(id="p", text="a=")
    actor, _ = make(lambda request: said("12. end", stop=". "), prompt=prompt)
    reply = asyncio.run(actor(prompt))
    (sample,) = actor.samples()
    assert reply.text == "12"
    assert text_of(sample.tokens) == "a=12. end"
    assert sample.text == "12. end"


def test_the_token_that_ended_the_answer_is_not_in_the_reply() -> None:
    prompt = Prompt(id="p", text="a=")
    dot = ids(".")[0]

    def answer(request: Request) -> Completion:
        return Completion([*ids("12"), dot], [-1.0] * 3, [0] * 3, "stop", stop=dot)

    actor, _ = make(answer, prompt=prompt)
    reply = asyncio.run(actor(prompt))
    assert (reply.text, reply.num_tokens) == ("12", 3)
    assert actor.samples()[0].tokens[-1] == dot


def test_an_aborted_answer_keeps_its_tokens_and_says_why() -> None:
    aborted = said("1", "abort")
    aborted.cause = "weights changed"
    actor, _ = make(lambda request: aborted, KEEPS)
    asyncio.run(actor(CHAT))
    (sample,) = actor.samples()
    assert (sample.status, sample.cause) == (Status.ABORTED, "engine/abort")
    assert sample.detail == "weights changed"
    assert sum(sample.mask) == 1


def test_a_silent_episode_still_leaves_a_sample() -> None:
    actor, _ = make(lambda request: said("1"), KEEPS)
    (sample,) = actor.samples()
    check([sample])
    assert not any(sample.mask)


def test_refusals_and_broken_engines_are_told_apart() -> None:
    actor, _ = make(lambda request: EngineError("too long"))
    with pytest.raises(EngineError):
        asyncio.run(actor("hi"))
    assert str(actor.refusal) == "too long"
    assert actor.fatal is None
    actor, _ = make(lambda request: RuntimeError("out of memory"))
    with pytest.raises(RuntimeError):
        asyncio.run(actor("hi"))
    assert str(actor.fatal) == "out of memory"
    broken = EngineError("the engine failed")
    broken.__cause__ = RuntimeError("out of memory")
    actor, _ = make(lambda request: broken)
    with pytest.raises(EngineError):
        asyncio.run(actor("hi"))
    assert actor.fatal is broken.__cause__
    assert actor.refusal is None


def test_columns_of_the_engine_that_do_not_fit_are_an_error() -> None:
    actor, _ = make(lambda request: Completion([4, 5], [-1.0], [0, 0], "stop"))
    with pytest.raises(RolloutError, match="2 tokens, 1 log-probs"):
        asyncio.run(actor("hi"))


def test_a_context_of_nothing_is_an_error() -> None:
    actor, _ = make(lambda request: said("1"))
    with pytest.raises(ValueError, match="no tokens"):
        asyncio.run(actor(""))
