"""On a device that is not the CPU each method writes the same text, and a step copies little between it and the host.

The device is pretended (`tests/support/pretend.py`), so this runs without a GPU. On a GPU the host waits for a copy
until all kernels before it are done, unless the copy is `non_blocking`, and launches nothing in the meantime. Prefill
is not counted.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from spectrain.decoding import Drafter, Sampling, generate, graph_capture
from spectrain.decoding.loop import Batch
from spectrain.decoding.sampling import Uniforms
from spectrain.drafting.draft_chain import PIECE
from spectrain.drafting.tree_drafter import LEVELS
from spectrain.kernels import Graphs
from spectrain.methods.registry import BASELINE, build_method, method_config, method_names, with_papers_nodes
from spectrain.target import TargetModel
from tests.conftest import VOCAB_SIZE, in_turn, noisy_copy, random_prompts, tiny_model
from tests.decoding.reference import all_greedy_by_full_forwards
from tests.decoding.test_loop import SMALL
from tests.methods.every import Artifacts
from tests.support.pretend import Copy, PretendDevice, pretend_device

LENGTHS, N_NEW = (5, 14, 9), 12
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8)}
# Which draft chains.
MODELS = ("speculative", "spire", "eagle3", "dflash", "magicdec", "specdecpp", "confidence_stop", "entropy_stop")
# Lookups propose the same however tokens are drawn, so that two of them stand for all where they are sampled.
SAMPLED = ("autoregressive", "sssd", "lookahead", "spire_tree", *MODELS)
EACH_SAMPLED_OR_NOT = [*((name, "greedy") for name in method_names()), *((name, "sampled") for name in SAMPLED)]
# Graphs are recorded alike whatever is drawn, and by all methods of one sort.
OF_EACH_SORT = [("auto", "greedy"), ("specdecpp", "greedy"), ("spire", "sampled"), ("spire_tree", "greedy")]
OF_EACH_SORT += [("sssd", "greedy"), ("autoregressive", "sampled")]
# Where graphs are played, each method is drawn in one way, the models sampled.
ONCE = [
    pytest.param(name, how, marks=pytest.mark.slow if how == "greedy" and name in SAMPLED else ())
    for name, how in EACH_SAMPLED_OR_NOT
]
RECORDED = [pytest.param(*one, marks=() if one in OF_EACH_SORT else pytest.mark.slow) for one in EACH_SAMPLED_OR_NOT]
# Of a step, where it is not one. Stop rules are asked token by token, of at most 6; the host chooses which nodes of a
# tree are read next, level by level. A method of `auto` that runs for the first time may want to know the last logits.
MOST_READS = {
    "auto": 2,
    "dflash_tree": 1 + LEVELS,
    "confidence_stop": 7,
    "entropy_stop": 7,
    "specdecpp": 7,
    **{f"{model}_{kind}": 1 + LEVELS for model in ("spire", "eagle3", "speculative") for kind in ("tree", "sssd")},
}


@lru_cache
def artifacts() -> Artifacts:
    """Datastores hold the target's own continuations with gaps, so retrieved drafts are sometimes right."""
    model = tiny_model("llama_gqa", num_hidden_layers=2)
    texts = all_greedy_by_full_forwards(model, random_prompts(LENGTHS), 30)
    documents = [[token for place, token in enumerate(text) if place % 6] for text in texts]
    return Artifacts(Path(tempfile.mkdtemp()), model, lambda: noisy_copy(model), lambda: documents, k=3)


def method_of(name: str, target: TargetModel) -> Drafter:
    """Its draft model computes in float32, as the target: on a CPU it would be in int8."""
    config = with_papers_nodes(method_config(name))
    options = {"draft_dtype": "float32"} if "draft_dtype" in config else {}
    if name == "auto":  # without methods that have a draft model, whose dtype it would leave to the device
        options = {"methods": ["pld", "lookahead"]}
    return build_method(OmegaConf.merge(config, SMALL.get(name, {}), options), target, artifacts())


def decoded(name: str, target: TargetModel, sampling: Sampling) -> list[list[int]]:
    """The texts of a method."""
    drafter = method_of(name, target)
    found = generate(target, drafter, random_prompts(LENGTHS), N_NEW, sampling, batch_size=3, cache_block_tokens=8)
    return [generation.tokens for generation in found]


@lru_cache
def decoded_on_the_cpu(name: str, how: str) -> list[list[int]]:
    return decoded(name, artifacts().target, SAMPLINGS[how])


@dataclass(frozen=True)
class Step:
    """The copies of one step that the host had to wait for."""

    reads: list[Copy]
    writes: list[Copy]


@pytest.fixture
def copies_per_step(monkeypatch):
    """Makes of a device the list to which each step of the loop will be added."""
    step = Batch.step

    def attach(device: PretendDevice) -> list[Step]:
        steps = []

        def noted(batch: Batch):
            n_reads, n_writes = len(device.reads), len(device.writes)
            emitted = step(batch)
            steps.append(Step(device.reads[n_reads:], [copy for copy in device.writes[n_writes:] if copy.waits]))
            return emitted

        monkeypatch.setattr(Batch, "step", noted)
        return steps

    return attach


@pytest.mark.parametrize(("name", "how"), EACH_SAMPLED_OR_NOT)
def test_text_and_copies_on_a_device(name, how, copies_per_step):
    expected = decoded_on_the_cpu(name if how == "sampled" else BASELINE, how)  # greedy, all write the same
    with pretend_device() as device:
        target = device.target(artifacts().target.model, artifacts().target.tokenizer)
        steps = copies_per_step(device)
        assert decoded(name, target, SAMPLINGS[how]) == expected
    assert steps
    for kind, allowed in (("reads", MOST_READS.get(name, 1)), ("writes", 0)):
        copies = max((getattr(step, kind) for step in steps), key=len)
        places = [f"{times} at {place}" for place, times in Counter(copy.site for copy in copies).items()]
        assert len(copies) <= allowed, f"a step of {name} has {len(copies)} {kind}: {', '.join(places)}"


@pytest.mark.parametrize(
    ("name", "with_graphs"),
    in_turn(["speculative", "spire", "eagle3", "dflash", "specdecpp", "magicdec"], [False, True]),
)
def test_drafts_that_stop_at_an_end_of_text_are_those_of_the_cpu(name, with_graphs, monkeypatch):
    """Where random numbers are drawn anew within drafts, too."""
    options = {"batch_size": 3, "cache_block_tokens": 8, "stop_token_ids": range(1, VOCAB_SIZE, 12)}
    begin = Uniforms.__init__
    monkeypatch.setattr(
        Uniforms, "__init__", lambda self, generators=(), device="cpu": begin(self, generators, device, 24)
    )

    def counted(target: TargetModel) -> list[tuple]:
        prompts = random_prompts((5, 14, 9, 7, 11, 3, 8, 4))
        found = generate(target, method_of(name, target), prompts, 16, SAMPLINGS["sampled"], **options)
        return [(one.tokens, one.drafted, one.accepted) for one in found]

    expected = counted(artifacts().target)
    with pretend_device() as device:
        target = device.target(artifacts().target.model, artifacts().target.tokenizer)
        target.graphs = target.caches.graphs = Graphs(lambda function: function) if with_graphs else None
        assert counted(target) == expected


@pytest.mark.parametrize(
    ("name", "how"),
    in_turn(["autoregressive", "speculative", "magicdec", "spire", "eagle3", "dflash", "pld", "sssd"], [*SAMPLINGS]),
)
def test_what_would_be_recorded_as_a_graph_copies_nothing(name, how):
    with pretend_device() as device:
        played = []

        def record(function):
            def replay():
                before = len(device.reads) + len(device.writes)
                outputs = function()
                played.append(len(device.reads) + len(device.writes) - before)
                return outputs

            return replay

        target = device.target(artifacts().target.model, artifacts().target.tokenizer)
        target.graphs = target.caches.graphs = Graphs(record)
        assert decoded(name, target, SAMPLINGS[how]) == decoded_on_the_cpu(name if how == "sampled" else BASELINE, how)
        kinds = {key[0][0] for key in target.graphs._recorded}
    assert played or (name, how) == ("sssd", "greedy")  # whose few steps all have other shapes
    assert "score" in kinds
    assert name == "sssd" or "verify" in kinds
    assert name not in ("spire", "eagle3") or {"chain", "memories"} <= kinds
    assert not any(played)


@pytest.mark.parametrize(("name", "how"), in_turn(MODELS, [*SAMPLINGS]))
def test_a_chain_is_one_graph_and_a_rule_asks_the_host_once_per_piece(name, how, copies_per_step, monkeypatch):
    replayed, run = [], Graphs.run
    with pretend_device() as device:
        target = device.target(artifacts().target.model, artifacts().target.tokenizer)
        target.graphs = target.caches.graphs = Graphs(lambda function: function)
        method = method_of(name, target)
        if model := getattr(method, "draft_model", None):
            model.graphs = model.caches.graphs = Graphs(lambda function: function)
        steps = copies_per_step(device)

        def noted(graphs: Graphs, key: tuple, *given):
            replayed.append((len(steps), key[0]))
            return run(graphs, key, *given)

        monkeypatch.setattr(Graphs, "run", noted)
        generate(target, method, random_prompts(LENGTHS), N_NEW, SAMPLINGS[how], batch_size=3, cache_block_tokens=8)
    pieces = -(-method.gamma // PIECE) if method.stop is not None else 1
    chains = Counter(step for step, kind in replayed if kind == "chain")
    assert chains
    assert max(chains.values()) <= pieces
    assert {kind for _, kind in replayed} <= {"chain", "score", "verify", "memories"}
    assert max(len(step.reads) for step in steps) <= pieces  # the step's own and one between any two pieces


@pytest.mark.parametrize(("name", "how"), RECORDED)
def test_nothing_is_recorded_after_the_rehearsal_while_a_batch_drains(name, how, monkeypatch):
    """Rows end at different times, so that the batch has any number of rows."""
    began = []
    start = Batch.join

    def noted(batch: Batch, *given):
        if not isinstance(batch.drafter, graph_capture._Rehearsal):
            began.append({key for graphs in all_graphs for key in graphs._recorded})
        return start(batch, *given)

    monkeypatch.setattr(Batch, "join", noted)
    with pretend_device() as device:
        target = device.target(artifacts().target.model, artifacts().target.tokenizer)
        target.graphs = target.caches.graphs = Graphs(lambda function: function)
        drafter, all_graphs = method_of(name, target), [target.graphs]
        draft_model = getattr(getattr(drafter, "model", drafter), "draft_model", None)
        if draft_model is not None and draft_model.graphs is None:
            draft_model.graphs = draft_model.caches.graphs = Graphs(lambda function: function)
            all_graphs.append(draft_model.graphs)
        prompts, ends = random_prompts([4 + i % 5 for i in range(4)]), range(1, VOCAB_SIZE, 12)
        options = {"batch_size": 4, "cache_block_tokens": 8, "stop_token_ids": ends}
        generate(target, drafter, prompts, N_NEW, SAMPLINGS[how], **options)
        later = [key for graphs in all_graphs for key in graphs._recorded if key not in began[0]]
        assert not later, f"{len(later)} of {len(began[0])} are recorded in the answer: {later}"
        if name != "auto":  # which has the graphs of several methods
            # Rows are padded to 1, 2 and 4 here, and to seven sizes in a batch of 64.
            sizes = Counter(key[2:] for key in target.graphs._recorded if key[0][0] == "score")
            assert max(sizes.values()) <= 3
            assert 7 * sum(len(graphs._recorded) for graphs in all_graphs) < 3 * 120
        once = [key for graphs in all_graphs for key, (_, replay) in graphs._recorded.items() if replay is None]
        assert not once, f"called once in the rehearsal: {once}"
