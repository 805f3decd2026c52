"""`method=eagle3`: decoding computes what training trains on, with a window or without, and stays lossless."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from spectrain.decoding import Sampling, Verified, generate
from spectrain.decoding.engine import Engine, Request
from spectrain.decoding.prefixes import Prefixes
from spectrain.drafting import model_drafter, runtime
from spectrain.drafting.stopping import StopRule
from spectrain.drafting.tree_drafter import TreeDrafter
from spectrain.drafting.window_keys import WholeKeys
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.eagle3 import Eagle3, Eagle3States
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, unrolled
from spectrain.target import DraftTree, KVCache, TargetModel
from spectrain.target.lean import shape_of
from spectrain.target.tree import ROOT_PARENT
from tests.conftest import VOCAB_SIZE, in_turn, random_prompts, tiny_model
from tests.decoding.reference import follow
from tests.methods.test_spire import ForcedContext, rules
from tests.models.tiny_eagle3 import new_eagle3

FLAGS = [
    {},
    {"family": "qwen3", "window_tokens": 8},
    {"norm_before_residual": True, "fc_norm": True},
    {"norm_output": True, "norm_before_fc": True, "window_tokens": 8, "unembedding": "target"},
    {"norm_output": True, "norm_before_residual": True, "own_embedding": True, "draft_vocab": 30},
    {"unembedding": "target", "draft_vocab": 30},
]


def make(family: str = "llama_gqa", **options) -> tuple[TargetModel, Eagle3Drafter]:
    target = TargetModel(tiny_model(family))
    drafter = new_eagle3(target, **options)
    return target.with_capture(drafter.config.captured_layers), drafter


def unrolled_of(target: TargetModel, drafter: Eagle3Drafter, tokens: torch.Tensor, n_steps: int) -> list[torch.Tensor]:
    return unrolled(drafter, tokens, target.features(tokens).captured, n_steps)


def begun(method: Eagle3, target: TargetModel, sequences: torch.Tensor, lengths: list[int]) -> tuple:
    """A context whose draws are the sequences' next tokens, and the target's cache, once the prompts were read."""
    cache, context = KVCache(max_rows=2, block_tokens=16), ForcedContext(sequences, lengths)
    method.start(target, cache)
    padded, read = sequences[:, : max(lengths)], method.read_of_prompts(torch.tensor(lengths))
    method.prefill(context, target.prefill(padded, lengths, cache, range(2), read), range(2))
    return context, cache


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("options", FLAGS, ids=str)
def test_decoding_equals_the_unrolled_draft(options, fuses, monkeypatch):
    """Two rows of different length, two rounds: after prefill, and after a step that accepted part of the path."""
    if not fuses:
        monkeypatch.setattr(runtime, "can_fuse", lambda *_: False)
    target, drafter = make(**options)
    k, lengths, sequences = 4, [24, 12], torch.randint(4, VOCAB_SIZE, (2, 40))
    steps = unrolled_of(target, drafter, sequences, k)
    expected = [drafter.spread(step @ drafter.unembedding.mT) for step in steps]
    method = Eagle3(drafter, stop=StopRule())  # a rule: step by step
    context, cache = begun(method, target, sequences, lengths)
    assert method.runtime.compiles == fuses
    assert isinstance(method.keys, WholeKeys) == ("window_tokens" not in options)
    for round_ in range(2):
        context.asked = []
        tree = method.propose(context)
        for step, logits in enumerate(context.asked):
            for row, length in enumerate(lengths):
                place = expected[step][row, length + 3 * round_]
                torch.testing.assert_close(logits[row].softmax(-1), place.softmax(-1), atol=1e-4, rtol=0)
        assert len(context.asked) == k
        # Two drafts accepted, two rejected.
        output = target.score(tree, cache)
        path = torch.tensor([[0, 1, 2, -1, -1]]).expand(2, -1)
        verified = Verified(path, torch.tensor([2, 2]), context.following(2))
        cache.keep(3)
        emitted = [sequences[r, n : n + 3].tolist() for r, n in enumerate(context.n_tokens)]
        follow(method, context, tree, output, verified, output.logits[:, 2], emitted)


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("options", [{}, {"window_tokens": 8, "norm_output": True, "draft_vocab": 30}], ids=str)
def test_a_node_of_a_tree_is_read_as_the_unrolled_draft_of_its_branch(options, fuses, monkeypatch):
    """The text's own branch stands between others, in two rows, before and after a step that accepted a part of it."""
    if not fuses:
        monkeypatch.setattr(runtime, "can_fuse", lambda *_: False)
    target, drafter = make(**options)
    lengths, sequences = [24, 12], torch.randint(4, VOCAB_SIZE, (2, 40))
    method = Eagle3(drafter, 3, tree_nodes=7)
    context, cache = begun(method, target, sequences, lengths)
    names = slice(None) if method.names is None else method.names
    steps = unrolled_of(target, drafter, sequences, 3)
    expected = [drafter.spread(step @ drafter.unembedding.mT)[..., names] for step in steps]
    for round_ in range(2):
        tokens, parents, branch = context.roots[:, None], torch.tensor([[ROOT_PARENT]]), 0
        logits = method.read_roots(context)[:, None]
        for step in range(3):
            for row, length in enumerate(lengths):
                found, place = logits[row, branch - tokens.shape[1]], expected[step][row, length + 3 * round_]
                torch.testing.assert_close(found.softmax(-1), place.softmax(-1), atol=1e-4, rtol=0)
            if step < 2:
                others = torch.randint(4, VOCAB_SIZE, (2, 2))
                new = torch.cat([others[:, :1], context.following(step)[:, None], others[:, 1:]], dim=1)
                above = torch.tensor([[branch, branch, max(0, branch - 1)]])
                tokens, parents = torch.cat([tokens, new], dim=1), torch.cat([parents, above], dim=1)
                branch = tokens.shape[1] - 2
                tree = DraftTree(tokens, parents.expand(2, -1), torch.zeros_like(tokens))
                logits = method.read_nodes(context, tree, 3)
        output = target.score(tree, cache)
        path = torch.tensor([[0, 2, 5, *[-1] * 4]]).expand(2, -1)
        verified = Verified(path, torch.tensor([2, 2]), context.following(2))
        cache.commit(path, verified.accepted)
        cache.extend([3, 3])
        emitted = [sequences[r, n : n + 3].tolist() for r, n in enumerate(context.n_tokens)]
        follow(method, context, tree, output, verified, output.logits[:, 5], emitted)


@pytest.fixture(scope="module")
def memorized() -> tuple[TargetModel, dict[str, Eagle3Drafter], list[list[int]], list[list[int]]]:
    """A target, drafters with and without a window that have learned its texts by heart, prompts, and the texts."""
    target, prompts = TargetModel(tiny_model("llama_gqa")), random_prompts([3, 17, 1, 9, 30])
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts, 30, batch_size=5, stop_token_ids=())]
    texts = [torch.tensor(prompt + more) for prompt, more in zip(prompts, plain, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1)
    captured, drafters = target.with_capture((0, 1, 2)).features(tokens.clamp_min(0)).captured.detach(), {}
    for name, options in (("whole", {}), ("window", {"window_tokens": 8, "norm_output": True})):
        drafter = drafters[name] = new_eagle3(target, **options).requires_grad_(True)
        optimizer = torch.optim.Adam(drafter.parameters(), 0.02)
        for _ in range(30):
            steps, loss = unrolled(drafter, tokens.clamp_min(0), captured, 2), 0.0
            for i, states in enumerate(steps):
                logits = states[:, 1 : -1 - i] @ drafter.unembedding.mT
                loss = loss + F.cross_entropy(logits.mT, tokens[:, 2 + i :], ignore_index=-1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        drafter.requires_grad_(False)
    return target, drafters, prompts, plain


@pytest.mark.parametrize("name", ["whole", "window"])
@pytest.mark.parametrize("fuses", [True, False])
def test_rows_of_any_length_accept_what_was_learned_by_heart_and_stay_the_targets_own(
    memorized, name, fuses, monkeypatch
):
    """Rows accept different numbers of drafts, end inside accepted blocks, and are replaced, alone and in a batch."""
    if not fuses:
        monkeypatch.setattr(runtime, "can_fuse", lambda *_: False)
    target, drafters, prompts, plain = memorized
    by_size = []
    for batch_size in (1, 3):
        method = Eagle3(drafters[name], 4)
        found = generate(target, method, prompts, 30, batch_size=batch_size, stop_token_ids=(), cache_block_tokens=8)
        assert [one.tokens for one in found] == plain
        by_size.append([one.accepted for one in found])
        assert method.runtime.compiles == fuses
    assert by_size[0] == by_size[1]
    accepted = sum(by_size[0], [])
    assert sum(accepted) > 1.5 * len(accepted)
    tree = TreeDrafter(Eagle3(drafters[name], 4, tree_nodes=7), max_nodes=12, branches=2, levels=4)
    found = generate(target, tree, prompts, 30, batch_size=3, stop_token_ids=(), cache_block_tokens=8)
    assert [one.tokens for one in found] == plain
    assert sum(map(sum, (one.accepted for one in found))) > 1.5 * sum(len(one.accepted) for one in found)


DRAWN = [Sampling(), Sampling(1.3, top_k=20, top_p=0.9), Sampling(1.0, draws="shared")]


@pytest.mark.parametrize(
    ("made_and_drawn", "rule"),
    in_turn(zip(FLAGS, 2 * DRAWN, strict=True), [None, "head", "head, one later"]),
    ids=str,
)
def test_a_chain_in_one_program_is_that_of_step_by_step(made_and_drawn, rule, monkeypatch):
    """Rows end at different steps, so that chains are ragged, and a rule may end them."""
    options, drawn = made_and_drawn
    (target, drafter), rows = make(**options), {"batch_size": 3, "stop_token_ids": range(0, VOCAB_SIZE, 9)}
    for draft_dtype in ("float32", "int8"):
        found = []
        for fuses in (True, False):
            monkeypatch.setattr(Eagle3, "_program_chain", Eagle3._program_chain if fuses else None)
            method = Eagle3(drafter, 5, draft_dtype=draft_dtype, stop=rule and rules()[rule])
            texts = generate(target, method, random_prompts([9, 30, 4, 12, 7, 5]), 21, drawn, **rows)
            found.append([(one.tokens, one.accepted, one.drafted) for one in texts])
            found[-1].append(rule and method.stop.draft_forwards)
            monkeypatch.undo()
        assert found[0] == found[1]


@pytest.mark.parametrize("options", FLAGS[2:4], ids=str)
def test_heads_read_the_states_of_drafts_from_every_few_tokens(options):
    target, drafter = make(**options)
    sequences = torch.randint(4, VOCAB_SIZE, (2, 23))
    states = Eagle3States(drafter, 4)
    hidden = states.hidden(sequences, target.features(sequences).captured)
    steps = unrolled_of(target, drafter, sequences, 4)
    assert hidden.shape[:2] == sequences.shape
    for t in range(23):
        torch.testing.assert_close(hidden[:, t], steps[t % 4][:, t - t % 4], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.logits(hidden), drafter.spread(hidden @ drafter.unembedding.mT))
    assert states.reads_drafts(23).nonzero()[:, 0].tolist() == [t for t in range(4, 23) if t % 4]
    # Where the text is mixed with drafts, a draft reads those of its own alone: before its root stands the text.
    mixed = torch.where(states.reads_drafts(23), torch.randint(4, VOCAB_SIZE, (2, 23)), sequences)
    captured = target.features(sequences).captured
    hidden = states.hidden(mixed, captured, sequences)
    for t in range(23):
        read = torch.cat([sequences[:, : t - t % 4], mixed[:, t - t % 4 :]], dim=1)
        expected = unrolled(drafter, read, captured, 4)[t % 4][:, t - t % 4]
        torch.testing.assert_close(hidden[:, t], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "T=1"])
def test_a_drafter_made_by_hand_accepts_all_where_the_next_token_depends_on_the_last_alone(sampling):
    """The target attends to nothing, so it computes f(e_t). The drafter sees its own key alone, and computes f, too:
    queries and keys are one constant vector, which RoPE turns away from all others."""
    model = tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=False)
    block = model.model.layers[0]
    block.self_attn.o_proj.weight.zero_()
    table = model.model.embed_tokens.weight.normal_()
    table.div_(table.square().mean(1, keepdim=True).sqrt())  # so that their norm changes nothing
    if sampling.greedy:
        model.lm_head.weight.mul_(50)  # so that it is sure, and trees go on drafting
    target = TargetModel(model)
    shape = shape_of(model)
    config = Eagle3Config(replace(shape, qkv_bias=True), (0,), k=4, norm_before_residual=True)
    drafter = Eagle3Drafter(config, target).requires_grad_(False)
    ours = drafter.blocks[0]
    ours.hidden_norm.weight.zero_()
    ours.qkv.weight.zero_()[64:, :32] = torch.eye(32)
    ours.qkv.bias[:64], ours.qkv.bias[64:] = 30.0, 0.0
    ours.output.weight.copy_(torch.eye(32))
    ours.gate_up.weight.copy_(torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight]))
    ours.down.weight.copy_(block.mlp.down_proj.weight)
    drafter.lm_head.weight.copy_(model.lm_head.weight)
    for method in (Eagle3(drafter, 4), TreeDrafter(Eagle3(drafter, 4, tree_nodes=7), 9, branches=2, levels=4)):
        found = generate(target, method, random_prompts([9, 5, 12]), 21, sampling, batch_size=2, stop_token_ids=())
        assert all(set(one.accepted[:-1]) == {4} for one in found), [one.accepted for one in found]


def test_candidates_of_a_tree_are_those_of_an_exhaustive_search_in_order():
    """With all tokens as branches: behind each node that was read stand all tokens, the likeliest first."""
    target = TargetModel(tiny_model("llama", vocab_size=4))
    drafter = new_eagle3(target, k=3)
    target, levels, text = target.with_capture((0, 1, 2)), 3, [1, 3, 0, 2, 2]
    method = TreeDrafter(Eagle3(drafter, levels, tree_nodes=9), max_nodes=4 + 16 + 64 + 1, branches=4, levels=levels)
    made, drafts = [], method._model_drafts
    method._model_drafts = lambda *given, **more: made.append(drafts(*given, **more)) or made[-1]
    generate(target, method, [text], 9, stop_token_ids=())
    (tokens, parents), paths, behind = made[0][0][0, :2], [()], {}
    for node in range(1, made[0][1][0, 0]):
        paths.append((*paths[parents[node]], int(tokens[node])))
        behind.setdefault(paths[-1][:-1], []).append(paths[-1][-1])
    assert [len(path) for path in behind] == [0, *4 * [1], *4 * [2]]
    for path, children in behind.items():
        whole = torch.tensor([[*text, tokens[0], *path]])
        states = unrolled_of(target, drafter, whole, len(path) + 1)[-1]
        assert children == (states[0, len(text)] @ drafter.unembedding.mT).argsort(descending=True).tolist()


def test_a_prompt_that_goes_on_otherwise_behind_a_kept_beginning_is_read_as_if_nothing_were_kept(memorized):
    """The state before the place where the texts part is the same, but not the token behind it."""
    target, drafters, prompts, plain = memorized
    text = prompts[4] + plain[4]
    parted = [*text[:40], (text[40] + 1) % VOCAB_SIZE, 7, 8]
    accepted = []
    for prefixes in (None, Prefixes(1 << 20)):
        engine, ended = Engine(target, Eagle3(drafters["window"], 4), stop_token_ids=(), prefixes=prefixes), []
        for prompt in (prompts[4], parted, text[:41]):
            engine.submit(Request(prompt, 25))
            while engine.has_work:
                ended += [step.generation for step in engine.step() if step.generation is not None]
        accepted.append([(one.tokens, one.accepted) for one in ended])
        cached = [one.cached_tokens for one in ended]
    assert accepted[0] == accepted[1]
    assert cached[0] == 0 < min(cached[1:])


def test_steps_without_the_drafter_are_read_before_it_drafts_again(memorized, monkeypatch):
    """Also where more of them are missed than wait: what is kept of a whole text has no gap."""
    monkeypatch.setattr(model_drafter, "MOST_MISSED", 2)
    target, drafters, prompts, plain = memorized
    sequences = torch.tensor([prompts[row][-9:] + plain[row] for row in (1, 4)])
    target, drafted = target.with_capture((0, 1, 2)), []
    for drafts in (True, False):
        method = Eagle3(drafters["whole"], 4)
        context, cache = begun(method, target, sequences, [9, 9])
        for step in range(5):
            if drafts:
                method.draft(context, 1)
            tree = DraftTree.root_only(context.roots)
            output, none = target.score(tree, cache), torch.zeros(2, dtype=torch.long)
            verified = Verified(none[:, None], none, context.following(0))
            cache.keep(1)
            follow(method, context, tree, output, verified, output.logits[:, 0], sequences[:, 10 + step, None].tolist())
        method.resume(context, [[], []])
        drafted.append(method.read_roots(context).clone())
    torch.testing.assert_close(*drafted, atol=1e-4, rtol=1e-4)


def test_only_where_the_order_says_which_tokens_are_frequent_few_of_them_are_drafted(monkeypatch):
    monkeypatch.setattr(model_drafter, "FEW_TOKENS", 9)
    target, drafter = make(draft_vocab=30)
    assert len(Eagle3(drafter, draft_vocab="auto").for_target(target).kept) == 9
    drafter.kept.copy_(drafter.kept.sort().values)
    assert len(Eagle3(drafter, draft_vocab="auto").for_target(target).kept) == 30
    with pytest.raises(UserError, match="draft_vocab=9 needs a drafter that was trained with draft_vocab=N, and here"):
        Eagle3(drafter, draft_vocab=9)


def test_the_targets_embedding_is_read_where_it_lies():
    target, drafter = make()
    table = Eagle3(drafter, draft_dtype="int8").for_target(target).embed_tokens.weight
    assert table.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
