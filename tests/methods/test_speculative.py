"""The drafted chain: its own cache, ragged catch-up, and the check of the vocabulary."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from spectrain.decoding import Sampling, generate
from spectrain.drafting.tree_drafter import TreeDrafter
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.speculative import Speculative
from spectrain.target import KVCache, TargetModel
from tests.conftest import in_turn, noisy_copy, random_prompts, tiny_model
from tests.decoding.reference import cached_states
from tests.decoding.test_loop import word_tokenizer


def test_a_drafter_equal_to_the_target_is_always_accepted(llama_target):
    drafter = Speculative(llama_target, gamma=3)
    for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.9)):
        generations = generate(llama_target, drafter, random_prompts([5, 8]), 14, sampling, stop_token_ids=())
        for generation in generations:
            # 1 + 4 + 4 + 4 tokens; for the last one there is no room to draft.
            assert generation.accepted == [3, 3, 3, 0]
            assert generation.drafted == [3, 3, 3, 0]


class Watched(Speculative):
    """Compares the draft cache, once it knows a row's text, with a fresh prefill of that text."""

    checked = 0
    fed_two = 0

    def _read_unseen(self, context):
        missing = [total - known for total, known in zip(context.n_tokens, self.cache.lengths, strict=True)]
        assert max(missing) <= 2
        self.fed_two += missing.count(2)
        said = super()._read_unseen(context)
        for row, length in enumerate(context.n_tokens):
            assert self.cache.lengths[row] == length
            fresh = KVCache(1)
            self.draft_model.prefill(context.tokens[[row], :length], [length], fresh, range(1))
            for got, expected in zip(cached_states(self.cache, row), cached_states(fresh, 0), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            self.checked += 1
        return said


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
def test_draft_cache_holds_the_committed_text_in_a_ragged_batch(llama_target, sampling):
    drafter = Watched(TargetModel(noisy_copy(llama_target.model)), gamma=3)
    generate(llama_target, drafter, random_prompts([5, 17, 1, 9]), 15, sampling, batch_size=3, cache_block_tokens=8)
    assert drafter.checked > 15
    assert 0 < drafter.fed_two < drafter.checked  # both kinds of catch-up occurred


@pytest.mark.parametrize(("vocabs", "engine"), in_turn([(576, 544), (544, 576)], ["lean", "transformers"]), ids=str)
def test_tables_of_one_tokenizer_may_have_unequal_rows(vocabs, engine):
    """Texts are those of plain decoding, also where the target writes tokens that the draft model does not have."""
    target_vocab, draft_vocab = vocabs
    target = TargetModel(tiny_model("llama", vocab_size=target_vocab), word_tokenizer(), engine=engine)
    draft = TargetModel(tiny_model("qwen3", seed=2, vocab_size=draft_vocab), word_tokenizer(), engine=engine)
    chain, tree = Speculative(draft), TreeDrafter(Speculative(draft), max_nodes=8)
    greedy, shared = Sampling(), Sampling(temperature=1.0, draws="shared")
    for n_rows, samplings in ((1, (greedy, shared)), (3, (greedy, shared)), (100, (shared,))):
        prompts = random_prompts([5 + i % 3 for i in range(n_rows)])
        for sampling in samplings:
            asked = {"sampling": sampling, "stop_token_ids": (), "batch_size": n_rows}
            expected = [one.tokens for one in generate(target, Autoregressive(), prompts, 7, **asked)]
            assert n_rows < 100 or target_vocab < draft_vocab or max(map(max, expected)) >= draft_vocab
            for drafter in (chain, tree):
                found = generate(target, drafter, prompts, 7, **asked)
                assert [one.tokens for one in found] == expected
    for verification in ("token", "block"):  # which draw from q
        sampling = Sampling(temperature=1.0, draws="inverse")
        found = generate(target, chain, prompts, 7, sampling, batch_size=100, verification=verification)
        assert max(max(one.tokens) for one in found) < target_vocab
        assert sum(sum(one.accepted) for one in found) > 50


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_drafter_whose_logits_are_nan_drafts_in_vain(llama_target, verification):
    drafting = noisy_copy(llama_target.model)
    drafting.model.norm.weight.data.fill_(torch.nan)
    prompts, sampling = random_prompts([5, 9]), Sampling(temperature=1.0)
    drafter = Speculative(TargetModel(drafting))
    for found in generate(llama_target, drafter, prompts, 10, sampling, batch_size=2, verification=verification):
        assert all(0 <= token < llama_target.vocab_size for token in found.tokens)
        assert not any(found.accepted)


def test_other_vocabulary_is_refused():
    target = TargetModel(tiny_model("llama"))
    draft = TargetModel(tiny_model("llama", vocab_size=50))
    with pytest.raises(UserError, match="vocabulary has 50 tokens, the target's 61"):
        generate(target, Speculative(draft), [[4]], 5)


def test_other_tokenizer_is_refused():
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"v{i}": i for i in range(61)}, "v0")))
    model = tiny_model("llama")
    with pytest.raises(UserError, match="tokenizer"):
        generate(TargetModel(model, word_tokenizer()), Speculative(TargetModel(model, other)), [[4]], 5)
