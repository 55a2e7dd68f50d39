"""What every engine does, whichever it is: the same tests for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from engines.contract import CONTEXT, EOS, MAKER_PARAMS, NAMES, Faulty, Subject
from tiny import tiny_tokenizer

from paceline.engines.base import Completion, CutSignal, Request, Sampling
from paceline.errors import EngineError, WeightError
from paceline.weights.base import WeightPlan
from paceline.weights.settings import WeightCheckConfig

ENDLESS = {"ignore_eos": True}
SHARES = (0.5, 0.3, 0.7, 0.15, 0.4, 0.05, 0.6, 0.2, 0.0, 0.8, 0.1, 0.35)
"""Of the time that answers take: tried until one of them meets an answer under way."""
EVERYTHING: Any = frozenset({"weights", "kv_cache", "graphs"})
CHECKED = WeightCheckConfig(when="always")


@pytest.fixture(scope="module", params=MAKER_PARAMS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    made = Subject(request.param, tmp_path_factory.mktemp("engine"))
    yield made
    made.close()


def ask(count: int = 12, seed: int = 0, **changes: Any) -> Request:
    sampling = Sampling(max_tokens=count, **changes)
    return Request([5, 6, 7 + seed % 20], sampling, seed=seed, group=f"group {seed % 3}")


async def answers(subject: Subject, asked: list[Request]) -> list[Completion]:
    return await asyncio.gather(*map(subject.engine.generate, asked))


def assert_columns(made: Completion) -> None:
    assert len(made.tokens) == len(made.logprobs) == len(made.versions)
    assert all(value <= 0 for value in made.logprobs)


def assert_logprobs(subject: Subject, seed: int, asked: Request, made: Completion) -> None:
    """What the engine says of its answer is what the model of this seed says, in float32."""
    assert_columns(made)
    tokens = [*asked.tokens, *made.tokens]
    expected = subject.logprobs(seed, tokens, asked.sampling.temperature or 1.0)[
        len(asked.tokens) :
    ]
    assert made.logprobs == pytest.approx(expected, abs=1e-4)


def most_likely(subject: Subject, tokens: list[int]) -> int:
    return max(range(64), key=lambda token: subject.logprobs(subject.seed, [*tokens, token])[-1])


def delays_s(subject: Subject, asked: list[Request]) -> Iterator[float]:
    """Engines are quick or slow."""
    for share in SHARES:
        start = time.perf_counter()
        subject.run(answers(subject, asked))
        yield share * (time.perf_counter() - start)


# Answers


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_those_of_the_sampling_temperature(
    subject: Subject, temperature: float
) -> None:
    asked = [ask(seed=i, temperature=temperature) for i in range(8)]
    made = subject.run(answers(subject, asked))
    for question, answer in zip(asked, made, strict=True):
        assert_logprobs(subject, subject.seed, question, answer)
        assert answer.versions == [subject.engine.version] * len(answer.tokens)
        assert answer.finish == ("stop" if EOS in answer.tokens else "length")
        assert answer.stop == (EOS if EOS in answer.tokens else None)
        assert EOS not in answer.tokens[:-1]
    assert len({tuple(answer.tokens) for answer in made}) > 1


def test_greedy_answers_take_the_most_likely_token(subject: Subject) -> None:
    asked = ask(temperature=0.0, **ENDLESS)
    first, second = (subject.run(subject.engine.generate(asked)) for _ in range(2))
    assert first.tokens == second.tokens
    assert_logprobs(subject, subject.seed, asked, first)
    for place in (0, 5, 11):
        before = [*asked.tokens, *first.tokens[:place]]
        assert first.tokens[place] == most_likely(subject, before)


def test_equal_seeds_give_equal_answers(subject: Subject) -> None:
    if not subject.maker.is_seeded:
        pytest.skip("this engine does not promise it")
    asked = [ask(seed=i, **ENDLESS) for i in range(6)]
    first = subject.run(answers(subject, asked))
    second = subject.run(answers(subject, asked[::-1]))[::-1]
    assert [answer.tokens for answer in first] == [answer.tokens for answer in second]


@pytest.mark.parametrize("count", [1, 3, 30])
def test_no_more_tokens_than_asked_for(subject: Subject, count: int) -> None:
    asked = ask(count, **ENDLESS)
    made = subject.run(subject.engine.generate(asked))
    assert (len(made.tokens), made.finish, made.stop) == (count, "length", None)
    assert_logprobs(subject, subject.seed, asked, made)


def test_tokens_that_end_an_answer_stay_in_it(subject: Subject) -> None:
    ends = (7, 20, 33, 46, 59)
    asked = [ask(40, seed=i, stop_token_ids=ends) for i in range(16)]
    made = subject.run(answers(subject, asked))
    for question, answer in zip(asked, made, strict=True):
        assert_logprobs(subject, subject.seed, question, answer)
        assert not {EOS, *ends} & set(answer.tokens[:-1])
        if answer.finish == "stop":
            assert answer.stop == answer.tokens[-1]
            assert answer.stop in (EOS, *ends)
        else:
            assert (answer.finish, answer.stop, len(answer.tokens)) == ("length", None, 40)
    assert {answer.stop for answer in made} & set(ends)
    # Whoever ignores the model's end tokens ignores these as well.
    ignoring = ask(40, stop_token_ids=tuple(range(64)), **ENDLESS)
    assert len(subject.run(subject.engine.generate(ignoring)).tokens) == 40


def test_a_text_that_ends_an_answer_stays_in_it_with_its_tokens(subject: Subject) -> None:
    """Texts of two tokens each: the second one completes it."""
    decode = tiny_tokenizer().decode
    # None of them is in the names of special tokens.
    texts = tuple(one + two for one in "02468" for two in "13579h")
    asked = [ask(40, seed=i, temperature=2.0, stop=texts) for i in range(60)]
    made = subject.run(answers(subject, asked))
    for question, answer in zip(asked, made, strict=True):
        assert_logprobs(subject, subject.seed, question, answer)
        before, text = decode(answer.tokens[:-1]), decode(answer.tokens)
        assert not [stop for stop in texts if stop in before]
        if answer.finish == "length" or answer.stop == EOS:
            assert not [stop for stop in texts if stop in text]
        else:
            assert answer.finish == "stop"
            assert answer.stop in texts
            assert text.endswith(str(answer.stop))
    assert {answer.stop for answer in made} & set(texts)


def test_scores_are_log_probs_of_given_tokens(subject: Subject) -> None:
    tokens = [5, 9, 12, 30, 31, 7, EOS, 0, 5]
    found = subject.run(subject.engine.score(tokens))
    assert found == pytest.approx(subject.logprobs(subject.seed, tokens), abs=1e-4)
    assert found[0] == 0.0
    assert subject.run(subject.engine.score([5])) == [0.0]
    if subject.maker.scores_at_temperatures:
        found = subject.run(subject.engine.score(tokens, 0.5))
        assert found == pytest.approx(subject.logprobs(subject.seed, tokens, 0.5), abs=1e-4)
    else:
        with pytest.raises(EngineError, match="temperature 1 only"):
            subject.run(subject.engine.score(tokens, 0.5))


# Requests that are refused, cut or cancelled


def test_refused_requests_leave_the_engine_as_it_was(subject: Subject) -> None:
    async def scenario() -> None:
        engine = subject.engine
        going = asyncio.create_task(engine.generate(ask(60, **ENDLESS)))
        for tokens in ([], [5] * (CONTEXT + 1), [5, 64], [5, -1], [5, 10**9]):
            with pytest.raises(EngineError):
                await engine.generate(Request(tokens, Sampling(), seed=0))
            with pytest.raises(EngineError):
                await engine.score(tokens)
        full = await engine.generate(Request([5] * CONTEXT, Sampling(), seed=0))
        assert full == Completion([], [], [], "length")
        assert len((await going).tokens) == 60
        assert engine.num_running == 0

    subject.run(scenario())
    asked = ask(**ENDLESS)
    assert_logprobs(subject, subject.seed, asked, subject.run(subject.engine.generate(asked)))


def test_the_context_ends_an_answer(subject: Subject) -> None:
    asked = Request([5] * (CONTEXT - 8), Sampling(max_tokens=50, ignore_eos=True), seed=0)
    made = subject.run(subject.engine.generate(asked))
    assert made.finish == "length"
    assert 5 <= len(made.tokens) <= 8  # some servers keep a few places for themselves
    assert_logprobs(subject, subject.seed, asked, made)


def test_cancelled_and_cut_answers_free_their_slots(subject: Subject) -> None:
    whole = [
        Request([5, 6, 7, i], Sampling(max_tokens=100, ignore_eos=True), seed=i)
        for i in range(3, 27)
    ]

    async def scenario(delay_s: float) -> bool:
        engine, cut = subject.engine, CutSignal()
        asked = [replace(question, cut=cut) for question in whole]
        tasks = [asyncio.create_task(engine.generate(question)) for question in asked]
        await asyncio.sleep(delay_s)
        for task in tasks[::2]:
            task.cancel()
        cut.set()
        for question, made in zip(asked[1::2], await asyncio.gather(*tasks[1::2]), strict=True):
            assert made.finish == "length"
            assert_logprobs(subject, subject.seed, question, made)
        await asyncio.gather(*tasks[::2], return_exceptions=True)
        assert engine.num_running == 0
        # All are free: as many as there are slots run side by side.
        later = await answers(subject, [ask(seed=i, **ENDLESS) for i in range(16)])
        assert all(len(made.tokens) == 12 for made in later)
        return any(len(task.result().tokens) < 100 for task in tasks[1::2])

    assert any(subject.run(scenario(delay_s)) for delay_s in delays_s(subject, whole))


# New weights


def test_new_weights_serve_from_the_next_token_on(subject: Subject) -> None:
    for seed in (3, 4, 3):
        version = subject.run(subject.publish(seed, check=CHECKED))
        assert subject.engine.version == version
        asked = [ask(seed=i, **ENDLESS) for i in range(4)]
        for question, made in zip(asked, subject.run(answers(subject, asked)), strict=True):
            assert made.versions == [version] * 12
            assert_logprobs(subject, seed, question, made)


@pytest.mark.parametrize("mode", ["finish", "keep", "recompute", "abort"])
def test_what_a_publish_does_to_answers_under_way(subject: Subject, mode: Any) -> None:
    old, new = 5, 6
    asked = [ask(100, seed=i, **ENDLESS) for i in range(12)]

    async def scenario(delay_s: float) -> tuple[int, list[Completion]]:
        version = await subject.publish(old)
        tasks = [asyncio.create_task(subject.engine.generate(question)) for question in asked]
        await asyncio.sleep(delay_s)
        publishing = asyncio.create_task(subject.publish(new, mode=mode, check=CHECKED))
        made = await asyncio.gather(*tasks)
        await publishing
        return version, made

    for delay_s in delays_s(subject, asked):
        version, made = subject.run(scenario(delay_s))
        before = [answer.versions.count(version) for answer in made]
        if mode == "finish" or any(0 < count < 100 for count in before):
            break
    else:
        pytest.fail(f"no answer was met under way: {before}")
    for question, answer, count in zip(asked, made, before, strict=True):
        assert_columns(answer)
        assert set(answer.versions) <= {version, version + 1}
        assert answer.versions == sorted(answer.versions)
        tokens = [*question.tokens, *answer.tokens]
        expected = [
            *subject.logprobs(old, tokens)[3 : 3 + count],
            *subject.logprobs(new, tokens)[3 + count :],
        ]
        known = count if mode == "keep" else len(answer.tokens)
        assert answer.logprobs[:known] == pytest.approx(expected[:known], abs=1e-4)
        if mode == "abort" and answer.finish == "abort":
            assert answer.can_go_on
            assert count == len(answer.tokens)
        else:
            assert (answer.finish, len(answer.tokens)) == ("length", 100)
    if mode == "finish":
        assert all(len(set(answer.versions)) == 1 for answer in made)
    # What comes later does not see what former weights computed.
    later = ask(seed=3, **ENDLESS)
    assert_logprobs(subject, new, later, subject.run(subject.engine.generate(later)))


def test_an_aborted_answer_is_gone_on_from(subject: Subject) -> None:
    asked = ask(100, **ENDLESS)

    async def scenario(delay_s: float) -> tuple[Completion, Completion]:
        engine = subject.engine
        await subject.publish(5)
        task = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(delay_s)
        await subject.publish(6, mode="abort")
        part = await task
        rest = await engine.generate(
            Request([*asked.tokens, *part.tokens], asked.sampling, seed=asked.seed,
                    num_sampled=len(part.tokens))
        )  # fmt: skip
        return part, rest

    for delay_s in delays_s(subject, [asked]):
        part, rest = subject.run(scenario(delay_s))
        if 0 < len(part.tokens) < 100:
            break
    else:
        pytest.fail(f"the answer was not met under way, but at {len(part.tokens)} tokens")
    assert (part.finish, part.can_go_on) == ("abort", True)
    assert len(part.tokens) + len(rest.tokens) == 100
    assert set(rest.versions) == {subject.engine.version}
    assert_logprobs(subject, 5, asked, part)


def test_an_idle_engine_pauses_in_every_mode_and_requests_wait(subject: Subject) -> None:
    async def scenario() -> None:
        engine = subject.engine
        for mode in ("finish", "keep", "recompute", "abort", "finish"):
            await engine.pause(mode)
        waiting = [
            asyncio.create_task(engine.generate(ask(**ENDLESS))),
            asyncio.create_task(engine.score([5, 6])),
        ]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        await engine.resume()
        await engine.resume()
        answer, scores = await asyncio.gather(*waiting)
        assert (len(answer.tokens), len(scores)) == (12, 2)

    subject.run(scenario())


def test_weights_of_another_policy_are_refused(subject: Subject) -> None:
    version = subject.engine.version

    async def scenario() -> None:
        await subject.engine.pause("finish")
        for plan in (
            WeightPlan("other", version + 1, "handles"),
            WeightPlan("policy", version + 1, "shared"),
            WeightPlan("policy", version + 1, "handles"),
        ):
            with pytest.raises(WeightError):
                await subject.engine.receive(plan)
        await subject.engine.resume()

    subject.run(scenario())
    assert subject.engine.version == version
    asked = ask(**ENDLESS)
    made = subject.run(subject.engine.generate(asked))
    assert made.versions == [version] * 12
    assert_logprobs(subject, subject.seed, asked, made)


def test_asleep_it_serves_nobody_and_dropped_weights_come_anew(subject: Subject) -> None:
    async def refused(message: str) -> None:
        with pytest.raises(EngineError, match=message):
            await subject.engine.generate(ask())
        with pytest.raises(EngineError, match=message):
            await subject.engine.score([5, 6])

    async def scenario() -> None:
        engine = subject.engine
        for _ in range(2):
            await engine.sleep(EVERYTHING)
        await refused("asleep")
        await engine.wake(frozenset({"weights"}))
        await refused("asleep")
        for _ in range(2):
            await engine.wake(EVERYTHING)
        await refused("none were received")
        await subject.publish(7, check=CHECKED)

    subject.run(scenario())
    asked = ask(**ENDLESS)
    assert_logprobs(subject, 7, asked, subject.run(subject.engine.generate(asked)))


# The weight check


def test_the_check_finds_what_was_rounded_unless_it_is_tolerated(subject: Subject) -> None:
    with pytest.raises(WeightError, match=r"tensors differ.*: model\.\S+"):
        subject.run(subject.publish(8, sender=Faulty(rounds=True), check=CHECKED))
    roughly = CHECKED.model_copy(update={"tolerance": 0.004})
    subject.run(subject.publish(8, sender=Faulty(rounds=True), check=roughly))
    tight = CHECKED.model_copy(update={"tolerance": 1e-4, "only": ("*.mlp.*",)})
    with pytest.raises(WeightError, match=r"mlp\S+ \(relative error 0\.00\d+\)"):
        subject.run(subject.publish(8, sender=Faulty(rounds=True), check=tight))
    subject.run(subject.publish(8, check=CHECKED))
    subject.run(subject.engine.generate(ask()))


def test_the_check_finds_what_was_never_sent(subject: Subject) -> None:
    sender = Faulty(lost=("model.layers.1.mlp.down_proj.weight",))
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.down_proj"):
        subject.run(subject.publish(9, sender=sender, check=CHECKED))
    subject.run(subject.publish(9, check=CHECKED))


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("model.norm.weight", r"model\.norm"),
        ("model.layers.0.self_attn.k_proj.weight", r"model\.layers\.0\.self_attn\.(qkv|k)_proj"),
    ],
    ids=["norm", "part of a fused one"],
)
def test_the_check_finds_what_was_reset_and_not_written(
    subject: Subject, lost: str, named: str
) -> None:
    """The weights are those that it has already, so that only the reset shows it. Some engines
    find it before they are asked."""
    subject.run(subject.publish(10, check=CHECKED))
    resets = CHECKED.model_copy(update={"reset": True})
    sender = Faulty(lost=(lost,), claims=True)
    with pytest.raises(WeightError, match=named):
        subject.run(subject.publish(10, sender=sender, check=resets))
    with pytest.raises(EngineError):
        subject.run(bounded(subject.engine.generate(ask())))
    subject.run(subject.publish(10, check=resets))
    asked = ask(**ENDLESS)
    assert_logprobs(subject, 10, asked, subject.run(subject.engine.generate(asked)))
    assert lost in NAMES


async def bounded(work: Any) -> Any:
    """An engine that has no weights says so, or lets a request wait until it has."""
    try:
        async with asyncio.timeout(0.5):
            return await work
    except TimeoutError:
        raise EngineError("it waits") from None
