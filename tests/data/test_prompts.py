from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest

from paceline.data.prompts import Fit, prompts_from_rows, supervised_pair
from paceline.data.sources import DataConfig, Table
from paceline.errors import ConfigError, DataError
from paceline.types import Prompt

USER = {"role": "user", "content": "2+2?"}
SYSTEM = {"role": "system", "content": "Be short."}
ASSISTANT = {"role": "assistant", "content": "4"}
SKIP = DataConfig(on_bad_row="skip")


def reason(row, rules=SKIP, **keys) -> str:
    """Why a row is bad."""
    prompts = prompts_from_rows(["good", row], "rows", rules=rules, **keys)
    (bad,) = prompts.bad_rows
    assert bad.where == "rows[1]"
    return bad.reason


def only(row, **keys) -> Prompt:
    (prompt,) = prompts_from_rows([row], **keys).prompts
    return prompt


# Kinds of rows


def test_texts_dictionaries_and_prompts():
    prompts = prompts_from_rows(
        ["a", {"prompt": "b", "answer": 1, "id": 7}, Prompt(id="mine", text="c", source="old")],
        "rows",
    )
    assert [p.text for p in prompts.prompts] == ["a", "b", "c"]
    assert {p.source for p in prompts.prompts} == {"rows"}
    assert prompts.prompts[1].metadata == {"id": 7}
    assert prompts.prompts[2].id == "mine"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (3, "is a number (3), not an object"),
        (None, "is null, not an object"),
        (["a"], "is a list, not an object"),
        (Prompt(id="a"), "a Prompt has either `text` or `messages`"),
        (Prompt(id="a", text=" "), "prompt is empty"),
        (Prompt(id=3, text="a"), "the id of a Prompt is a number (3)"),
        ({"prompt": "a", "blob": b"x"}, "blob holds a bytes, which is no JSON value"),
        ({"prompt": "a", "set": {1}}, "set holds a set, which is no JSON value"),
        ({"prompt": "a", 3: 1, "s": {2}}, "the row has the key 3, which is not a text"),
        ({"prompt": "a", "answer": float("nan")}, "the answer is not a finite number"),
    ],
)
def test_rows_in_memory_are_judged_alike(row, expected):
    assert reason(row).startswith(expected)


def test_values_become_json():
    numpy = pytest.importorskip("numpy")
    row = {
        "prompt": "a",
        "answer": numpy.int64(3),
        "array": numpy.arange(2),
        "day": date(2024, 2, 29),
        "exact": Decimal("0.10"),
    }
    prompt = only(row)
    assert prompt.answer == 3
    assert type(prompt.answer) is int
    assert prompt.metadata == {"array": [0, 1], "day": "2024-02-29", "exact": "0.10"}


# Columns


def test_columns_can_be_named():
    columns = Table(prompt_key="q", answer_key="a", id_key="n", metadata_keys=("level",))
    row = {"q": "1+1=", "a": "2", "n": 5, "level": 1, "junk": object()}
    prompt = only(row, columns=columns)
    assert (prompt.id, prompt.text, prompt.answer) == ("5", "1+1=", "2")
    assert prompt.metadata == {"level": 1}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"prompt_key": "question"},
            "no column 'question' for the prompt; did you mean 'questions'?",
        ),
        ({"answer_key": "anser"}, "no column 'anser' for the answer; did you mean 'answer'?"),
        ({"id_key": "uid"}, "no column 'uid' for the id; there is 'answer', 'prompt', 'questions'"),
        ({"completion_key": "text"}, "no column 'text' for the completion"),
    ],
)
def test_a_named_column_must_be_there(columns, expected):
    row = {"prompt": "a", "answer": 1, "questions": "b"}
    rows = [{"prompt": "g", "question": "g", "anser": 1, "uid": 1, "text": "t"}, row]
    prompts = prompts_from_rows(rows, "rows", columns=Table(**columns), rules=SKIP)
    assert [b.reason for b in prompts.bad_rows][-1].startswith(expected)


def test_answers_may_be_absent_or_null_by_default():
    assert only({"prompt": "a"}).answer is None
    assert only({"prompt": "a", "answer": None}).answer is None


# Ids


def test_ids_come_from_the_content_alone():
    first = prompts_from_rows(["a", "b", "c"], "one").prompts
    second = prompts_from_rows(["c", "a"], "two", rules=DataConfig(template="chat")).prompts
    assert [p.id for p in second] == [first[2].id, first[0].id]
    assert only({"prompt": "a"}).id == first[0].id
    assert len({only({"prompt": "a", "answer": k}).id for k in (None, 1, "1", 1.5)}) == 4


def test_ids_are_stable_over_releases():
    assert only({"prompt": "1+1=", "answer": "2"}).id == "ac159eaec1099146"


def test_ids_do_not_depend_on_the_order_of_columns():
    assert only({"prompt": "a", "x": 1, "y": 2}).id == only({"y": 2, "x": 1, "prompt": "a"}).id


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "id 'id' is null"),
        (1.5, "id 'id' is a number (1.5)"),
        (True, "id 'id' is a boolean"),
        (" ", "id 'id' is empty"),
        ("\ud800", "id holds a lone surrogate"),
        ("first", "duplicate id 'first', first at rows[0]"),
    ],
)
def test_bad_ids(value, expected):
    rows = [{"prompt": "a", "id": "first"}, {"prompt": "b", "id": value}]
    prompts = prompts_from_rows(rows, "rows", columns=Table(id_key="id"), rules=SKIP)
    (bad,) = prompts.bad_rows
    assert bad.reason.startswith(expected)


# Messages


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "messages is empty"),
        (["hi"], "messages[0] is a text, not a message"),
        ([{"from": "human", "value": "hi"}], "messages[0] has the keys 'from', 'value'"),
        (
            [{"role": "usr", "content": "hi"}],
            "messages[0] has the role 'usr'; did you mean 'user'?",
        ),
        ([{"role": 3, "content": "hi"}], "messages[0] has the role a number (3)"),
        ([{"role": "user", "content": None}], "the content of messages[0] is null"),
        ([{"role": "user", "content": [{"type": "text"}]}], "the content of messages[0] is a list"),
        ([SYSTEM, {"role": "user", "content": " "}], "the content of messages[1] is empty"),
        ([{"role": "user", "content": "\udc00"}], "messages[0].content holds a lone surrogate"),
        ([USER, ASSISTANT], "the last message is the assistant's"),
    ],
)
def test_messages_are_checked(messages, expected):
    assert reason({"messages": messages}).startswith(expected)


def test_messages_keep_other_keys():
    message = {"role": "user", "content": "hi", "name": "Ann"}
    assert only({"messages": [message]}).messages == (message,)
    assert only({"prompt": [message]}).messages == (message,)


# Template, system message, length


@pytest.mark.parametrize(
    ("template", "row", "text", "messages"),
    [
        ("auto", "2+2?", "2+2?", None),
        ("auto", {"messages": [USER]}, None, (USER,)),
        ("chat", "2+2?", None, (USER,)),
        ("chat", {"messages": [USER]}, None, (USER,)),
        ("plain", "2+2?", "2+2?", None),
    ],
)
def test_templates(template, row, text, messages):
    prompt = only(row, rules=DataConfig(template=template))
    assert (prompt.text, prompt.messages) == (text, messages)


def test_messages_can_not_be_made_plain():
    rules = DataConfig(template="plain", on_bad_row="skip")
    assert 'template = "plain" takes only texts' in reason({"messages": [USER]}, rules)


def test_a_system_message_is_put_first_unless_there_is_one():
    rules = DataConfig(system="Be kind.", template="chat")
    kind = {"role": "system", "content": "Be kind."}
    assert only("2+2?", rules=rules).messages == (kind, USER)
    assert only({"messages": [SYSTEM, USER]}, rules=rules).messages == (SYSTEM, USER)


def test_a_system_message_is_never_silently_unused():
    with pytest.raises(DataError, match="`system` is set but the prompt is a text"):
        prompts_from_rows(["a"], rules=DataConfig(system="Be kind."))


def test_the_length_filter_sees_the_shaped_prompt():
    seen = []

    def length(prompt: Prompt) -> int:
        seen.append(prompt)
        return sum(len(m["content"]) for m in prompt.messages)

    rules = DataConfig(template="chat", system="12345", max_prompt_tokens=7)
    prompts = prompts_from_rows(["ab", "abc", "a"], rules=rules, fit=Fit(length))
    assert [p.messages[-1]["content"] for p in prompts.prompts] == ["ab", "a"]
    assert prompts.num_filtered == 1
    assert len(seen) == 3


def test_a_filter_that_drops_everything_is_an_error():
    rules = DataConfig(max_prompt_tokens=1)
    with pytest.raises(DataError, match=r"none of 2 rows is left: 2 have more tokens.*= 1"):
        prompts_from_rows(["ab", "abc"], rules=rules, fit=Fit(lambda prompt: 5))


def test_a_prompt_that_can_not_be_tokenized_is_a_bad_row():
    def refuse(prompt: Prompt) -> int:
        if prompt.text == "good":
            return 1
        if prompt.text == "chat":
            raise ConfigError("no chat template")
        raise LookupError("roles must alternate")

    fit = Fit(refuse)
    assert reason("bad", fit=fit) == "can not be tokenized: LookupError: roles must alternate"
    assert reason("chat", fit=fit) == "no chat template"
    with pytest.raises(DataError, match=r"rows\[0\]: no chat template"):
        prompts_from_rows(["chat", "good"], "rows", fit=fit)


def test_a_prompt_without_room_for_an_answer_is_a_bad_row():
    fit = Fit(lambda prompt: len(prompt.text or ""), context=5)
    assert len(prompts_from_rows(["1234", "good"], fit=fit)) == 2
    assert "has 5 tokens, and the context of 5 leaves no room" in reason("12345", fit=fit)
    with pytest.raises(DataError, match=r"rows\[1\]: has 5 tokens"):
        prompts_from_rows(["1234", "12345"], "rows", fit=fit)


def test_a_prompt_over_both_limits_is_filtered():
    fit = Fit(lambda prompt: len(prompt.text or ""), context=6)
    rules = DataConfig(max_prompt_tokens=4)
    prompts = prompts_from_rows(["1234", "123456789"], rules=rules, fit=fit)
    assert (len(prompts), prompts.num_filtered, prompts.bad_rows) == (1, 1, ())


def test_a_set_that_keeps_all_is_not_filtered():
    fit = Fit(lambda prompt: len(prompt.text or ""), keeps_all=True)
    rules = DataConfig(max_prompt_tokens=4, on_bad_row="skip")
    found = reason("12345", rules, fit=fit)
    assert found.startswith("has 5 tokens, more than data.max_prompt_tokens = 4")


def test_no_rows_at_all():
    with pytest.raises(DataError, match="prompts: holds no rows"):
        prompts_from_rows([])


# Fingerprints


def test_fingerprints_tell_content_order_ids_and_shape():
    def fingerprint(rows, **keys):
        return prompts_from_rows(rows, **keys).fingerprint

    base = fingerprint(["a", "b"])
    assert fingerprint(["a", "b"], name="other name") == base
    assert fingerprint(["a", "", "b"], rules=SKIP) == base
    others = {
        fingerprint(["b", "a"]),
        fingerprint(["a"]),
        fingerprint(["a", {"prompt": "b", "answer": 1}]),
        fingerprint(["a", {"prompt": "b", "extra": 1}]),
        fingerprint(["a", Prompt(id="b", text="b")]),
        fingerprint(["a", "b"], rules=DataConfig(template="chat")),
        fingerprint(["a", "b"], rules=DataConfig(template="chat", system="s")),
    }
    assert len(others) == 7
    assert base not in others


# Supervised rows


@pytest.mark.parametrize(
    ("row", "context", "completion"),
    [
        ({"prompt": "2+2=", "completion": "4"}, "2+2=", "4"),
        ({"messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER], "4"),
        ({"prompt": [USER], "completion": "4"}, [USER], "4"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER], "4"),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, [USER, ASSISTANT, USER], "4"),
    ],
)
def test_supervised_pairs(row, context, completion):
    prompt = only(row, supervised=True)
    found, learned = supervised_pair(prompt)
    assert learned == completion
    assert found.id == prompt.id
    shown = found.text if found.messages is None else list(found.messages)
    assert shown == context


def test_the_completion_column_can_be_named():
    columns = Table(completion_key="target")
    prompt = only({"prompt": "a", "target": "b"}, columns=columns, supervised=True)
    assert supervised_pair(prompt)[1] == "b"
    assert prompt.metadata == {"completion": "b"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a"}, "no completion to learn from"),
        ({"prompt": "a", "completion": None}, "no completion to learn from"),
        ({"prompt": "a", "completion": " "}, "completion is empty"),
        ({"prompt": "a", "completion": 4}, "completion is a number (4)"),
        ({"prompt": [USER], "completion": [USER]}, "completion[0] has the role 'user'"),
        ({"messages": [USER]}, "no completion to learn from"),
        ({"messages": [ASSISTANT]}, "the message of the assistant answers nothing"),
        ({"messages": [SYSTEM, ASSISTANT]}, "the message of the assistant answers nothing"),
        ({"messages": [USER, ASSISTANT], "completion": "5"}, "has a completion, but its messages"),
    ],
)
def test_rows_without_a_pair_are_bad_rows(row, expected):
    good = {"prompt": "g", "completion": "g"}
    prompts = prompts_from_rows([good, row], "rows", rules=SKIP, supervised=True)
    (bad,) = prompts.bad_rows
    assert str(bad).startswith(f"rows[1]: {expected}")


def test_supervised_pair_names_the_prompt():
    with pytest.raises(DataError, match="prompt 'a-1' of 'rows': no completion"):
        supervised_pair(Prompt(id="a-1", text="x", source="rows"))


def test_the_length_filter_sees_the_context_of_supervised_rows():
    rules = DataConfig(max_prompt_tokens=1)
    rows = [{"messages": [USER, ASSISTANT]}, {"messages": [SYSTEM, USER, ASSISTANT]}]
    prompts = prompts_from_rows(
        rows, rules=rules, fit=Fit(lambda prompt: len(prompt.messages or ())), supervised=True
    )
    assert (len(prompts), prompts.num_filtered) == (1, 1)


def test_a_supervised_row_must_fit_with_its_completion() -> None:
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "ab", "completion": "cde"}]
    fit = Fit(
        lambda prompt: len(prompt.text or ""),
        context=5,
        completion_length=lambda _, completion: len(completion) + 1,
    )
    with pytest.raises(DataError, match=r"rows\[1\].*2 tokens and 4 in its completion.*of 5"):
        prompts_from_rows(rows, "rows", fit=fit, supervised=True)
    assert len(prompts_from_rows(rows[:1], "rows", fit=fit, supervised=True)) == 1
