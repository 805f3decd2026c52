"""DFlash exports in a running vLLM, by its own method and classes: they draft what our loop drafts, losslessly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spectrain.decoding import generate
from spectrain.exports.cards import json_argument
from spectrain.exports.dflash import write_for_engine
from spectrain.methods.dflash import DFlash
from spectrain.models.dflash import DFlashConfig, DFlashDrafter, drafted
from spectrain.models.drafter_model import plain_shape
from spectrain.target.lean import shape_of
from tests.conftest import VOCAB_SIZE, random_prompts
from tests.engines.engine import saved
from tests.engines.test_eagle3 import GAMMA, NEW, target, texts
from tests.engines.test_vanilla import accepted_per_position
from tests.models.tiny_dflash import export_dflash

pytestmark = pytest.mark.slow
CASES = {
    "the target's tables": {},
    "its own unembedding, few tokens": {"draft_vocab": 40, "unembedding": "trained"},
}


def trained(**options) -> DFlashDrafter:
    """A drafter that learned some of its target's texts, so that some of its drafts are accepted, and others not."""
    torch.manual_seed(0)
    shape, layers = plain_shape(shape_of(target().model), qk_norm=True), (1, 4, 6)
    config = DFlashConfig(shape, layers, n_layer=2, block_tokens=GAMMA + 1, mask_token=VOCAB_SIZE - 1, **options)
    drafter = DFlashDrafter(config, target())
    for name, weight in drafter.named_parameters():
        torch.nn.init.normal_(weight, *((1.0, 0.3) if "norm" in name else (0.0, 0.08)))
    if drafter.kept is not None:
        drafter.kept.copy_(torch.randperm(VOCAB_SIZE)[: len(drafter.kept)])
    optimizer, (tokens, states) = torch.optim.Adam(drafter.parameters(), lr=3e-3), texts()
    for _ in range(60):
        found = torch.stack(drafted(drafter, tokens, states[:, :, list(layers)]))
        logits = drafter.spread(F.linear(found, drafter.unembedding), -20.0)
        loss = sum(F.cross_entropy(one[:, 1 : 60 - i].mT, tokens[:, 2 + i : 61]) for i, one in enumerate(logits))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for block in drafter.blocks:  # vLLM 0.32.0 for CPUs norms the context's keys of all blocks as the first one's
            block.key_norm.weight.data.copy_(drafter.blocks[0].key_norm.weight)
    return drafter.requires_grad_(False).eval()


class Recording(DFlash):
    """Keeps its drafts."""

    def draft(self, context, gamma):
        tree = super().draft(context, gamma)
        self.drafts.append(tree.tokens[0, 1:].tolist())
        return tree


@pytest.mark.parametrize("case", CASES)
def test_the_engine_drafts_and_accepts_what_our_loop_does(engine, case, tmp_path):
    drafter = trained(**CASES[case])
    folder = export_dflash(tmp_path / "drafter", target(), drafter)
    said = write_for_engine(folder, str(folder), "tiny", target())
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": GAMMA}
    assert json_argument(**speculative) in said
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
