"""SSSD's trees: sources, discounts, budgets and batches, against trees worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spectrain.decoding import generate
from spectrain.errors import UserError
from spectrain.methods.sssd import Discounts, Sssd, SssdOptions, branch_of
from spectrain.retrieval.fusion import N_EACH
from spectrain.target import Source, TargetModel
from tests.conftest import random_prompts, tiny_model
from tests.methods.drafts import paths, proposed
from tests.retrieval.reference import make_store

V = 50


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [9, 7, 8]], V)


def test_sources_add_up(store):
    method = Sssd(store, SssdOptions(min_matches=1), max_nodes=64)
    found = paths(proposed(method, [[2, 40, 41, 1, 2]]))
    assert found[3,] == Source.DATASTORE
    assert found[6,] == Source.DATASTORE
    assert found[40, 41] == Source.INPUT


def test_nodes_come_by_pseudo_probability_and_discount(store):
    # The store: 3 follows (1, 2) in 2 of 3 places, then 4 and 5 in 1 of 3 each; 6 in 1 of 3.
    options = SssdOptions(min_matches=1, datastore_prefix=2, datastore_depth_decay=1, datastore_prefix_decay=1)
    method = Sssd(store, options, max_nodes=4)
    assert list(paths(proposed(method, [[1, 2]]))) == [(3,), (6,), (3, 4)]
    damped = Sssd(store, SssdOptions(**{**vars(options), "input_scale": 0.3}), max_nodes=3)
    text = [2, 40, 1, 2]  # the input says 40 after 2, surely; discounted to 0.3 x 0.5^3
    assert list(paths(proposed(damped, [text]))) == [(3,), (6,)]
    trusted = Sssd(store, SssdOptions(**{**vars(options), "input_scale": 9.0}), max_nodes=2)
    assert list(paths(proposed(trusted, [text]))) == [(40,)]


def test_candidates_of_the_last_logits_are_a_third_source(store):
    logits = torch.zeros(1, V)
    logits[0, [30, 2, 31]] = torch.tensor([5.0, 9.0, 4.0])  # 2 is the root: no candidate
    method = Sssd(None, SssdOptions(datastore_source=False, last_logits=True, logits_candidates=2), 64)
    found = paths(proposed(method, [[30, 33, 34, 2]], last_logits=logits))
    assert {path: found[path] for path in ((30,), (31,))} == {(30,): Source.LOGITS, (31,): Source.LOGITS}
    assert found[30, 33] == Source.INPUT  # goes on with what followed 30 in the text
    assert (2,) not in found


def test_discount_tables_follow_the_formula():
    options = SssdOptions(
        input_scale=0.5, input_prefix_decay=0.1, input_depth_decay=0.2, datastore_prefix_decay=0.3,
        datastore_depth_decay=0.4, max_prefix=3, datastore_prefix=2, logits_candidates=3, logits_scale=0.6,
        logits_rank_decay=2.0,
    )  # fmt: skip
    found = Discounts.of(options, 3)
    assert found.input[3, 1:] == pytest.approx([0.5, 0.1, 0.02])
    assert found.input[1, 2] == pytest.approx(0.5 * 0.1**2 * 0.2)
    assert found.datastore[1, 1:] == pytest.approx([0.3, 0.12, 0.048])
    assert found.ranks == pytest.approx([0.6, 0.15, 0.6 / 9])
    assert found.logits[1:] == pytest.approx([1, 0.2, 0.04])


def test_calibration_multiplies_by_prefix_and_depth_and_goes_on_with_its_last_entry():
    plain = Discounts.of(SssdOptions(), 4)
    tables = {"input": [[2, 3], [4, 5]], "datastore": [[7]]}
    found = Discounts.of(SssdOptions(calibration=tables), 4)
    np.testing.assert_allclose(found.input[1:, 1:] / plain.input[1:, 1:], [[2, 3, 3, 3], *[[4, 5, 5, 5]] * 3])
    np.testing.assert_allclose(found.datastore[1:, 1:] / plain.datastore[1:, 1:], 7)


def test_what_tuning_found_is_what_acceptance_is_learnt_from():
    """A prefix whose nodes were right half as often as they claimed begins with half of the chances."""
    options = SssdOptions(datastore_source=False, max_prefix=2)
    plain = Sssd(None, options).priors
    tuned = replace(options, calibration={"input": [[0.375, 9.0], [3.0, 9.0]], "datastore": [[0.3], [0.4], [0.5]]})
    found = Sssd(None, tuned).priors
    groups = np.divide(found, plain)[: 7 * N_EACH].reshape(7, N_EACH)  # five of the datastore, two of the input
    assert np.ptp(groups, axis=1) == pytest.approx(np.zeros(7))
    # The last entry goes on for longer prefixes.
    assert groups[:, 0] == pytest.approx([0.3 / 0.6, 0.4 / 0.8, 0.5, 0.5 / 1.15, 1.0, 0.375 / 0.75, 3.0])


def test_branches_shrink_with_the_budget():
    assert [branch_of(n) for n in (2, 4, 8, 16, 64, 128)] == [2, 4, 6, 8, 12, 14]
    text = [*range(1, 40), 1]  # 2, 3, .. follows
    for max_nodes in (4, 16, 64):
        tree = proposed(Sssd(None, SssdOptions(datastore_source=False), max_nodes), [text])
        assert tree.depth.max() == min(branch_of(max_nodes), max_nodes - 1)


def test_a_batch_drafts_what_its_rows_would_alone(store, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    method = Sssd(store, SssdOptions(last_logits=True), 24)
    random = np.random.default_rng(0)
    texts = [random.integers(0, 10, size=n).tolist() for n in (3, 30, 1 + 1, 17, 60, 9, 21, 33, 12, 2, 44)]
    logits = torch.from_numpy(random.standard_normal((len(texts), V)).astype(np.float32))
    together = proposed(method, texts, last_logits=logits)
    assert len(method.retrievers) == 2  # two threads took part
    for row, text in enumerate(texts):
        alone = proposed(Sssd(store, SssdOptions(last_logits=True), 24), [text], last_logits=logits[row : row + 1])
        assert paths(together, row) == paths(alone)


def test_rows_that_leave_take_their_tries_with_them(tmp_path):
    target = TargetModel(tiny_model("llama"))
    store = make_store(tmp_path, random_prompts([40, 50]), 61)
    prompts = random_prompts([5, 17, 30, 9, 23, 4])
    alone = [generate(target, Sssd(store, SssdOptions(), 16), [prompt], 20)[0] for prompt in prompts]
    batched = generate(target, Sssd(store, SssdOptions(), 16), prompts, 20, batch_size=3)
    assert len({len(g.accepted) for g in alone}) > 1  # rows leave at different steps
    for one, other in zip(alone, batched, strict=True):
        # With another row's trie the text would be the same, but not what was drafted.
        assert (one.tokens, one.accepted, one.drafted) == (other.tokens, other.accepted, other.drafted)


def test_options_that_leave_nothing_to_propose_are_refused():
    with pytest.raises(UserError, match="leaves nothing to propose"):
        SssdOptions(input_source=False, datastore_source=False)
