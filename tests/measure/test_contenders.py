"""Our loop and Hugging Face's own generation answer through one call, with equal greedy texts."""

import copy

import pytest
import torch

from spectrain.decoding import Sampling, TargetModel
from spectrain.decoding.errors import UserError
from spectrain.measure.contenders import PEERS, Method, Work, build_peer
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.speculative import Speculative
from tests.conftest import noisy_copy, random_prompts, tiny_model

LOOKUP = {"draft_tokens": 5, "max_ngram": 3}
GREEDY = Work(20, Sampling())


@pytest.fixture(scope="module")
def target() -> TargetModel:
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 1.5  # must not reach the comparison
    return TargetModel(model)


def peer(name: str, target: TargetModel):
    return build_peer(name, target, LOOKUP, Speculative(TargetModel(noisy_copy(target.model)), gamma=3))


@pytest.mark.parametrize("name", PEERS)
def test_peers_write_the_greedy_text_of_our_loop(target, name):
    prompts = random_prompts([9, 30])
    ours = Method(target, Autoregressive()).decode(prompts, [0, 1], GREEDY)
    theirs = peer(name, target).decode(prompts, [0, 1], GREEDY)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)
        assert b.prefill_s == b.elapsed_s > 0
        assert 0 < b.target_forwards <= a.target_forwards
    if name == "hf_generate":
        assert [g.target_forwards for g in theirs] == [g.target_forwards for g in ours]
    assert target.model.generation_config.repetition_penalty == 1.5


def test_the_draft_length_reaches_the_assistant(target):
    same = build_peer("hf_assisted", target, LOOKUP, Speculative(TargetModel(copy.deepcopy(target.model)), gamma=3))
    prompt = random_prompts([9])
    (generation,) = same.decode(prompt, [0], GREEDY)
    # Every draft is right: a forward gives three tokens and one more, the one that reads the prompt too.
    assert generation.target_forwards == -(-len(generation.tokens) // 4)
    assert (len(generation.tokens) - 1) / generation.target_forwards <= 4


def test_peers_sample_reproducibly_and_leave_the_global_generator_alone(target):
    work = Work(20, Sampling(temperature=1.0, top_k=20))
    before = torch.get_rng_state()
    texts = [peer("hf_generate", target).decode(random_prompts([9]), [n], work)[0].tokens for n in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(before, torch.get_rng_state())


def test_methods_sample_by_the_numbers_of_their_prompts(target):
    work = Work(12, Sampling(temperature=1.0), batch_size=2)
    prompts = random_prompts([9, 9, 9])
    method = Method(target, Autoregressive())
    together = method.decode(prompts, [5, 6, 7], work)
    alone = method.decode(prompts[2:], [7], work)
    assert together[2].tokens == alone[0].tokens


def test_what_a_peer_cannot_do_is_one_sentence(target):
    with pytest.raises(UserError, match="peers=x is unknown; choose among hf_generate"):
        build_peer("x", target, LOOKUP, None)
    with pytest.raises(UserError, match="batch_size=1"):
        peer("hf_generate", target).decode([[4]], [0], Work(5, Sampling(), batch_size=2))
