"""`method=spire`: decoding computes what training trained, and stays lossless."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from spectrain.decoding import Context, Sampling, Verified, generate
from spectrain.drafting import model_drafter
from spectrain.drafting.stopping import HeadStop, StopRule
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.spire import Spire
from spectrain.models.head import AcceptanceHead, HeadConfig
from spectrain.models.rollout import rollout
from spectrain.target import DraftTree, KVCache, TargetModel
from spectrain.target.target import FINAL
from spectrain.target.weights import Int8Linear, RowsLinear, on_cpu
from tests.conftest import VOCAB_SIZE, in_turn, random_prompts, tiny_model
from tests.decoding.reference import follow
from tests.models.test_spire import ENGINE, make

INPUTS = [
    {"input": "projected", "unembedding": "target"},
    {"input": "projected", "unembedding": "trained"},
    {"input": "trained", "unembedding": "target"},
    {"input": "trained", "unembedding": "trained"},
    {"input": "projected", "unembedding": "target", "previous_state": True},
    {"input": "trained", "unembedding": "trained", "previous_state": True, "sink_tokens": 30},
    {"input": "projected", "unembedding": "target", "draft_vocab": 30},
    {"input": "trained", "unembedding": "trained", "previous_state": True, "draft_vocab": 30},
    {**ENGINE, "draft_vocab": 30},
]
SHARED = {"feedback": "shared", "target_layers": (FINAL, FINAL)}


class ForcedContext(Context):
    """A context whose draws are the next tokens of a given sequence; keeps the logits it was asked about."""

    def __init__(self, sequences: torch.Tensor, lengths: list[int]):
        super().__init__(Sampling(temperature=1.0), max_rows=len(lengths))
        self.sequences, self.asked = sequences, []
        prompts = [s[:n].tolist() for s, n in zip(sequences, lengths, strict=True)]
        self.append(prompts, [99] * len(lengths), [None] * len(lengths))
        self.root(range(len(lengths)), self.following(0), torch.zeros(len(lengths), VOCAB_SIZE))

    def following(self, ahead: int) -> torch.Tensor:
        index = torch.tensor(self.n_tokens) + ahead
        return self.sequences[torch.arange(len(index)), index]

    def draw(self, logits, active=None, place=1):
        self.asked.append(logits)
        return self.following(len(self.asked) - 1), logits.softmax(-1)


@pytest.mark.parametrize(
    "options",
    [{}, {"family": "qwen3", "sink_tokens": 2, "tied": True}, {"feedback": False}, SHARED, *INPUTS],
    ids=str,
)
def test_decoding_equals_the_training_rollout(options):
    """Two rows of different length, two rounds: after prefill, and after a step that accepted part of the path."""
    target, drafter = make(**options)
    k, lengths = 4, [24, 12]  # both roots begin a block; longer than the window of 8
    sequences = torch.randint(4, VOCAB_SIZE, (2, 40))
    expected = drafter.logits(rollout(drafter, sequences, target.features(sequences).captured))
    method, cache = Spire(drafter, stop=StopRule()), KVCache(max_rows=2, block_tokens=16)  # a rule: step by step
    context = ForcedContext(sequences, lengths)
    method.start(target, cache)
    padded = sequences[:, : max(lengths)]
    read = method.read_of_prompts(torch.tensor(lengths))
    method.prefill(context, target.prefill(padded, lengths, cache, range(2), read), range(2))
    for round_ in range(2):
        context.asked = []
        tree = method.propose(context)
        for step, logits in enumerate(context.asked):
            for row, length in enumerate(lengths):
                place = expected[row, length + k * round_ + step]
                atol = 1e-3 if "previous_state" in options else 1e-5  # rounding grows from one state to the next
                torch.testing.assert_close(logits[row].softmax(-1), place.softmax(-1), atol=atol, rtol=0)
        assert len(context.asked) == k
        # Root and three drafts accepted, one rejected: the next root begins the next block.
        output = target.score(tree, cache)
        path = torch.tensor([[0, 1, 2, 3, -1]]).expand(2, -1)
        verified = Verified(path, torch.tensor([3, 3]), context.following(3))
        cache.keep(k)
        emitted = [sequences[r, n : n + k].tolist() for r, n in enumerate(context.n_tokens)]
        follow(method, context, tree, output, verified, output.logits[:, 3], emitted)


@pytest.mark.parametrize(
    ("options", "drawn"),
    in_turn(
        [{"family": "qwen3", "sink_tokens": 2}, {"feedback": False}, *INPUTS[-4:]],
        [*product((Sampling(1.3, top_k=20, top_p=0.9), Sampling()), (range(0, VOCAB_SIZE, 9), ()))],
    ),
    ids=str,
)
def test_a_chain_in_one_program_is_that_of_step_by_step(options, drawn, monkeypatch):
    """Rows that end at different steps, so that chains are ragged, in float32 and in 8 bits."""
    (target, drafter), (sampling, stop_token_ids) = make(**options), drawn
    for draft_dtype in ("float32", "int8"):
        found, drawn_from = [], []
        for fuses in (True, False):
            method = Noted(drafter, 3, draft_dtype=draft_dtype)
            monkeypatch.setattr(Spire, "_program_chain", Spire._program_chain if fuses else None)
            rows = {"batch_size": 3, "stop_token_ids": stop_token_ids}
            found.append(generate(target, method, random_prompts([9, 30, 4, 12, 7, 5]), 21, sampling, **rows))
            drawn_from.append(method.drawn_from)
        for whole, steps in zip(*found, strict=True):
            assert (whole.tokens, whole.accepted, whole.drafted) == (steps.tokens, steps.accepted, steps.drafted)
        for whole, steps in zip(*drawn_from, strict=True):
            torch.testing.assert_close(whole, steps, rtol=1e-3, atol=1e-5)
        monkeypatch.undo()


RULES = ("head", "head, two at least", "head, one later", "head, one later, three at least", "head without blocks")
RULES += ("never",)


def rules(linear: type[RowsLinear] = RowsLinear) -> dict[str, StopRule]:
    """Of these names; to make them compiles what multiplies on a processor."""
    torch.manual_seed(7)
    head = AcceptanceHead(HeadConfig(32, n_blocks=2)).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.3)
    plain = AcceptanceHead(HeadConfig(32, n_blocks=0)).requires_grad_(False)
    plain.output.bias.fill_(1.0)
    head.blocks = on_cpu(head.blocks, linear)
    never = StopRule()
    never.compiles = True
    return {
        "head": HeadStop(head, 0.6),
        "head, two at least": HeadStop(head, 0.3, min_candidates=2),
        "head, one later": HeadStop(head, 0.6, judge="previous"),
        "head, one later, three at least": HeadStop(head, 0.2, min_candidates=3, judge="previous"),
        "head without blocks": HeadStop(plain, 0.5),
        "never": never,
    }


IN_INT8, IN_FLOAT32 = (INPUTS[8], "int8", Sampling(1.3, top_k=20, top_p=0.9)), (INPUTS[7], "float32", Sampling())


@pytest.mark.parametrize(("name", "how"), in_turn(RULES, [IN_INT8, IN_FLOAT32]), ids=str)
def test_a_rule_ends_the_chain_of_a_program_as_it_ends_one_step_by_step(name, how):
    """The same tokens and lengths of drafts, and as many steps of the drafter; rows stop at different places."""
    options, draft_dtype, sampling = how
    target, drafter = make(**options)
    prompts, linear = random_prompts([3, 17, 1, 9, 30]), Int8Linear if draft_dtype == "int8" else RowsLinear

    def decoded(name: str, compiles: bool, batch_size: int) -> tuple[list, int]:
        rule = rules(linear)[name]
        assert rule.compiles
        rule.compiles = compiles
        method = Spire(drafter, gamma=7, stop=rule, draft_dtype=draft_dtype)
        options = {"batch_size": batch_size, "stop_token_ids": range(0, VOCAB_SIZE, 9)}
        generations = generate(target, method, prompts, 30, sampling, **options)
        assert method.runtime.compiles
        return [(g.tokens, g.drafted, g.accepted) for g in generations], rule.draft_forwards

    alone, together = (decoded(name, True, batch_size) for batch_size in (1, 3))
    assert alone == decoded(name, False, 1)
    assert together == decoded(name, False, 3)
    assert [tokens for tokens, *_ in alone[0]] == [tokens for tokens, *_ in together[0]]
    lengths, never = ([drafted for _, drafted, _ in found] for found in (alone[0], decoded("never", True, 1)[0]))
    assert (lengths == never) == (name == "never")


class Noted(Spire):
    """Keeps what its drafts were drawn from."""

    def start(self, *arguments):
        super().start(*arguments)
        self.drawn_from = []

    def propose(self, context):
        tree = super().propose(context)
        if tree.probs is not None:
            self.drawn_from.append(tree.probs[tree.drafted].clone())
        return tree


def whole_target_drafter(noise: float = 0.0, **options):
    """A drafter of all the target's blocks with a window over everything, which computes what the target computes; with
    noise it is often right, not always."""
    target, drafter = make(n_target_layers=2, window_tokens=200, feedback=False, **options)
    if noise:
        for weight in drafter.parameters():
            weight.mul_(1 + noise * torch.randn(weight.shape))
    return target, drafter


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("noise", "options"), [(0.0, {}), (0.03, {}), (0.0, {"own_key": False})], ids=str)
def test_output_is_the_target_s_own_where_drafts_are_accepted(noise, options, batch_size):
    """Rows accept different numbers of drafts, end inside accepted blocks by EOS and by length, and are replaced."""
    target, drafter = whole_target_drafter(noise, family="llama_gqa", **options)
    prompts = random_prompts([3, 17, 1, 9, 30, 5, 8])
    plain = generate(target, Autoregressive(), prompts, 40, stop_token_ids=())
    ends = [g.tokens[7 + i] for i, g in enumerate(plain[:3])]  # tokens that do occur end the text
    expected = generate(target, Autoregressive(), prompts, 30, stop_token_ids=ends)
    found = generate(
        target, Spire(drafter), prompts, 30, batch_size=batch_size, stop_token_ids=ends, cache_block_tokens=8
    )
    assert [g.tokens for g in found] == [g.tokens for g in expected]
    assert {g.finish_reason for g in found} >= {"stop"}
    per_step = [a for g in found for a in g.accepted]
    assert sum(per_step) > len(per_step)
    assert (noise, options) == (0.0, {}) or len(set(per_step)) > 2


def test_reading_the_context_itself_equals_training():
    """`target_activations=false`: the first draft logits are those of the sparse Transformer at the root."""
    target, drafter = make(feedback=False, target_activations=False)
    sequences = torch.randint(4, VOCAB_SIZE, (2, 40))
    expected = drafter.logits(rollout(drafter, sequences, None))
    method, context = Spire(drafter), ForcedContext(sequences, [30, 12])
    method.start(target, KVCache(max_rows=2))
    method.propose(context)
    for step, logits in enumerate(context.asked):
        for row, length in enumerate([30, 12]):
            place = expected[row, length + step]
            torch.testing.assert_close(logits[row].softmax(-1), place.softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("draft_dtype", ["float32", "bfloat16", "int8"])
def test_drafts_of_shortened_weights_come_near_those_of_training(draft_dtype):
    """A product of the wrong table, or of one that was not made again after a training step, would be far off."""
    target, drafter = make(input="projected", unembedding="target")
    before = [p.clone() for p in target.model.parameters()]
    method = Spire(drafter, draft_dtype=draft_dtype)
    tokens, hidden = torch.arange(4, 20), torch.randn(16, 32)
    for _ in range(2):
        drafting = method.for_target(target)
        torch.testing.assert_close(drafting.embed(tokens), drafter.embed(tokens), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(drafting.logits(hidden), drafter.logits(hidden), atol=0.15, rtol=0.05)
        assert method.for_target(target) is drafting
        drafter.input.weight.mul_(2)
        drafter.norm.weight.mul_(1)  # as an optimizer's step
    shares = drafting.lm_head.weight.data_ptr() == target.unembedding.data_ptr()
    assert shares == (draft_dtype == "float32")
    assert all(torch.equal(a, b) for a, b in zip(target.model.parameters(), before, strict=True))


@pytest.mark.parametrize("options", INPUTS[6:], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "T=1"])
def test_a_drafter_that_is_held_to_few_tokens_drafts_these_and_leaves_the_text_to_the_target(options, sampling):
    target, drafter = make(**options)
    method, prompts = Spire(drafter, 3, draft_vocab=5), random_prompts([3, 17, 9])
    drafted, draft = set(), method.draft

    def noted(context, gamma):
        tree = draft(context, gamma)
        drafted.update(tree.tokens[:, 1:].flatten().tolist())
        return tree

    method.draft = noted
    found = generate(target, method, prompts, 24, sampling, stop_token_ids=(), batch_size=3)
    assert drafted == set(drafter.kept[:5].tolist())
    if sampling.greedy:
        plain = generate(target, Autoregressive(), prompts, 24, stop_token_ids=())
        assert [one.tokens for one in found] == [one.tokens for one in plain]
    hidden = torch.randn(4, 32)
    few, all_ = (Spire(drafter, draft_vocab=n).for_target(target).logits(hidden) for n in (5, None))
    kept = drafter.kept[:5]
    torch.testing.assert_close(few[:, kept], all_[:, kept])
    assert (few > -torch.inf).sum() == 4 * 5
    assert drafter.config.draft_vocab == len(drafter.kept) == 30  # the trained one is as it was


def test_how_many_tokens_are_drafted_where_nobody_says(monkeypatch):
    monkeypatch.setattr(model_drafter, "FEW_TOKENS", 9)
    target, drafter = make(**INPUTS[6])
    assert len(Spire(drafter, draft_vocab="auto").for_target(target).kept) == 9
    assert len(Spire(drafter, draft_vocab=30).for_target(target).kept) == 30
    target, whole = make(**INPUTS[0])
    assert Spire(whole, draft_vocab="auto").for_target(target).kept is None
    for one, n, why in (
        (whole, 9, "draft_vocab=9 needs a drafter"),
        (drafter, 31, "draft_vocab=31 must be at most 30"),
        (whole, 0, "draft_vocab=0 must be"),
    ):
        with pytest.raises(UserError, match=why):
            Spire(one, draft_vocab=n)


def assert_same_memories(one: Spire, other: Spire, n_rows: int) -> None:
    """Check that both keep the same of their first rows, without the last slot, which takes what is thrown away."""
    kept = other.keys.positions[:n_rows, :-1]
    assert torch.equal(one.keys.positions[:n_rows, :-1], kept)
    own = (kept >= 0)[:, None, :, None]
    for here, there in zip(one.keys.stores, other.keys.stores, strict=True):
        for mine, theirs in ((here.keys, there.keys), (here.values, there.values)):
            torch.testing.assert_close(mine[:n_rows, :, :-1] * own, theirs[:n_rows, :, :-1] * own, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(one.finals[:n_rows], other.finals[:n_rows], atol=1e-5, rtol=1e-4)


def test_prompts_that_are_read_later_stand_where_those_stand_that_are_read_at_once():
    """Three rows join, then one more, and one of the first leaves, so that the last one is between those of before."""
    target, drafter = make(**INPUTS[4])
    cache, lengths = KVCache(max_rows=4), [20, 1, 9, 3]
    context = ForcedContext(torch.randint(4, VOCAB_SIZE, (4, 30)), lengths)
    at_once, later = Spire(drafter), Spire(drafter)
    for method in (at_once, later):
        method.start(target, cache)
    for rows in (range(3), range(3, 4)):
        of_rows = lengths[rows.start : rows.stop]
        read = later.read_of_prompts(torch.tensor(of_rows))
        output = target.prefill(context.sequences[rows.start : rows.stop, : max(of_rows)], of_rows, cache, rows, read)
        for method in (at_once, later):
            method.prefill(context, output, rows)
        at_once._catch_up(context)
    for method in (at_once, later):
        method.free(1)
    later._catch_up(context)
    assert_same_memories(later, at_once, 3)


@pytest.mark.parametrize("options", [INPUTS[4], {}], ids=str)
def test_where_steps_skipped_the_drafter_it_reads_prompts_before_what_was_written_since(options):
    """A tree may be scored without the drafter, which is then asked in a later step."""
    target, drafter = make(**options)
    lengths = [20, 9]
    context = ForcedContext(torch.randint(4, VOCAB_SIZE, (2, 40)), lengths)
    at_once, later = Spire(drafter), Spire(drafter)
    for method in (at_once, later):
        cache = KVCache(max_rows=2)
        method.start(target, cache)
        read = method.read_of_prompts(torch.tensor(lengths))
        method.prefill(context, target.prefill(context.sequences[:, :20], lengths, cache, range(2), read), range(2))
        for step in range(3):
            if method is at_once:
                method._catch_up(context)
            tree = DraftTree.root_only(context.sequences[[0, 1], [length + step for length in lengths]])
            output, none = target.score(tree, cache), torch.zeros(2, dtype=torch.long)
            method.observe(context, tree, output, Verified(none[:, None], none, none))
            cache.keep(1)
        method._catch_up(context)
    assert_same_memories(later, at_once, 2)


def test_a_drafter_of_another_target_is_refused():
    _, drafter = make()
    other = TargetModel(tiny_model("llama", hidden_size=64))
    with pytest.raises(UserError, match="for a target of vocabulary 61 and width 32"):
        generate(other, Spire(drafter), [[5, 6]], 4)
