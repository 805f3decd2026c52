"""EAGLE-3 exports in a running vLLM, by its own method and classes: they draft what our loop drafts, losslessly."""

from __future__ import annotations

import pytest
import torch

from spectrain.exports.eagle3 import write_for_engine
from spectrain.methods.eagle3 import Eagle3
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, default_layers, unrolled
from spectrain.target.lean import shape_of
from tests.engines.alike import GAMMA, N_LAYER, check_alike, learned, target
from tests.models.test_eagle3 import LLAMA3, export

pytestmark = pytest.mark.slow
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


def trained(**options) -> Eagle3Drafter:
    torch.manual_seed(0)
    shape = shape_of(target().model)
    shape.rope_parameters.update(options.pop("rope", {}))
    layers = options.pop("target_layers", default_layers(N_LAYER))
    drafter = Eagle3Drafter(Eagle3Config(shape, layers, k=GAMMA, **options), target())
    return learned(drafter, lambda tokens, states: unrolled(drafter, tokens[:, :-1], states[:, :-1], 2))


@pytest.mark.parametrize("case", CASES)
def test_the_engine_drafts_and_accepts_what_our_loop_does(engine, case, tmp_path):
    options, as_speculators = CASES[case]
    drafter = trained(**options)
    folder = export(tmp_path / "drafter", target(), drafter)
    said = write_for_engine(folder, str(folder), "tiny", target(), speculators=as_speculators)
    folder = folder / "speculators" if as_speculators else folder
    assert '"method":"eagle3"' in said
    speculative = {"method": "eagle3", "model": str(folder)}
    check_alike(engine, tmp_path, speculative, lambda: Eagle3(drafter, GAMMA, draft_dtype="float32"))
