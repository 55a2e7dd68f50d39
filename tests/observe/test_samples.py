from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import pytest
from crashing import Crash, CrashingFiles, FastFiles

from paceline.errors import DataError, PacelineError
from paceline.observe.files import Files
from paceline.observe.samples import (
    SampleWriter,
    as_float32,
    compress,
    eval_folder,
    eval_names,
    find_samples,
    read_samples,
)
from paceline.types import Episode, Group, Prompt, Sample, Status


def make_sample(episode: int = 0, **changes: object) -> Sample:
    fields: dict[str, object] = {
        "policy": "policy",
        "prompt_id": "p1",
        "episode": episode,
        "tokens": [5, 6, 7, 2],
        "mask": [False, False, True, True],
        "logprobs": [0.0, 0.0, -0.123456789, -2.0],
        "versions": [-1, -1, 4, 5],
        "status": Status.COMPLETED,
        "reward": 0.1 + 0.2,
        "reward_parts": {"exact": 0.3},
        "text": "ab",
        "finish": "stop",
    }
    return Sample(**(fields | changes))  # type: ignore[arg-type]


def make_group(*samples: Sample, draw: int = 7, prompt: Prompt | None = None) -> Group:
    episodes = [Episode("p1", sample.episode, [sample]) for sample in samples]
    return Group(prompt or Prompt("p1", text="1+1="), episodes, draw)


def writer(folder: Path, limit: int | None = None, files: Files | None = None) -> SampleWriter:
    return SampleWriter(folder / "samples", limit, files or FastFiles())


def test_a_sample_comes_back_as_it_was(tmp_path: Path) -> None:
    group = make_group(make_sample())
    path = writer(tmp_path).write(12, [group], [[0.0, 0.0, 1.5, 1.5]])
    assert path == tmp_path / "samples" / "step-000012.jsonl.gz"
    (record,) = read_samples(path)
    assert record.prompt_id == "p1"
    assert (record.draw, record.episode, record.row) == (7, 0, 0)
    assert (record.role, record.policy) == ("policy", "policy")
    assert (record.status, record.finish, record.cause) == ("completed", "stop", None)
    assert record.reward == 0.1 + 0.2, "rewards are exact"
    assert record.parts == {"exact": 0.3}
    assert record.advantage == 1.5
    assert record.versions == [4, 5]
    assert record.num_tokens == 2
    assert (record.text, record.prompt) == ("ab", "1+1=")
    assert record.tokens == [5, 6, 7, 2]
    assert record.mask_runs == [2, 2]
    assert record.mask == [False, False, True, True]
    assert record.logprobs == [-0.123456791, -2.0]
    assert record.dropped is None
    assert record.temperature == 1.0
    assert record.token_versions == [4, 5]
    assert record.extra == {}


def test_logprobs_are_exact_as_float32() -> None:
    tiny, odd = 1.401298464324817e-45, struct.unpack("f", struct.pack("f", -0.1 / 3))[0]
    given = [-odd, odd * 1e-7, tiny, 0.0, -1e30, float("-inf"), -1.0000001192092896]
    exact = [struct.unpack("f", struct.pack("f", value))[0] for value in given]
    found = as_float32(given)
    assert [struct.unpack("f", struct.pack("f", value))[0] for value in found] == exact
    assert as_float32([0.1 + 0.2]) == [0.300000012]


def test_versions_of_tokens_come_back_in_their_runs(tmp_path: Path) -> None:
    """Case 45: the version of each token is kept."""
    mask = [False, True, True, False, True, True]
    mixed = make_sample(
        tokens=[1] * 6, mask=mask, logprobs=[0.0] * 6, versions=[-1, 3, 3, -1, 4, 3]
    )
    (record,) = read_samples(writer(tmp_path).write(1, [make_group(mixed)]))
    assert record.version_runs == [[3, 2], [4, 1], [3, 1]]
    assert record.token_versions == [3, 3, 4, 3]
    same = make_sample(versions=[-1, -1, 6, 6])
    (record,) = read_samples(writer(tmp_path).write(1, [make_group(same)]))
    assert record.version_runs is None
    assert record.token_versions == [6, 6]


def test_answers_to_eval_sets_lie_beside_the_samples_of_training(tmp_path: Path) -> None:
    training = writer(tmp_path)
    training.write(2, [make_group(make_sample())])
    for step in (0, 2, 4):
        training.of_eval("held.out").write(step, [make_group(make_sample(text=f"at {step}"))])
    folder = tmp_path / "samples"
    assert eval_names(folder) == ["held.out"]
    step, path = find_samples(eval_folder(folder, "held.out"))
    assert (step, read_samples(path)[0].text) == (4, "at 4")
    assert find_samples(folder)[0] == 2
    training.start(2)
    assert find_samples(eval_folder(folder, "held.out"))[0] == 2


def test_masks_with_several_runs_come_back(tmp_path: Path) -> None:
    masks = [[False, True, False, False, True], [True], [False], [], [False, True, True]]
    samples = [
        make_sample(
            i,
            tokens=[3] * len(mask),
            mask=mask,
            logprobs=[-1.0] * len(mask),
            versions=[2] * len(mask),
        )
        for i, mask in enumerate(masks)
    ]
    records = read_samples(writer(tmp_path).write(1, [make_group(*samples)]))
    assert [record.mask for record in records] == masks
    assert [len(record.logprobs) for record in records] == [sum(mask) for mask in masks]


def test_failed_samples_and_messages_are_kept_too(tmp_path: Path) -> None:
    failed = make_sample(
        tokens=[5], mask=[False], logprobs=[0.0], versions=[-1],
        status=Status.FAILED, reward=None, cause="timeout", text="x\ud800",
        detail="no result after 10 s",
    )  # fmt: skip
    prompt = Prompt(
        "p1",
        messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}),
    )
    path = writer(tmp_path).write(1, [make_group(failed, prompt=prompt)], [[0.0]])
    (record,) = read_samples(path)
    assert (record.status, record.cause, record.reward) == ("failed", "timeout", None)
    assert record.detail == "no result after 10 s"
    assert (record.versions, record.advantage, record.num_tokens) == ([], None, 0)
    assert record.text == "x\ud800"
    assert record.prompt == "system: be brief\nuser: 1+1"


def test_token_advantages_that_differ_are_a_list_and_odd_numbers_survive(tmp_path: Path) -> None:
    sample = make_sample(reward=float("inf"), reward_parts={"a": float("-inf")})
    (record,) = read_samples(writer(tmp_path).write(1, [make_group(sample)], [[0, 0, 1.0, 2.0]]))
    assert record.advantage == [1.0, 2.0]
    assert record.reward == float("inf")
    assert record.parts == {"a": float("-inf")}


def test_dropped_groups_have_their_reason(tmp_path: Path) -> None:
    path = writer(tmp_path).write(
        1, [make_group(make_sample())], [[0.0, 0.0, 1.0, 1.0]],
        dropped=[(make_group(make_sample(1)), "zero_variance")],
    )  # fmt: skip
    assert [(r.episode, r.dropped) for r in read_samples(path)] == [(0, None), (1, "zero_variance")]


def test_one_policy_and_a_limit(tmp_path: Path) -> None:
    samples = [make_sample(i, policy="ab"[i % 2]) for i in range(6)]
    path = writer(tmp_path, limit=2).write(1, [make_group(*samples)], policy="b")
    assert [record.episode for record in read_samples(path)] == [1, 3]


def test_bytes_depend_on_the_samples_alone(tmp_path: Path) -> None:
    paths = [
        writer(tmp_path / name).write(step, [make_group(make_sample(), make_sample(1))])
        for name, step in (("a", 1), ("b", 2))
    ]
    data = [path.read_bytes() for path in paths]
    assert data[0] == data[1]
    assert data[0][3:8] == b"\0\0\0\0\0", "no name and no time in the header"


def test_a_wrong_number_of_advantages_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        writer(tmp_path).write(1, [make_group(make_sample())], [])


@pytest.mark.parametrize("half_done", [False, True])
def test_a_crash_leaves_the_old_file_or_the_new_one(half_done: bool, tmp_path: Path) -> None:
    for at in range(10):
        folder = tmp_path / f"{at}"
        old = writer(folder).write(1, [make_group(make_sample(text="old"))])
        files = CrashingFiles(at, half_done=half_done)
        try:
            writer(folder, files=files).write(1, [make_group(make_sample(text="new"))])
        except Crash:
            assert read_samples(old)[0].text in {"old", "new"}
            writer(folder).start(1)
            assert [p.name for p in old.parent.iterdir()] == [old.name]
        else:
            assert at == 4
            return


def test_a_resume_removes_the_files_of_later_steps(tmp_path: Path) -> None:
    keeper = writer(tmp_path)
    for step in (1, 2, 3):
        keeper.write(step, [make_group(make_sample())])
    (tmp_path / "samples" / "notes.txt").write_text("mine")
    keeper.start(2)
    names = sorted(p.name for p in (tmp_path / "samples").iterdir())
    assert names == ["notes.txt", "step-000001.jsonl.gz", "step-000002.jsonl.gz"]


def test_a_missing_step_names_the_nearest_one(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    with pytest.raises(DataError, match="no samples in"):
        find_samples(folder)
    for step in (10, 20, 30):
        writer(tmp_path).write(step, [make_group(make_sample())])
    assert find_samples(folder)[0] == 30
    assert find_samples(folder, 20) == (20, folder / "step-000020.jsonl.gz")
    with pytest.raises(DataError, match=r"nearest step is 20 \(there are 3, from 10 to 30\)"):
        find_samples(folder, 24)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    groups = [make_group(*[make_sample(i, text=f"{i * 7919}") for i in range(30)])]
    path = writer(tmp_path).write(1, groups)
    data = path.read_bytes()
    for damaged in (data[:-1], data[: len(data) // 2], b"", b"text", data[:40] + b"\0" + data[41:]):
        path.write_bytes(damaged)
        if damaged:
            with pytest.raises(DataError, match=r"step-000001\.jsonl\.gz is damaged"):
                read_samples(path)
    path.write_bytes(compress(b'{"prompt_id": "p"}\n'))
    with pytest.raises(DataError, match="line 1 is no sample"):
        read_samples(path)
    path.unlink()
    with pytest.raises(DataError, match="does not exist"):
        read_samples(path)


def test_keys_of_a_later_version_are_kept(tmp_path: Path) -> None:
    path = writer(tmp_path).write(1, [make_group(make_sample())])
    item = json.loads(gzip.decompress(path.read_bytes()))
    path.write_bytes(compress(json.dumps(item | {"new": 1}).encode()))
    assert read_samples(path)[0].extra == {"new": 1}


class FullDisk(Files):
    def write(self, path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="No space left"):
        writer(tmp_path, files=FullDisk()).write(1, [])
