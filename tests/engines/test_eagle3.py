"""EAGLE-3 exports in a running vLLM, by its own method and classes: they draft what our loop drafts, losslessly."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from spectrain.decoding import generate
from spectrain.exports.eagle3 import write_for_engine
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.eagle3 import Eagle3
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, default_layers, unrolled
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from tests.conftest import VOCAB_SIZE, random_prompts, tiny_model
from tests.engines.engine import saved
from tests.engines.test_vanilla import accepted_per_position
from tests.models.test_artifacts import tiny_tokenizer
from tests.models.test_eagle3 import LLAMA3, export

pytestmark = pytest.mark.slow
GAMMA, NEW, N_LAYER = 4, 24, 8
SMALL = {"draft_vocab": 40}
ALL_NORMS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
CASES = {  # options of the drafter; whether vLLM reads the copy in the format of speculators
    "plain": ({}, False),
    "few tokens, scaled RoPE": ({**SMALL, "rope": LLAMA3}, False),
    "the target's tables": ({"unembedding": "target", "fc_norm": True, "norm_output": True}, False),
    "the target's rows, its own embedding": ({**SMALL, "unembedding": "target", "own_embedding": True}, False),
    "two other layers": ({**SMALL, "target_layers": (1, 7), "fc_norm": True}, False),
    "all norms": (ALL_NORMS, False),
    "speculators": ({**SMALL, "norm_before_fc": True, "norm_output": True}, True),
}


@cache
def target() -> TargetModel:
    """As wide as that of test_spire.py, so that rounding changes no draft."""
    sizes = {"hidden_size": 128, "num_key_value_heads": 2, "num_hidden_layers": N_LAYER, "eos_token_id": None}
    return TargetModel(tiny_model("llama", initializer_range=0.15, **sizes), tiny_tokenizer())


@cache
def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that the target writes, [B, L], and the states of all of its blocks."""
    prompts = random_prompts([6] * 8, seed=1)
    found = generate(target(), Autoregressive(), prompts, 58)
    tokens = torch.tensor([prompt + one.tokens for prompt, one in zip(prompts, found, strict=True)])
    return tokens, target().with_capture(range(N_LAYER)).features(tokens).captured.detach()


def trained(**options) -> Eagle3Drafter:
    """A drafter that learned some of its target's texts, so that some of its drafts are accepted, and others not."""
    torch.manual_seed(0)
    shape = shape_of(target().model)
    shape.rope_parameters.update(options.pop("rope", {}))
    layers = options.pop("target_layers", default_layers(N_LAYER))
    drafter = Eagle3Drafter(Eagle3Config(shape, layers, k=GAMMA, **options), target())
    for name, weight in drafter.named_parameters():
        torch.nn.init.normal_(weight, *((1.0, 0.3) if "norm" in name else (0.0, 0.08)))
    if drafter.kept is not None:
        drafter.kept.copy_(torch.randperm(VOCAB_SIZE)[: len(drafter.kept)])
    optimizer, (tokens, states) = torch.optim.Adam(drafter.parameters(), lr=3e-3), texts()
    for _ in range(60):
        found = torch.stack(unrolled(drafter, tokens[:, :-1], states[:, :-1, list(layers)], 2))
        logits = drafter.spread(F.linear(found, drafter.unembedding), -20.0)
        loss = sum(F.cross_entropy(one[:, 1 : 60 - i].mT, tokens[:, 2 + i : 61]) for i, one in enumerate(logits))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False).eval()


class Recording(Eagle3):
    """Keeps its drafts."""

    def draft(self, context, gamma):
        tree = super().draft(context, gamma)
        self.drafts.append(tree.tokens[0, 1:].tolist())
        return tree


@pytest.mark.parametrize("case", CASES)
def test_the_engine_drafts_and_accepts_what_our_loop_does(engine, case, tmp_path):
    options, as_speculators = CASES[case]
    drafter = trained(**options)
    folder = export(tmp_path / "drafter", target(), drafter)
    said = write_for_engine(folder, str(folder), "tiny", target(), speculators=as_speculators)
    folder = folder / "speculators" if as_speculators else folder
    assert '"method":"eagle3"' in said
    speculative = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": GAMMA}
    engine.load(saved(target(), tmp_path), speculative)
    engine.ask("record")
    prompts, generations, counts = [*random_prompts([3, 40, 130]), texts()[0][0, :20].tolist()], [], torch.zeros(GAMMA)
    for prompt in prompts:
        method = Recording(drafter, GAMMA, draft_dtype="float32")
        method.drafts = []
        (found,) = generate(target(), method, [prompt], NEW + GAMMA)
        served, generations = engine.generate([prompt], NEW, ignore_eos=True), [*generations, found]
        assert served.tokens == [found.tokens[:NEW]]
        theirs = engine.ask("drafted")
        full = [own for own in method.drafts[: len(theirs)] if len(own) == GAMMA]  # the last ones may be cut
        assert len(full) > 3
        assert theirs[: len(full)] == full
        counts += torch.tensor(served.accepted_per_position)
    assert counts.tolist() == accepted_per_position(generations, NEW)
    assert sum(counts) > 3
