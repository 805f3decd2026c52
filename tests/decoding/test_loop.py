"""The loop emits the target's own greedy text, ends where it must, and accounts for every token."""

import tempfile
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spectrain.decoding import Drafter, Sampling, generate, stream
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.options import artifact_kinds
from spectrain.methods.registry import method_config, method_names, token_methods
from spectrain.methods.speculative import Speculative
from spectrain.target import Source, TargetModel
from tests.conftest import EOS_ID, FAMILIES, PROCESSORS, in_turn, noisy_copy, random_prompts, tiny_model
from tests.decoding.reference import (
    ScriptedDrafter,
    all_greedy_by_full_forwards,
    greedy_by_full_forwards,
    greedy_by_hugging_face,
    oracle_script,
)
from tests.methods.every import Artifacts, build

N_NEW = 30
LENGTHS = [5, 17, 1, 40, 9, 23, 3]  # more prompts than slots: rows join while others are under way


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request):
    """A model, its target, prompts, and the greedy texts that two independent programs give."""
    model = tiny_model(request.param)
    prompts = random_prompts(LENGTHS)
    texts = [text[: [*text, EOS_ID].index(EOS_ID) + 1] for text in texts_of(request.param)]
    assert texts == [greedy_by_hugging_face(model, prompt, N_NEW) for prompt in prompts]
    assert len({token for text in texts for token in text}) > 15  # no loop of a few tokens
    return TargetModel(model, prefill_chunk=16), prompts, texts, request.param


def true_continuations() -> list[list[int]]:
    """What the targets write after the prompts, so that what is retrieved is often right."""
    return [text for family in FAMILIES for text in texts_of(family)]


@lru_cache
def texts_of(family: str) -> list[list[int]]:
    """The greedy texts of its model, which do not end."""
    return all_greedy_by_full_forwards(tiny_model(family), random_prompts(LENGTHS), N_NEW)


@lru_cache
def artifacts(name: str) -> Artifacts:
    """Of the family of this name; the vanilla drafter agrees with the target often, but not always."""
    model = tiny_model(name)
    return Artifacts(Path(tempfile.mkdtemp()), model, lambda: noisy_copy(model), true_continuations, k=3)


SMALL = {  # options in place of a method's yaml
    "magicdec": {"gamma": 3, "window_tokens": 6},
    "specdecpp": {"threshold": 0.5, "max_candidates": 6},
    "confidence_stop": {"threshold": 0.6, "max_candidates": 6},
    "entropy_stop": {"threshold": 1.0, "max_candidates": 6},
    "lookahead": {"window_columns": 5, "ngram_tokens": 4, "max_guesses": 5},
    "spectra_core": {"pool_sequences": 5},
    "spectra": {"pool_sequences": 5},
}
DRAFTERS = {
    **{name: partial(lambda name, family: drafter_of(name, family), name) for name in method_names()},
    "same model": lambda family: Speculative(TargetModel(tiny_model(family)), gamma=4),
    "other model": lambda family: Speculative(TargetModel(tiny_model("llama", seed=1)), gamma=3),
    "specdecpp, previous": lambda family: drafter_of("specdecpp", family, judge="previous"),
}
SPIRE_FAMILIES = ("llama", "llama_gqa", "qwen3")
OF_EACH_ENGINE = ("llama_gqa", "gpt_neox")
# Every drafter meets one family, and every family meets one drafter of each sort; the other pairs are slow.
EVERY_SORT = ("autoregressive", "same model", "spire", "sssd", "spire_tree")
FAMILIES_AND_DRAFTERS = [
    pytest.param(family, name, marks=() if family == "llama_gqa" or name in EVERY_SORT else pytest.mark.slow)
    for family, name in product(FAMILIES, DRAFTERS)
]
ADAPTIVE = ("specdecpp", "specdecpp, previous", "confidence_stop", "entropy_stop")


def drafter_of(name: str, family: str, **options) -> Drafter:
    if {"spire", "eagle3", "dflash"} & {*artifact_kinds(method_config(name)).values()} and family not in SPIRE_FAMILIES:
        pytest.skip("drafters of our own blocks are for Llama-like targets")
    if name in ("auto", *token_methods()) and family not in OF_EACH_ENGINE:
        pytest.skip("the methods that auto chooses among meet this family, and so do branching trees")
    return build(name, artifacts(family), {**SMALL.get(name, {}), **options})


@pytest.mark.parametrize(("family", "drafter"), FAMILIES_AND_DRAFTERS, indirect=["family"])
def test_greedy_text_is_the_targets_own(family, drafter):
    writes_the_targets_own_text(family, drafter, batch_size=5)


@pytest.mark.parametrize("family", ["llama_gqa"], indirect=True)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_of_one_row_at_a_time_is_the_targets_own(family, drafter):
    writes_the_targets_own_text(family, drafter, batch_size=1)


@pytest.mark.parametrize("family", ["llama_gqa"], indirect=True)
@pytest.mark.parametrize(
    ("processor", "drafter"), in_turn(PROCESSORS, ["spire_tree", "specdecpp"]), indirect=["processor"]
)
def test_greedy_text_is_the_targets_own_on_every_processor(family, drafter, processor):
    writes_the_targets_own_text(family, drafter, batch_size=5)


def writes_the_targets_own_text(family, drafter: str, batch_size: int) -> None:
    target, prompts, texts, name = family
    target = TargetModel(target.model, artifacts(name).target.tokenizer, prefill_chunk=16)
    generations = generate(target, DRAFTERS[drafter](name), prompts, N_NEW, batch_size=batch_size, cache_block_tokens=8)
    assert [generation.tokens for generation in generations] == texts
    for generation in generations:
        assert generation.finish_reason == ("eos" if generation.tokens[-1] == EOS_ID else "length")


def branching_oracle(continuations):
    """The true chain hidden behind wrong siblings, so that every accepted path has to be moved in the cache."""
    chain = oracle_script(continuations, gamma=3)

    def script(context, row):
        nodes, parent = [], 0
        for token, _ in chain(context, row):
            nodes += [((token + 1) % 61, parent), ((token + 2) % 61, parent), (token, parent)]
            parent = len(nodes)
        return nodes

    return script


@pytest.mark.parametrize("batch_size", [1, 5])
def test_greedy_text_through_branching_trees(family, batch_size):
    target, prompts, texts, _ = family
    drafter = ScriptedDrafter(branching_oracle({tuple(p): t for p, t in zip(prompts, texts, strict=True)}))
    generations = generate(target, drafter, prompts, N_NEW, batch_size=batch_size, cache_block_tokens=8)
    assert [generation.tokens for generation in generations] == texts
    full = [g for g in generations if g.finish_reason == "length"]
    assert full
    for generation in full:
        assert generation.accepted[:-1] == [3] * (generation.target_forwards - 1)


@pytest.fixture(scope="module")
def llama():
    """A target, a prompt, and its greedy text, whose first tokens are all different."""
    model = tiny_model("llama")
    for seed in range(20):
        (prompt,) = random_prompts([6], seed)
        text = greedy_by_full_forwards(model, prompt, 20)
        if len(set(text[:8])) == 8:
            return TargetModel(model), prompt, text
    raise AssertionError("no such prompt")


def oracle(prompt: list[int], text: list[int], gamma: int) -> ScriptedDrafter:
    return ScriptedDrafter(oracle_script({tuple(prompt): text}, gamma))


@pytest.mark.parametrize("position", [0, 1, 3, 4, 5])
def test_nothing_follows_eos_inside_an_accepted_block(llama, position):
    target, prompt, text = llama
    eos = text[position]
    # Prefill emits text[0]; with 4 drafts a step the first block is text[1..4] and the bonus text[5].
    steps = list(stream(target, oracle(prompt, text, 4), [prompt], 20, stop_token_ids=[eos]))
    generation = steps[-1].generation
    assert generation.tokens == text[: position + 1] == [token for step in steps for token in step.tokens]
    assert generation.finish_reason == "stop"
    assert generation.target_forwards == (0 if position == 0 else 1)
    assert generation.accepted == ([] if position == 0 else [min(position, 4)])  # cut tokens are not counted


@pytest.mark.parametrize("max_new_tokens", [1, 2, 4, 5, 6, 7])
def test_length_is_cut_inside_an_accepted_block(llama, max_new_tokens):
    target, prompt, text = llama
    (generation,) = generate(target, oracle(prompt, text, 4), [prompt], max_new_tokens, stop_token_ids=())
    assert generation.tokens == text[:max_new_tokens]
    assert generation.finish_reason == "length"
    assert generation.target_forwards == (0 if max_new_tokens == 1 else 1 if max_new_tokens <= 6 else 2)
    assert sum(generation.accepted) + generation.sources.count(Source.ROOT) == max_new_tokens


def test_a_text_ends_where_prompt_and_reply_have_the_greatest_length(llama):
    target, prompts = llama[0], random_prompts([5, 9, 10])
    found = generate(target, Autoregressive(), prompts, 4, stop_token_ids=(), max_length=11, batch_size=3)
    assert [len(one.tokens) for one in found] == [4, 2, 1]
    with pytest.raises(UserError, match="prompt 1 has 9 tokens, which leave none of max_length=9; raise it"):
        generate(target, Autoregressive(), prompts, 4, max_length=9)


def test_the_whole_context_can_be_filled_by_a_drafter_that_ignores_the_room():
    model = tiny_model("llama", max_position_embeddings=16)
    prompt = random_prompts([6])[0]
    text = greedy_by_full_forwards(model, prompt, 10)
    (generation,) = generate(TargetModel(model), oracle(prompt, [*text, *range(9)], 6), [prompt], 10, stop_token_ids=())
    assert generation.tokens == text


def test_drafts_never_reach_over_the_length_at_which_longrope_changes():
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
    factors |= {"rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 8.0}
    model = tiny_model("llama", rope_parameters={"rope_type": "longrope", **factors})
    prompt = random_prompts([6])[0]
    text = greedy_by_full_forwards(model, prompt, 26)
    script = oracle(prompt, [*text, *range(9)], 6)
    (generation,) = generate(TargetModel(model), script, [prompt], 26, stop_token_ids=())
    assert generation.tokens == text
    with pytest.raises(UserError, match="context holds 32, where its RoPE of type longrope changes; shorten"):
        generate(TargetModel(model), script, [prompt], 27)


def test_eos_of_the_generation_config_is_reported_as_eos(llama):
    target, prompt, text = llama
    target.model.generation_config.eos_token_id = [text[2], 60]
    try:
        (generation,) = generate(target, Autoregressive(), [prompt], 20)
    finally:
        target.model.generation_config.eos_token_id = EOS_ID
    assert (generation.tokens, generation.finish_reason) == (text[:3], "eos")


def test_sources_steps_and_drafts_are_recorded(llama):
    target, prompt, text = llama
    wrong_third = [*text[:3], (text[3] + 1) % 61, *text[4:]]
    (generation,) = generate(target, oracle(prompt, wrong_third, 4), [prompt], 8, stop_token_ids=())
    # Step 1 drafts 1 2 x 4, takes 1 2 and the bonus 3; step 2 drafts 4..7 of which all are taken and the bonus is cut.
    assert generation.tokens == text[:8]
    assert generation.drafted == [4, 4]
    assert generation.accepted == [2, 4]
    root, taken = Source.ROOT, Source.INPUT
    assert generation.sources == [root, taken, taken, root, taken, taken, taken, taken]
    assert generation.drafted_by_source == [8 if source is Source.INPUT else 0 for source in Source]
    assert generation.steps_by_depth == [2, 2, 2, 2]
    assert generation.retrieval_hits == 2


def test_drafts_of_ragged_trees_are_counted_a_row(llama):
    target, prompt, _ = llama
    # Two rows, always wrong: one drafts two nodes at depth 1 and one at depth 2, the other one node or nothing.
    trees = {0: [(60, 0), (59, 0), (60, 1)], 1: [(60, 0)]}

    def script(context, row):
        return trees[row] if context.n_tokens[row] % 2 else trees[row][:row]

    drafter = ScriptedDrafter(script)
    generations = generate(target, drafter, [prompt, prompt], 5, batch_size=2, stop_token_ids=())
    for row, generation in enumerate(generations):
        steps = generation.target_forwards
        assert set(generation.drafted) <= {len(trees[row]), row}
        n_full = generation.drafted.count(len(trees[row])) if row == 0 else steps
        assert generation.steps_by_depth == ([n_full, n_full] if row == 0 else [steps])
        assert sum(generation.drafted_by_source) == sum(generation.drafted)
        assert generation.retrieval_hits == n_full


LOOKUPS = ["pld", "anpd", "logitspec", "lookahead", "spectra_core"]


@pytest.mark.parametrize("drafter", ["autoregressive", "speculative", *ADAPTIVE, "magicdec", *LOOKUPS])
def test_a_sample_does_not_depend_on_the_batch(llama, drafter):
    target, _, _ = llama
    prompts = random_prompts(LENGTHS)
    sampling = Sampling(temperature=1.0, top_k=20)
    alone, together = (
        generate(target, DRAFTERS[drafter]("llama"), prompts, 14, sampling, seed=3, batch_size=batch_size)
        for batch_size in (1, 5)
    )
    assert [g.tokens for g in alone] == [g.tokens for g in together]
    other_seed = generate(target, DRAFTERS[drafter]("llama"), prompts, 14, sampling, seed=4, batch_size=5)
    assert [g.tokens for g in alone] != [g.tokens for g in other_seed]


def test_numbers_of_prompts_seed_their_samples(llama):
    target, _, _ = llama
    prompts, sampling = random_prompts(LENGTHS), Sampling(temperature=1.0)
    every = generate(target, Autoregressive(), prompts, 8, sampling)
    some = generate(target, Autoregressive(), prompts[3:5], 8, sampling, prompt_numbers=[3, 4], batch_size=2)
    assert [g.tokens for g in some] == [g.tokens for g in every[3:5]]


def test_shares_of_time_add_up_to_the_run(llama, monkeypatch):
    ticks = []

    def one_second_later() -> float:
        ticks.append(1.0 + len(ticks))
        return ticks[-1]

    monkeypatch.setattr("spectrain.decoding.generation.time.perf_counter", one_second_later)
    generations = generate(llama[0], Autoregressive(), random_prompts([4, 9, 2]), 10, batch_size=2, stop_token_ids=())
    assert sum(g.prefill_s + sum(g.time_s.values()) for g in generations) == pytest.approx(
        ticks[-1] - ticks[1]
    )  # from the drafter's start
    assert max(g.elapsed_s for g in generations) < ticks[-1] - ticks[1]  # the third row joined later


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stop_string_ends_the_text_with_the_token_that_completes_it(llama):
    target, prompt, text = llama
    target = TargetModel(target.model, word_tokenizer())
    stop = f"w{text[2]} w{text[3]}"  # spans two tokens of one accepted block
    (generation,) = generate(target, oracle(prompt, text, 6), [prompt], 20, stop_token_ids=(), stop=["absent", stop])
    assert generation.tokens == text[:4]
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompts": [[4], []]}, "prompt 1 is empty"),
        ({"prompts": [[4] * 250]}, "250 tokens and max_new_tokens=10, but the target's context holds 256"),
        ({"prompts": [[4, 61]]}, "token id 61, but the target's vocabulary has 61"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"stop": ["x"]}, "tokenizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_request_is_one_sentence(llama, change, reason):
    request = {"prompts": [[4, 5]], "max_new_tokens": 10, **change}
    with pytest.raises(UserError, match=reason):
        generate(llama[0], Autoregressive(), **request)


def test_one_drafter_serves_many_runs(llama):
    target, _, _ = llama
    drafter = Speculative(TargetModel(noisy_copy(target.model)))
    prompts = random_prompts([4, 9, 2])
    first = generate(target, drafter, prompts, 12, batch_size=3)
    again = generate(target, drafter, prompts, 12, batch_size=1)
    assert [g.tokens for g in first] == [g.tokens for g in again]
    assert [g.accepted for g in first] == [g.accepted for g in again]


def test_a_stream_gives_each_generation_with_its_last_tokens(llama):
    target, prompts, sampling = llama[0], random_prompts(LENGTHS), Sampling(temperature=1.0)
    finished = {}
    for number, step in enumerate(stream(target, Autoregressive(), prompts, 9, sampling, batch_size=2)):
        assert step.request not in finished
        if step.generation is not None:
            finished[step.request] = (step.generation.tokens, number)
    generations = generate(target, Autoregressive(), prompts, 9, sampling, batch_size=2)
    assert [finished[i][0] for i in range(len(LENGTHS))] == [generation.tokens for generation in generations]
    assert len({when for _, when in finished.values()}) > 1
