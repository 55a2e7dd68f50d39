from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_tokenizer
from tokenizers import processors

from paceline.errors import ConfigError, DataError
from paceline.rollout.renderer import Renderer
from paceline.types import Message, Prompt

KEEPS = (
    "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
DROPS = (
    "{% for m in messages %}{{ m['role'][0] + '=' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{{ m['role'][0] + '=' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
EOS = 1


def user(content: str) -> Message:
    return Message(role="user", content=content)


def renderer(template: str | None = None, **options: Any) -> Renderer:
    return Renderer(tiny_tokenizer(template), **options)


def test_plain_text() -> None:
    r = renderer()
    ids = r.encode(Prompt(id="p", text="12+30="))
    assert r.decode(ids) == "12+30="
    assert len(ids) == 6
    assert not r.can_extend


def test_asking_twice_gives_lists_that_do_not_touch() -> None:
    r, prompt = renderer(), Prompt(id="p", text="12")
    r.encode(prompt).append(99)
    assert len(r.encode(prompt)) == 2


def test_chat_messages_with_the_template_and_its_options() -> None:
    prompt = Prompt(id="p", messages=(user("hi"),))
    r = renderer(KEEPS)
    text = r.tokenizer.decode(r.encode(prompt))
    assert text == "u=hi<eos>a="
    quiet = renderer("{% if quiet %}q{% else %}l{% endif %}", template_options={"quiet": True})
    assert quiet.decode(quiet.encode(prompt)) == "q"


def test_messages_without_template_and_prompts_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        renderer().encode(Prompt(id="p", messages=(user("hi"),)))
    with pytest.raises(DataError, match="'p' has no tokens"):
        renderer().encode(Prompt(id="p", text=""))


def with_start_and_end(template: str | None) -> Renderer:
    """A tokenizer that begins every text with <unk> and ends it with <eos>."""
    tokenizer = tiny_tokenizer(template)
    tokenizer.bos_token = "<unk>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<unk> $A <eos>", special_tokens=[("<unk>", 2), ("<eos>", EOS)]
    )
    return Renderer(tokenizer)


def test_the_start_token_comes_once_and_no_end_token() -> None:
    plain = with_start_and_end(None)
    assert plain.encode(Prompt(id="p", text="1")) == [2, 4]
    assert plain.encode(Prompt(id="p", text="<unk>1")) == [2, 4]
    assert plain.encode(Prompt(id="p", text="1<eos>")) == [2, 4, EOS]
    chat = with_start_and_end("<unk>{{ messages[0]['content'] }}")
    assert chat.encode(Prompt(id="p", messages=(user("1"),))) == [2, 4]
    assert plain.extend_text("1") == [4]


def test_decoding_leaves_out_end_tokens() -> None:
    r = renderer(end_ids=frozenset({EOS, 5}))
    assert r.decode([4, 5, 4, 5, EOS]) == "121"
    assert r.decode([EOS]) == ""
    assert r.decode([]) == ""


def test_an_answer_is_decoded_once_for_its_reward_and_its_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r, decoded = renderer(), []
    decode = r.tokenizer.decode
    monkeypatch.setattr(
        r.tokenizer, "decode", lambda ids, **options: decoded.append(ids) or decode(ids, **options)
    )
    answers = [[4 + i % 3, 5, EOS] for i in range(6)]
    assert [r.decode(ids) for ids in answers] == ["12", "22", "32"] * 2
    assert r.decode(answers[0][:2]) == "12"
    assert decoded == [[4, 5], [5, 5], [6, 5]]


def test_pad_equal_to_end_is_no_special_case() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    r = Renderer(tokenizer)
    assert r.end_ids == {EOS}
    assert r.decode([4, EOS]) == "1"


@pytest.mark.parametrize(
    ("template", "can_extend"),
    [(KEEPS, True), (STRICT, True), (DROPS, False), ("{{ broken(", False), (None, False)],
)
def test_templates_that_rewrite_old_turns_are_found_out(
    template: str | None, can_extend: bool
) -> None:
    """Case 40."""
    assert renderer(template).can_extend is can_extend


@pytest.mark.parametrize("has_ended", [True, False])
def test_only_the_appended_part_is_encoded(has_ended: bool) -> None:
    r = renderer(KEEPS)
    start = r.encode(Prompt(id="p", messages=(user("hi"),)))
    answer = [4, 5, EOS] if has_ended else [4, 5]
    added = r.extend([*start, *answer], [user("more")], has_ended)
    assert added is not None
    both = r.tokenizer.decode([*start, *answer, *added])
    assert both == "u=hi<eos>a=12<eos>u=more<eos>a="


def test_the_whole_equals_one_rendering_of_the_conversation() -> None:
    r = renderer(KEEPS)
    start = r.encode(Prompt(id="p", messages=(user("hi"),)))
    answer = r.extend_text("12")
    added = r.extend([*start, *answer, EOS], [user("more")], True)
    assert added is not None
    said = [user("hi"), Message(role="assistant", content="12"), user("more")]
    assert [*start, *answer, EOS, *added] == r.encode_messages(said)


def test_what_a_template_refuses_can_not_be_appended() -> None:
    r = renderer(STRICT)
    assert r.extend([4, EOS], [Message(role="tool", content="x")], True) is None
    assert renderer(DROPS).extend([4, EOS], [user("x")], True) is None


def test_given_answers_end_with_the_end_token() -> None:
    text, chat = Prompt(id="p", text="1+1="), Prompt(id="p", messages=(user("1+1="),))
    assert renderer().encode_completion(text, "2") == [5, EOS]
    assert renderer(KEEPS).encode_completion(chat, "2") == [5, EOS]
    newline = KEEPS.replace("<eos>'", "<eos>' + '\\n'")
    assert renderer(newline).encode_completion(chat, "2") == [5, EOS]
