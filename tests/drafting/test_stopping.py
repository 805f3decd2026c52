"""Stop rules, by a scripted head and scripted distributions; and what they cost the rows beside them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from spectrain.decoding import Sampling, generate
from spectrain.decoding.drafter import Context
from spectrain.decoding.sampling import row_generator
from spectrain.drafting.draft_chain import DraftStep, draft_chain
from spectrain.drafting.stopping import HeadStop, StopRule, UnsureStop, confidence, entropy
from spectrain.errors import UserError
from spectrain.methods.speculative import Speculative
from spectrain.models.head import AcceptanceHead, HeadConfig
from spectrain.target import TargetModel
from tests.conftest import noisy_copy, random_prompts, tiny_model

V = 8


class ScriptedHead(torch.nn.Module):
    """Takes the predicted probability from the state itself."""

    def probability(self, hidden):
        return hidden[:, 0]


def context_of(n_rows: int, room: int = 30, sampling: Sampling | None = None, stop_ids=()) -> Context:
    context = Context(sampling or Sampling(), max_rows=n_rows, stop_ids=stop_ids)
    context.append([[1, 2]] * n_rows, [room + 1] * n_rows, [row_generator(0, row) for row in range(n_rows)])
    context.root(range(n_rows), torch.zeros(n_rows, dtype=torch.int64), torch.zeros(n_rows, V))
    return context


def lengths(probabilities: list[list[float]], stop: StopRule, gamma: int = 6, room: int = 30) -> tuple[list[int], int]:
    """Draft lengths where the head says probabilities[row][i - 1] of the i-th token; and how often the drafter ran."""
    n_rows, forwards = len(probabilities), []

    def say(i: int) -> DraftStep:
        forwards.append(i)
        states = torch.tensor([row[i - 1] if i else 1.0 for row in probabilities])[:, None]
        return DraftStep(torch.zeros(n_rows, V), states)

    tree = draft_chain(context_of(n_rows, room), gamma, lambda: say(0), lambda tokens, i: say(i), stop)
    return (tree.parents >= 0).sum(-1).tolist(), len(forwards)


@pytest.mark.parametrize(
    ("probabilities", "threshold", "expected"),
    [
        ([0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 0.3, 4),  # 1 - 0.9^4 = 0.344 is the first above 0.3
        ([0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 0.5, 6),  # 1 - 0.9^5 = 0.41: stopped by gamma
        ([0.2, 1.0, 1.0, 1.0, 1.0, 1.0], 0.3, 1),
        ([1.0, 1.0, 0.65, 1.0, 1.0, 1.0], 0.3, 3),
        ([1.0, 1.0, 0.75, 1.0, 0.9, 1.0], 0.3, 5),  # the product of all, not the last: 0.75 * 0.9 = 0.675
    ],
)
def test_stops_once_a_rejection_is_likelier_than_the_threshold(probabilities, threshold, expected):
    assert lengths([probabilities], HeadStop(ScriptedHead(), threshold))[0] == [expected]


def test_judging_the_previous_token_draws_one_more_without_another_forward():
    probabilities = [[1.0, 0.5, 1.0, 1.0, 1.0, 1.0]]
    assert lengths(probabilities, HeadStop(ScriptedHead(), 0.3)) == ([2], 3)
    assert lengths(probabilities, HeadStop(ScriptedHead(), 0.3, judge="previous")) == ([3], 3)


def test_at_least_min_candidates_are_drafted():
    probabilities = [[0.1, 0.1, 0.1, 0.1, 0.1, 0.1]]
    assert lengths(probabilities, HeadStop(ScriptedHead(), 0.3, min_candidates=1))[0] == [1]
    assert lengths(probabilities, HeadStop(ScriptedHead(), 0.3, min_candidates=3))[0] == [3]
    assert lengths(probabilities, HeadStop(ScriptedHead(), 0.3, min_candidates=3, judge="previous"))[0] == [3]


def test_each_row_stops_for_itself_and_the_last_token_is_not_read():
    rows = [[0.5] * 6, [1.0] * 6, [1.0, 1.0, 0.5, 1.0, 1.0, 1.0]]
    drafted, forwards = lengths(rows, HeadStop(ScriptedHead(), 0.3))
    assert drafted == [1, 6, 3]
    assert forwards == 6  # the root and five of six tokens
    assert lengths([rows[0], rows[2]], HeadStop(ScriptedHead(), 0.3)) == ([1, 3], 4)  # all stopped: nobody waits


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "T=1"])
def test_a_draft_stops_with_the_first_token_that_ends_its_text(is_whole, sampling):
    """Rows that end with their 2nd, their 4th and none of their tokens, of 6, 6 and 6; the last has room for 3."""
    context = context_of(4, room=7, sampling=sampling, stop_ids=(6, 7))
    context.room[3] = 4
    said = torch.tensor([[1, 6, 2, 7, 1, 1], [0, 0, 0, 7, 7, 1], [5, 4, 3, 2, 1, 0], [1, 1, 1, 6, 6, 6]])
    logits = F.one_hot(said, V).float() * 1e4

    def whole(context, n_steps, lengths):
        used = n_steps if lengths is None else lengths
        if not sampling.greedy:
            context.uniforms.skip(used, n_steps)
        return said[:, :n_steps], None if sampling.greedy else logits.softmax(-1)[:, [0, *range(n_steps)]], lengths

    first, step = lambda: DraftStep(logits[:, 0]), lambda tokens, i: DraftStep(logits[:, i])
    tree = draft_chain(context, 6, first, step, whole=whole if is_whole else None)
    lengths = tree.drafted.sum(1)
    assert lengths.tolist() == [2, 4, 6, 3]
    assert [row[1 : 1 + n] for row, n in zip(tree.tokens.tolist(), lengths, strict=True)] == [
        row[:n] for row, n in zip(said.tolist(), lengths, strict=True)
    ]
    assert context.uniforms.places.tolist() == ([0] * 4 if sampling.greedy else lengths.tolist())


def test_a_draft_of_rows_that_all_end_is_as_long_as_the_longest():
    context, read = context_of(2, stop_ids=(7,)), []
    said = F.one_hot(torch.tensor([[1, 2, 7, 3, 3], [7, 0, 0, 0, 0]]), V).float()

    def step(tokens, i):
        read.append(i)
        return DraftStep(said[:, i])

    steps = draft_chain(context, 5, lambda: DraftStep(said[:, 0]), step)
    whole = draft_chain(
        context, 5, None, None, whole=lambda context, n_steps, lengths: (said.argmax(-1), None, lengths)
    )
    assert read == [1, 2]  # the tokens that end texts are not read
    for tree in (steps, whole):
        assert tree.shape == (2, 4)
        assert tree.drafted.tolist() == [[False, True, True, True], [False, True, False, False]]


def drafted_by(stop: StopRule, logits_by_step: list[torch.Tensor]) -> list[int]:
    n_rows = len(logits_by_step[0])
    say = [DraftStep(logits) for logits in logits_by_step]
    tree = draft_chain(context_of(n_rows), len(say), lambda: say[0], lambda tokens, i: say[i], stop)
    return (tree.parents >= 0).sum(-1).tolist()


def test_confidence_and_entropy_stop_before_an_uncertain_token_is_drawn():
    sure, unsure = torch.zeros(1, V), torch.zeros(1, V)
    sure[0, 0] = 9.0
    steps = [sure, sure, unsure, sure]
    assert drafted_by(UnsureStop("confidence", 0.5), steps) == [2]
    assert drafted_by(UnsureStop("entropy", 1.0), steps) == [2]
    assert drafted_by(UnsureStop("confidence", 0.5, min_candidates=4), steps) == [4]
    assert drafted_by(UnsureStop("entropy", 1.0), [unsure, unsure]) == [1]  # the first is drafted in any case


def test_confidence_and_entropy_are_those_of_the_distribution():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, -torch.inf, -torch.inf]])
    torch.testing.assert_close(confidence(logits), torch.tensor([0.25, 0.75]))
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    torch.testing.assert_close(entropy(logits), torch.tensor([math.log(4), expected]))


def real_head(seed: int = 0) -> AcceptanceHead:
    torch.manual_seed(seed)
    head = AcceptanceHead(HeadConfig(hidden_size=32, n_blocks=2))
    head.output.weight.data.mul_(8)
    return head


def test_a_row_does_not_depend_on_when_its_neighbours_stop():
    target = TargetModel(tiny_model("llama"))
    draft = TargetModel(noisy_copy(target.model, 0.3))
    prompts = random_prompts([4, 11, 7])
    stop = HeadStop(real_head(), 0.4)
    sampling = Sampling(temperature=1.0)
    alone = [
        generate(target, Speculative(draft, 8, stop=stop), [p], 25, sampling, prompt_numbers=[i])[0]
        for i, p in enumerate(prompts)
    ]
    together = generate(target, Speculative(draft, 8, stop=stop), prompts, 25, sampling, batch_size=3)
    assert [g.tokens for g in together] == [g.tokens for g in alone]
    assert [g.drafted for g in together] == [g.drafted for g in alone]
    assert len({length for g in together for length in g.drafted}) > 2  # it does adapt


def test_a_confidence_is_below_one_and_an_entropy_may_be_above():
    UnsureStop("entropy", 1.5)
    with pytest.raises(UserError, match=r"threshold=1.5 must be a number in \(0, 1\)"):
        UnsureStop("confidence", 1.5)
