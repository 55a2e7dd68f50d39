from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from paceline.data.loader import load_source
from paceline.data.sources import DataConfig, FileSource
from paceline.errors import DataError

SKIP = DataConfig(on_bad_row="skip")


def load(tmp_path: Path, name: str, content: str | bytes, rules=None, **keys):
    data = content.encode("utf-8") if isinstance(content, str) else content
    (tmp_path / name).write_bytes(data)
    return load_source(FileSource(path=name, **keys), base=tmp_path, rules=rules)


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def texts(prompts) -> list[str | None]:
    return [prompt.text for prompt in prompts.prompts]


def reasons(prompts) -> list[str]:
    return [str(row) for row in prompts.bad_rows]


# JSONL


def test_jsonl_rows_become_prompts(tmp_path):
    prompts = load(tmp_path, "p.jsonl", lines({"prompt": "1+1=", "answer": 2, "level": "easy"}))
    (prompt,) = prompts.prompts
    assert (prompt.text, prompt.answer, prompt.metadata) == ("1+1=", 2, {"level": "easy"})
    assert prompt.source == prompts.name == "p"
    assert prompt.messages is None


def test_bom_crlf_blank_lines_and_a_missing_last_newline_are_accepted(tmp_path):
    content = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b\\u2028c\xe2\x80\xa8d"}'
    prompts = load(tmp_path, "p.jsonl", content)
    assert texts(prompts) == ["a", "b\u2028c\u2028d"]


BROKEN = (
    '{"prompt": "good"}\n'
    '{"prompt": "broken"\n'
    '{"prompt": ""}\n'
    '{"prompt": null}\n'
    '{"prompt": "half \\ud800 character"}\n'
    '{"prompt": 3}\n'
    '["prompt"]\n'
    '{"promt": "misspelt"}\n'
    '{"prompt": "x", "answer": NaN}\n'
    '{"prompt": "good"}\n'
    '{"prompt": "  \\n "}\n'
    '"just text"\n'
    '{"prompt": "also good"}\n'
)


def test_each_kind_of_bad_row_is_named_with_file_line_and_reason(tmp_path):
    prompts = load(tmp_path, "p.jsonl", BROKEN, SKIP)
    assert texts(prompts) == ["good", "also good"]
    found = reasons(prompts)
    assert found[0].startswith("p.jsonl:2: broken JSON: ")
    assert found[1] == "p.jsonl:3: prompt is empty"
    assert found[2] == "p.jsonl:4: prompt is null, not a text or a list of messages"
    assert found[3].startswith("p.jsonl:5: prompt holds a lone surrogate (U+D800) at character 5")
    assert found[4] == "p.jsonl:6: prompt is a number (3), not a text or a list of messages"
    assert found[5] == "p.jsonl:7: is a list, not an object with columns"
    assert found[6] == "p.jsonl:8: no column 'prompt' for the prompt; did you mean 'promt'?"
    assert found[7] == "p.jsonl:9: the answer is not a finite number (NaN or infinity)"
    assert found[8].startswith("p.jsonl:10: duplicate id ")
    assert "first at p.jsonl:1" in found[8]
    assert found[9] == "p.jsonl:11: prompt is empty"
    assert found[10] == "p.jsonl:12: is a text, not an object with columns"
    assert len(found) == 11


def test_bad_rows_fail_by_default_with_the_first_ten_and_the_count(tmp_path):
    with pytest.raises(DataError) as caught:
        load(tmp_path, "p.jsonl", BROKEN)
    message = str(caught.value)
    assert message.startswith("p.jsonl: 11 of 13 rows can not be used:\n  p.jsonl:2: ")
    assert message.count("\n  p.jsonl:") == 10
    assert "and 1 more" in message
    assert 'on_bad_row = "skip"' in message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "broken JSON"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "broken JSON"),
        ('{"prompt": "a", "deep": ' + "[" * 400 + "]" * 400 + "}", None),
        ('{"prompt": "a", "note": "\\udfff"}', "note holds a lone surrogate"),
        ('{"prompt": "a", "note": {"k": ["\\udfff"]}}', "note.k[0] holds a lone surrogate"),
        ('{"prompt": "a", "\\ud800": 1}', "a key of the row holds a lone surrogate"),
        ('{"prompt": "a", "answer": [1, Infinity]}', "the answer is not a finite number"),
        ('{"prompt": "a", "loss": NaN}', None),
        ('{"prompt": "\\ud83d\\ude00"}', None),
        ('{"prompt": true}', "prompt is a boolean (true)"),
        (
            '{"prompt": "a", "prompt": "b"}',
            "broken JSON: the key 'prompt' stands in an object twice",
        ),
        (
            '{"prompt": "a", "note": {"k": 1, "k": 1}}',
            "broken JSON: the key 'k' stands in an object twice",
        ),
        ('{"prompt": {"text": "a"}}', "prompt is an object"),
    ],
)
def test_single_lines(tmp_path, line, reason):
    prompts = load(tmp_path, "p.jsonl", lines({"prompt": "other"}) + line, SKIP)
    if reason is None:
        assert prompts.bad_rows == ()
        assert len(prompts) == 2
    else:
        (bad,) = prompts.bad_rows
        assert bad.where == "p.jsonl:2"
        assert bad.reason.startswith(reason)


def test_skipping_every_row_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"none of 2 rows is left: 2 are bad.*p.jsonl:1: prompt"):
        load(tmp_path, "p.jsonl", lines({"prompt": ""}, {"prompt": None}), SKIP)


def test_a_hundred_thousand_rows_load_in_seconds(tmp_path):
    rows = (json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(100_000))
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    start = time.process_time()
    prompts = load_source(FileSource(path="p.jsonl"), base=tmp_path)
    assert len(prompts) == 100_000
    assert time.process_time() - start < 10


# Whole files


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "p.jsonl",
            b'{"prompt": "a"}\n{"prompt": "\xff"}\n',
            r"p.jsonl:2: is not UTF-8 \(byte 0xff",
        ),
        ("p.jsonl", b"\xef\xbb\xbfab\xff", r"at offset 5"),
        ("p.jsonl", '{"prompt": "a"}'.encode("utf-16"), "is UTF-16"),
        ("p.jsonl", b"\xed\xa0\x80", "is not UTF-8"),
        ("p.jsonl", b"", "p.jsonl: holds no rows"),
        ("p.jsonl", b"\n \r\n", "p.jsonl: holds no rows"),
        ("p.json", b"", "p.json: holds no rows"),
        ("p.json", b"[]", "p.json: holds no rows"),
        ("p.csv", b"", "p.csv: holds no rows"),
        ("p.csv", b"prompt,answer\n", "p.csv: holds no rows"),
        ("p.txt", b"a", "can not tell the format by the suffix '.txt'"),
        ("p.parquet", b"not parquet", "can not be read as Parquet"),
        ("p.json", b'{"prompt": "a"}\n{"prompt": "b"}', r'p.json:2: broken JSON.*format = "jsonl"'),
        ("p.json", b'[{"prompt": "a"},]', r"p.json:1: broken JSON"),
        ("p.json", b'{"rows": []}', "an object with the keys 'rows'"),
        ("p.json", b"3", r"p.json: is a number \(3\)"),
        ("p.csv", b"prompt,prompt\na,b\n", "names the column 'prompt' twice"),
    ],
)
def test_unusable_files(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path, name, content)


def test_a_missing_file_suggests_the_nearest_name(tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(DataError, match=r"tarin.jsonl: no such file.*did you mean 'train.jsonl'"):
        load_source(FileSource(path="tarin.jsonl"), base=tmp_path)
    with pytest.raises(DataError, match=r"the folder .*nowhere does not exist"):
        load_source(FileSource(path="nowhere/a.jsonl"), base=tmp_path)
    with pytest.raises(DataError, match="is a folder"):
        load_source(FileSource(path="."), base=tmp_path)


def test_format_overrides_the_suffix(tmp_path):
    prompts = load(tmp_path, "p.txt", lines({"prompt": "a"}), format="jsonl")
    assert texts(prompts) == ["a"]


# JSON


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"version": 1, "data": rows}])
def test_json_lists_and_data_objects(tmp_path, wrap):
    rows = [{"prompt": "a"}, {"prompt": ""}, "text", {"prompt": "b"}]
    prompts = load(tmp_path, "p.json", json.dumps(wrap(rows)), SKIP)
    assert texts(prompts) == ["a", "b"]
    assert reasons(prompts) == [
        "p.json[1]: prompt is empty",
        "p.json[2]: is a text, not an object with columns",
    ]


# CSV


def test_csv_lines_are_those_of_the_file(tmp_path):
    content = (
        '\ufeffprompt,answer\r\n"two\r\nlines, ""quoted""",1\r\n'
        '\r\n,2\r\na,b,c\r\n"x"y,3\r\nlast,4\r\n'
    )
    prompts = load(tmp_path, "p.csv", content, SKIP)
    assert [(p.text, p.answer) for p in prompts.prompts] == [
        ('two\r\nlines, "quoted"', "1"),
        ("last", "4"),
    ]
    assert reasons(prompts)[:2] == [
        "p.csv:5: prompt is empty",
        "p.csv:6: has 3 fields; the header has 2",
    ]
    assert reasons(prompts)[2].startswith("p.csv:7: broken CSV: ")


def test_csv_fields_may_be_long(tmp_path):
    assert texts(load(tmp_path, "p.csv", "prompt\n" + "x" * 200_000)) == ["x" * 200_000]


def test_an_open_quote_at_the_end_is_a_bad_row(tmp_path):
    prompts = load(tmp_path, "p.csv", 'prompt\nok\n"open\nand on\n', SKIP)
    assert reasons(prompts) == ["p.csv:3: broken CSV: unexpected end of data"]


# Parquet


def test_parquet_rows(tmp_path):
    table = pyarrow.table(
        {
            "messages": [[{"role": "user", "content": "hi"}], [], None],
            "answer": ["1", "2", "3"],
            "when": pyarrow.array([0, 1, 2], pyarrow.timestamp("s")),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    prompts = load_source(FileSource(path="p.parquet"), base=tmp_path, rules=SKIP)
    (prompt,) = prompts.prompts
    assert prompt.messages == ({"role": "user", "content": "hi"},)
    assert prompt.metadata == {"when": "1970-01-01T00:00:00"}
    assert reasons(prompts) == [
        "p.parquet[1]: messages is empty",
        "p.parquet[2]: messages is null, not a text or a list of messages",
    ]


# Slices


@pytest.mark.parametrize(
    ("cut", "expected"),
    [("0:2", "ab"), ("[3:]", "de"), (":1", "a"), ("-2:", "de"), (":-3", "ab"), ("1:-1", "bcd")],
)
def test_slices_take_rows(tmp_path, cut, expected):
    content = lines(*({"prompt": c} for c in "abcde"))
    assert texts(load(tmp_path, "p.jsonl", content, slice=cut)) == list(expected)


def test_rows_outside_a_slice_are_not_judged(tmp_path):
    prompts = load(tmp_path, "p.jsonl", BROKEN, slice="12:")
    assert texts(prompts) == ["also good"]


def test_an_empty_slice_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"p.jsonl: slice '5:9' leaves no row"):
        load(tmp_path, "p.jsonl", lines({"prompt": "a"}), slice="5:9")
