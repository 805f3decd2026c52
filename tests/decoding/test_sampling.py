"""Warping against Hugging Face's own processors; draws by hand."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spectrain import kernels
from spectrain.decoding import Engine, Request, generate
from spectrain.decoding.sampling import RowSampling, Sampling, Uniforms, draw_token, row_generator
from spectrain.drafting.tree_drafter import TreeDrafter
from spectrain.errors import UserError
from spectrain.kernels.reference import draw_by_noise, mixed
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.pld import PromptLookup
from spectrain.methods.speculative import Speculative
from spectrain.target import TargetModel
from tests.conftest import noisy_copy, random_prompts, tiny_model


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 1000},
    ],
    ids=str,
)
def test_warp_equals_hugging_face(options):
    logits = 3 * torch.randn(16, 61, generator=torch.Generator().manual_seed(1))
    scores = TemperatureLogitsWarper(options["temperature"])(None, logits)
    for key, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if key in options:
            scores = warper(options[key])(None, scores)
    torch.testing.assert_close(Sampling(**options).warp(logits), scores.softmax(-1), rtol=1e-5, atol=1e-7)


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    probs = Sampling(temperature=1.0, top_k=2).warp(torch.tensor([[2.0, 1.0, 1.0, 0.0]]))
    assert (probs[0] > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("size", [1, 7, 64, 5000])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"temperature": 0.1, "top_k": 200},
        {"top_p": 0.9},
        {"temperature": 20.0, "top_p": 0.5},
        {"temperature": 0.6, "top_p": 1e-6},
        {"min_p": 0.3},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.7, "min_p": 0.05},
    ],
    ids=str,
)
def test_compiled_operations_are_those_of_torch(options, size, scale, monkeypatch):
    generator, sampling = torch.Generator().manual_seed(1), Sampling(**{"temperature": 1.0, **options})
    logits = scale * torch.randn(3, 4, size, generator=generator)
    logits[0] = logits[0].round()  # many are equal
    logits[1, :, ::3] = -torch.inf if size > 1 else 0
    uniforms = torch.rand(12, generator=generator)
    uniforms[4] = 0.0  # where the first token has no weight
    probs = sampling.warp(logits)
    tokens = draw_token(probs.view(12, size), uniforms)
    monkeypatch.setattr(kernels, "reads", lambda values: False)
    torch.testing.assert_close(probs, sampling.warp(logits), rtol=3e-5, atol=1e-7)
    assert tokens.tolist() == draw_token(probs.view(12, size), uniforms).tolist()


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_any_temperature_gives_probabilities(options, is_compiled, monkeypatch):
    """Nothing overflows: temperatures near 0 are greedy, and very high ones uniform over the tokens that are left."""
    if not is_compiled:
        monkeypatch.setattr(kernels, "reads", lambda values: False)
    logits = torch.tensor([[[3.0, -torch.inf, 40.0, 39.0], [1e4, -1e4, -1e-3, -torch.inf]]])
    greedy, best = Sampling(), [[2, 0]]
    one_hot = torch.nn.functional.one_hot(torch.tensor(best), 4).float()
    for temperature in (0, 0.0, -0.0, 5e-324, 1e-40, 1e-38, 1e-10, 1e-6, 9.9e-6):
        sampling = Sampling(temperature, **options)
        assert sampling.greedy
        assert sampling.same_distribution(greedy)
        assert sampling.describe() == "greedy"
        assert sampling.draw(logits[0], None)[0].tolist() == best[0]
        mixed_rows = RowSampling([sampling, Sampling(1.0)])
        probs = mixed_rows.warp(logits.expand(2, -1, -1))
        assert torch.equal(probs[0], one_hot[0])
        assert probs.isfinite().all()
    for temperature in (1e-5, 1e-4, 1e-3):
        assert torch.equal(Sampling(temperature, **options).warp(logits), one_hot)
    for temperature in (1e30, 1e38, 3.5e38, 1e300):  # the second one overflows float32
        probs = Sampling(temperature, **options).warp(logits)
        torch.testing.assert_close(probs, logits.isfinite() / 3, rtol=1e-5, atol=0)


def test_a_text_at_a_temperature_near_0_is_the_greedy_one():
    target = TargetModel(tiny_model("llama"))
    chain = Speculative(TargetModel(noisy_copy(target.model)))
    drafters = [Autoregressive(), PromptLookup(), chain, TreeDrafter(chain, max_nodes=6)]
    asked = {"max_new_tokens": 8, "stop_token_ids": (), "batch_size": 2}
    expected = [found.tokens for found in generate(target, Autoregressive(), random_prompts([5, 6]), **asked)]
    for draws, temperature in (("inverse", 1e-40), ("shared", 1e-40), ("shared", 1e-5), ("shared", 1e-3)):
        for drafter in drafters:
            sampling = Sampling(temperature, draws=draws)
            found = generate(target, drafter, random_prompts([5, 6]), sampling=sampling, **asked)
            assert [one.tokens for one in found] == expected, (draws, temperature, drafter)


def test_top_k_where_whole_stretches_of_the_vocabulary_have_no_weight():
    """Fewer stretches with weight than tokens to be kept."""
    logits = torch.full((1, 128), -torch.inf)
    logits[0, :64] = -0.1 * torch.arange(64)
    assert int((Sampling(temperature=1.0, top_k=2).warp(logits) > 0).sum()) == 2
    wide = 3 * torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    wide[0, 640:] = -40.0
    assert int((Sampling(temperature=0.3, top_k=50).warp(wide) > 0).sum()) == 50


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_give_no_probabilities(options, value):
    logits = torch.randn(2, 300)
    logits[1, 17] = value
    probs = Sampling(temperature=1.0, **options).warp(logits)
    assert probs[0].isfinite().all()
    assert not probs[1].isfinite().any()
    assert draw_token(probs, torch.tensor([0.5, 0.5]))[1] == 299


def test_draw_inverts_the_cumulative_distribution():
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]]).expand(4, -1)  # cumulative 0, 2, 2, 8, 8
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 1 - 2**-24])
    assert draw_token(weights, uniforms).tolist() == [1, 1, 3, 3]


def test_draw_never_takes_a_token_without_weight():
    weights = torch.rand(2000, 300, generator=torch.Generator().manual_seed(0))
    weights[:, 200:] = 0
    largest = torch.full((2000,), 1 - 2**-24)
    assert int(draw_token(weights, largest).max()) < 200
    weights[:, :150] = 0
    assert draw_token(weights, torch.zeros(2000)).tolist() == [150] * 2000


def test_neighbouring_prompts_draw_independently():
    pairs = torch.stack(
        [torch.rand(2, generator=row_generator(seed, index)) for seed in range(2) for index in range(2000)]
    )
    cells = (pairs * 4).long()
    successive = cells[:-1, 0] * 4 + cells[1:, 0]  # first draws of prompts i and i + 1
    assert chisquare(torch.bincount(successive, minlength=16).numpy()).pvalue > 1e-4
    assert pairs[:, 0].unique().numel() > 3990


def test_each_row_reads_its_own_stream_whatever_its_neighbours_take():
    """Rows take different counts, leave and join, and read on past their blocks of 8 numbers."""
    generator = torch.Generator().manual_seed(0)
    uniforms, numbers = Uniforms([row_generator(0, index) for index in range(3)], ahead=8), [0, 1, 2]
    read: dict[int, list[float]] = {number: [] for number in range(6)}
    for step in range(60):
        count = int(torch.randint(1, 5, (1,), generator=generator)) if step != 30 else 20  # more than a block
        used = torch.randint(0, count + 1, (len(numbers),), generator=generator)
        taken = uniforms.take(count, used)
        for number, row, n_used in zip(numbers, taken.tolist(), used.tolist(), strict=True):
            read[number] += row[:n_used]
        if step in (10, 20, 40):
            uniforms.free(0)
            uniforms.append([row_generator(0, max(numbers) + 1)])
            numbers = [numbers[-1], *numbers[1:-1], max(numbers) + 1]
    assert min(map(len, read.values())) > 8
    for number, found in read.items():
        assert found == torch.rand(len(found), generator=row_generator(0, number)).tolist()


def test_options_that_depend_on_the_text_are_refused_with_those_that_do_not():
    with pytest.raises(
        UserError, match=r"repetition_penalty; .* temperature, top_k, top_p, min_p, draws, and nothing that"
    ):
        Sampling.from_options({"temperature": 1.0, "repetition_penalty": 1.2})
    with pytest.raises(UserError, match=r"unknown sampling option: typical_p; .* temperature"):
        Sampling.from_options({"typical_p": 0.9})
    assert Sampling.from_options({"temperature": 1.0, "top_k": 5}) == Sampling(temperature=1.0, top_k=5)


def test_draws_by_noise_are_the_same_compiled_and_in_torch():
    probs, keys = torch.randn(200, 300).mul(2).softmax(-1), mixed(torch.arange(200))
    assert draw_token(probs, keys).tolist() == draw_by_noise(probs, keys).tolist()
    assert len(set(draw_token(probs[:1].expand(200, -1), keys).tolist())) > 20


def test_greedy_is_one_law_whatever_else_is_set():
    assert Sampling().same_distribution(Sampling(top_k=50))
    assert Sampling(temperature=1.0).same_distribution(Sampling(temperature=1.0, draws="shared"))
    assert Sampling(temperature=1.0).same_distribution(Sampling(temperature=1.0))
    assert not Sampling(temperature=1.0).same_distribution(Sampling(temperature=1.0, top_k=50))
    assert not Sampling().same_distribution(Sampling(temperature=1.0))


MIXED = [
    Sampling(),
    Sampling(temperature=0.7, top_k=9),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0.7, min_p=0.05),
    Sampling(),
]


@pytest.mark.parametrize("draws", ["inverse", "shared"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("method", ["autoregressive", "speculative", "pld"])
def test_each_row_of_a_mixed_batch_has_the_text_that_it_has_alone(method, compiled, draws, monkeypatch):
    if not compiled:
        monkeypatch.setattr(kernels, "reads", lambda values: False)
    samplings = [replace(one, draws=draws) for one in MIXED]
    model, prompts = tiny_model("llama_gqa"), random_prompts([5, 9, 3, 7, 4])
    target = TargetModel(model)

    def drafter():
        if method == "speculative":
            return Speculative(TargetModel(noisy_copy(model)), 3)
        return Autoregressive() if method == "autoregressive" else PromptLookup(max_nodes=4)

    engine, together = Engine(target, drafter(), 3, draws=draws, stop_token_ids=()), {}
    for number, (prompt, own) in enumerate(zip(prompts, samplings, strict=True)):
        engine.submit(Request(prompt, 20, own, number=number))
    while engine.has_work:
        together |= {step.request: step.generation for step in engine.step() if step.generation}
    for i, prompt in enumerate(prompts):
        alone = generate(target, drafter(), [prompt], 20, samplings[i], prompt_numbers=[i], stop_token_ids=())
        assert together[i].tokens == alone[0].tokens, i
