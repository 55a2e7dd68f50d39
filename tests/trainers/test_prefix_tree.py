"""Shared prefixes change how much is computed, and no number."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import transformers
from architectures import ARCHITECTURES, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from trainer_rows import (
    VOCAB,
    PlainPolicyGradient,
    assert_close,
    gradients,
    make_trainer,
    model64,
    random_rows,
)

from paceline.trainers.forward import CausalForward
from paceline.trainers.layout import MAX_NODE_SHARE, input_lengths, plan_trees
from paceline.trainers.prefix_tree import grow, make_tree
from paceline.trainers.sharing import why_not_shared
from paceline.types import Row

CPU = torch.device("cpu")
FULL = PlainPolicyGradient(kl_coef=0.3, entropy_coef=0.2)
UNFIT = ("mistral, sliding window 4", "gemma2, capped logits")
CLOSE = 1e-6
"""Norms and rotary embeddings are computed in float32 whatever the model's type, so the gradients
of a node's copies are rounded before they are added up in whole rows, and after it in a tree."""
IN_FLOAT32 = {"mixtral": 1e-5}

tokens = st.lists(st.integers(3, 5), min_size=1, max_size=7)


def grouped_rows(seed: int = 0, groups: int = 4, samples: int = 4) -> list[Row]:
    """Samples of a prompt: equal answers, answers that part late, answers cut short, two turns."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for group in range(groups):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 12))
        answer = rng.integers(3, VOCAB, 10)
        for sample in range(samples):
            parted = int(rng.integers(0, 10))
            own = np.append(answer[:parted], rng.integers(3, VOCAB, rng.integers(0, 6)))
            tokens_T = np.concatenate([prompt, own if len(own) else answer[:1]])
            length = len(tokens_T)
            mask_T = np.arange(length) >= len(prompt)
            if sample == 3:
                mask_T[len(prompt) :] = rng.random(length - len(prompt)) < 0.6
                mask_T[-1] = True
            columns = rng.normal(size=(4, length)) * mask_T
            rows.append(
                Row(
                    tokens_T=tokens_T,
                    mask_T=mask_T,
                    weights_T=mask_T / 100.0,
                    advantages_T=columns[0],
                    behaviour_logprobs_T=(-3 - np.abs(columns[1])) * mask_T,
                    old_logprobs_T=(-4 + 0.3 * columns[2]) * mask_T,
                    reference_logprobs_T=(-4 + 0.3 * columns[3]) * mask_T,
                    temperature=[1.0, 0.7][group % 2],
                    episode=(f"p{group}", sample),
                )
            )
    return rows


def full_trainer(share_prefix: bool, **settings):
    model = settings.pop("model", None)
    return make_trainer(
        model,
        algorithm=FULL,
        reference=model64(seed=7),
        share_prefix=share_prefix,
        **settings,
    )


@pytest.fixture
def always(monkeypatch):
    """Trees wherever they are possible, whether they pay or not."""
    monkeypatch.setattr("paceline.trainers.layout.MAX_NODE_SHARE", 1.0)


@given(st.lists(tokens, min_size=1, max_size=8))
def test_paths_hold_the_rows_and_nodes_are_distinct_prefixes(rows):
    inputs = [np.array(row) for row in rows]
    nodes = grow(inputs)
    for row, path in zip(rows, nodes.paths_BT, strict=True):
        assert nodes.tokens_M[path[: len(row)]].tolist() == row
        assert nodes.positions_M[path[: len(row)]].tolist() == list(range(len(row)))
    prefixes = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    assert len(nodes.tokens_M) == len(prefixes)
    inner = {prefix[:-1] for prefix in prefixes}
    leaves = {tuple(rows[i]) for i in nodes.leaves}
    assert leaves == prefixes - inner
    assert len(leaves) == len(nodes.leaves)


@given(st.lists(tokens, min_size=1, max_size=8))
def test_each_node_is_found_again_behind_attention(rows):
    nodes = grow([np.array(row) for row in rows])
    tree = make_tree(nodes, CPU)
    spread = torch.cat([block.nodes_RL for block in tree.blocks])
    assert spread[tree.outputs_M].tolist() == list(range(len(nodes.tokens_M)))


def test_rows_of_attention_are_padded_in_blocks_of_similar_length():
    rng = np.random.default_rng(0)
    inputs = [rng.integers(0, 1000, n) for n in (1200, 10, 1100, 12, 1199)]
    tree = make_tree(grow(inputs), CPU)
    assert [block.num_rows for block in tree.blocks] == [3, 2]
    assert [len(block.nodes_RL) for block in tree.blocks] == [3 * 1200, 2 * 12]


@pytest.mark.usefixtures("always")
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.sampled_from([1, 30, 100, 8192]))
def test_loss_gradients_and_metrics_are_those_of_whole_rows(seed, budget):
    rows = grouped_rows(seed)
    metrics, expected = gradients(full_trainer(False), rows)
    trainer = full_trainer(True, max_tokens_per_micro_batch=budget, logprob_chunk_tokens=7)
    found_metrics, found = gradients(trainer, rows)
    assert found_metrics == pytest.approx(metrics, rel=CLOSE, abs=CLOSE)
    assert_close(found, expected, CLOSE)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in UNFIT])
def test_every_architecture_that_shares_has_the_gradients_of_whole_rows(name):
    rows = grouped_rows(seed=3)
    trainers = [full_trainer(share, model=small_model(name)) for share in (False, True)]
    assert trainers[1]._core.trained.shares_prefixes
    (metrics, expected), (found_metrics, found) = (gradients(t, rows) for t in trainers)
    tolerance = IN_FLOAT32.get(name, CLOSE)
    assert found_metrics == pytest.approx(metrics, rel=tolerance, abs=tolerance)
    assert_close(found, expected, tolerance)


@pytest.mark.parametrize("name", UNFIT)
def test_windows_and_other_attention_see_rows_whole(name):
    trainer = full_trainer(True, model=small_model(name))
    assert not trainer._core.trained.shares_prefixes
    rows = grouped_rows()
    metrics, expected = gradients(full_trainer(False, model=small_model(name)), rows)
    found_metrics, found = gradients(trainer, rows)
    assert found_metrics == metrics
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class MixesNeighbours(transformers.LlamaForCausalLM):
    """Its body adds to each token what stands before it, as a convolution would."""

    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_hook(self._mix)

    def _mix(self, module, inputs, output):
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.roll(1, 1)
        return output


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"_attn_implementation": "eager"}, "'eager'"),
        ({"sliding_window": 8}, "limited by sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_a_configuration_tells_why_rows_are_seen_whole(change, reason):
    model = model64()
    for name, value in change.items():
        setattr(model.config, name, value)
    assert reason in (why_not_shared(model.model) or "")


def test_a_body_that_looks_at_neighbours_is_found_out():
    model = MixesNeighbours(tiny_model(vocab=VOCAB).config).double().eval()
    assert "differ" in (why_not_shared(model.model) or "")
    assert not CausalForward(model, share_prefix=True).shares_prefixes


def test_a_window_longer_than_any_row_is_none():
    model = model64()
    model.config.sliding_window = model.config.max_position_embeddings
    assert why_not_shared(model.model) is None


@pytest.mark.usefixtures("always")
def test_activation_checkpointing_sees_the_same_tree():
    rows = grouped_rows(seed=5)
    metrics, expected = gradients(full_trainer(False), rows)
    found_metrics, found = gradients(full_trainer(True, activation_checkpointing=True), rows)
    assert found_metrics == pytest.approx(metrics, rel=CLOSE, abs=CLOSE)
    assert_close(found, expected, CLOSE)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("head", ["policy", "reference"])
def test_scores_are_those_of_whole_rows(head):
    rows = grouped_rows(seed=6)
    expected, found = (
        asyncio.run(full_trainer(share).forward(rows, head)) for share in (False, True)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=CLOSE)


def test_a_group_is_computed_from_one_prompt_and_a_batch_without_groups_as_it_was():
    rows = grouped_rows()
    plan = plan_trees(rows, input_lengths(rows), 8192)
    assert plan is not None
    ((indices, nodes),) = plan
    assert sorted(indices) == list(range(len(rows)))
    assert len(nodes.tokens_M) < MAX_NODE_SHARE * sum(input_lengths(rows))
    alone = random_rows()
    assert plan_trees(alone, input_lengths(alone), 8192) is None


def test_a_budget_keeps_prompts_together_where_it_can():
    rows = grouped_rows(groups=3)
    lengths = input_lengths(rows)
    sizes = [sum(lengths[i : i + 4]) for i in (0, 4, 8)]
    plan = plan_trees(rows, lengths, max(sizes))
    assert plan is not None
    for indices, _ in plan:
        assert sum(lengths[i] for i in indices) <= max(sizes)
        assert len({rows[i].episode[0] for i in indices}) * 4 == len(indices)
