"""The SGLang plugin in SGLang's own registry and NGRAM worker; target, scheduler and kernels are stood in for."""

from __future__ import annotations

import json
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from spectrain import load_method
from spectrain.errors import UserError
from spectrain.models.vanilla import new_vanilla
from spectrain.target import TargetModel
from spectrain.target.tree import PADDING_PARENT
from tests.conftest import random_prompts, tiny_model
from tests.exports.engine_source import engine_files, importable
from tests.exports.test_vllm_proposer import tree_of_our_loop
from tests.methods.lookup_export import OPTIONS, export_lookup
from tests.models.test_artifacts import tiny_tokenizer

N = 8  # nodes
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"), tiny_tokenizer())


@pytest.fixture
def algorithm():
    """The registered algorithm, by the entry point of pyproject.toml."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    with importable("sglang"):
        EntryPoint("spectrain", points["sglang.srt.plugins"]["spectrain"], "sglang.srt.plugins").load()()
        yield import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.from_string("spectrain")


def arguments(**given) -> SimpleNamespace:
    names = ("max_running_requests", "speculative_num_draft_tokens", "attention_backend", "page_size")
    return SimpleNamespace(**dict.fromkeys(names) | {"device": "cuda", "attn_dp_size": 1} | given)


@pytest.fixture
def worker(algorithm, target):
    """What makes the algorithm's worker, once the exported folder is named."""

    def make():
        args = arguments(speculative_num_draft_tokens=N)
        algorithm.handle_server_args(args)
        import_module("sglang.srt.arg_groups.overrides").resolving_view = lambda args: args
        import_module("sglang.srt.managers.scheduler").GenerationBatchResult = SimpleNamespace
        context = import_module("sglang.srt.runtime_context")
        depths = {"speculative_ngram_max_trie_depth": 18, "speculative_ngram_external_corpus_path": None}
        context.get_spec = lambda: MagicMock(**vars(args), **depths)
        context.get_schedule = lambda: SimpleNamespace(disable_overlap_schedule=False, page_size=1)
        context.get_device = lambda: SimpleNamespace(device="cpu")
        scorer = MagicMock(tokenizer=target.tokenizer, get_memory_pool=lambda: (None, None))
        scorer.model_runner = MagicMock(max_running_requests=5, watermark_state=None)
        scorer.model_runner.model_config.vocab_size = target.vocab_size
        made = algorithm.create_worker(args)(args, 0, 0, scorer)
        made.alloc_memory_pool()
        return made

    return make


def served(worker, texts: list[list[int]], n_prompt: int = 5) -> list[tuple[list[int], list[list[int]]]]:
    """Let a target accept 1 to 3 tokens of known texts per step. Return text and paths to N nodes of each draft.

    As SGLang's scheduler does, the results of a step are read after the next one began.
    """
    seen = []

    def accept(verify_input, batch, *_, **__) -> tuple[torch.Tensor, ...]:
        new = []
        drafts = batch.input_ids.view(-1, N), verify_input.custom_mask.view(-1, N, N)
        for one, nodes, masks in zip(batch.reqs, *drafts, strict=True):
            n_read = n_prompt + len(one.output_ids) + len(one.late)
            seen.append((one.text[:n_read], [nodes[sees].tolist() for sees in masks]))
            new.append(one.text[n_read : n_read + 1 + n_read % 3])
        predicted = torch.tensor([(tokens + [0] * N)[:N] for tokens in new])
        return predicted.ravel(), torch.tensor(list(map(len, new))), torch.arange(len(new) * N).view(-1, N)

    import_module("sglang.srt.speculative.ngram_worker").eagle_sample = accept
    rows = [
        SimpleNamespace(
            rid=i, text=text, origin_input_ids_unpadded=text[:n_prompt], output_ids=[], late=[text[n_prompt]]
        )
        for i, text in enumerate(texts)
    ]
    while rows:
        late = torch.tensor([(one.late + [0] * N)[:N] for one in rows])
        batch = MagicMock(reqs=rows, has_grammar=False, return_logprob=False)
        batch.spec_info.accept_tokens, batch.spec_info.accept_lens = late.ravel(), (late > 0).sum(1)
        batch.grammar_needs_sync.return_value, batch.seq_lens = False, torch.zeros(len(rows), dtype=int)
        result = worker.forward_batch_generation(batch)
        for one, tokens, n in zip(rows, result.next_token_ids.view(-1, N), result.accept_lens, strict=True):
            one.output_ids, one.late = one.output_ids + one.late, tokens[:n].tolist()
        rows = [one for one in rows if n_prompt + len(one.output_ids + one.late) < len(one.text)]
    return seen


@pytest.mark.parametrize("method", OPTIONS)
def test_sglang_s_worker_is_given_the_trees_of_our_loop(method, target, worker, tmp_path, monkeypatch):
    texts = [text * n for n, text in zip((4, 2, 3, 5), random_prompts([8, 14, 11, 9]), strict=True)]
    folder = export_lookup(tmp_path / method, target, method, texts[::2] + random_prompts([20] * 10, seed=5))
    monkeypatch.setenv("SPECTRAIN_LOOKUP", str(folder))
    made, n_drafted = worker(), 0
    drafter = load_method(folder, target, max_nodes=N)
    for text, found in served(made, texts):
        tree, paths = tree_of_our_loop(drafter, target, text, N - 1), []
        for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
            if parent != PADDING_PARENT:
                paths.append([*(paths[parent] if parent >= 0 else []), token])
        assert found == paths + [[text[-1], 0]] * (N - len(paths))
        n_drafted += len(paths) - 1
    assert n_drafted > 100
    assert made.ngram_corpus.states.keys() == made.ngram_corpus.n_read.keys() == {3}  # the others have left


def test_what_sglang_cannot_serve_is_said_at_the_start(target, algorithm, monkeypatch, tmp_path):
    monkeypatch.delenv("SPECTRAIN_LOOKUP", raising=False)
    with pytest.raises(UserError, match="as the variable SPECTRAIN_LOOKUP"):
        algorithm.handle_server_args(arguments())
    monkeypatch.setenv("SPECTRAIN_LOOKUP", str(export_lookup(tmp_path / "pld", target, "pld")))
    with pytest.raises(ValueError, match="need --page-size 1"):
        algorithm.handle_server_args(arguments(page_size=64))
    with pytest.raises(ValueError, match="leave --enable-dp-attention out"):
        algorithm.handle_server_args(arguments(attn_dp_size=2))


@pytest.mark.slow
def test_sglang_knows_what_a_vanilla_drafter_is(target, tmp_path):
    new_vanilla(target.model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (name,) = config["architectures"]
    assert f"class {name}(nn.Module)" in (engine_files("sglang") / "sglang/srt/models/llama.py").read_text()
    for asked in ("vocab_size", "max_position_embeddings"):  # it refuses another, or a shorter one
        assert config[asked] == getattr(target.model.config, asked)
