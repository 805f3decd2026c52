"""The SGLang plugin in SGLang's own registry and NGRAM worker, whose target and kernels are stood in for."""

from __future__ import annotations

import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from spectrain import load_method
from spectrain.decoding import TargetModel
from spectrain.decoding.tree import PADDING_PARENT
from spectrain.errors import UserError
from tests.conftest import random_prompts, tiny_model
from tests.methods.lookup_export import OPTIONS, export_lookup
from tests.models.test_artifacts import tiny_tokenizer
from tests.serving.engine_source import importable
from tests.serving.test_vllm_proposer import tree_of_our_loop

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


def best(target: TargetModel, text: list[int]) -> int:
    with torch.inference_mode():
        return int(target.model(torch.tensor([text])).logits[0, -1].argmax())


class Server:
    """SGLang's scheduler around the worker: greedy requests, whose results are read a step late, as it does."""

    def __init__(self, algorithm, target: TargetModel):
        self.target = target
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
        scorer.model_runner = MagicMock(max_running_requests=4, watermark_state=None)
        scorer.model_runner.model_config.vocab_size = target.vocab_size
        self.worker = algorithm.create_worker(args)(args, 0, 0, scorer)
        self.worker.alloc_memory_pool()
        import_module("sglang.srt.speculative.ngram_worker").eagle_sample = self.accept
        self.seen: list[tuple[list[int], list[list[int]]]] = []  # text, and the path to each of N nodes

    def accept(self, verify_input, batch, *_, **__) -> tuple[torch.Tensor, ...]:
        """Follow the target's greedy tokens down each tree."""
        tokens, masks = batch.input_ids.view(-1, N).numpy(), verify_input.custom_mask.view(-1, N, N).numpy()
        (predicted, kept), lengths = np.zeros((2, len(tokens), N), int), []
        for row, one in enumerate(batch.reqs):
            paths = [tokens[row][sees].tolist() for sees in masks[row]]
            self.seen.append((list(one.text), paths))
            path = one.text[-1:]
            while path in paths:
                kept[row, len(path) - 1] = row * N + paths.index(path)
                path = [*path, best(self.target, one.text[:-1] + path)]
                predicted[row, paths.index(path[:-1])] = path[-1]
            lengths.append(len(path) - 1)
        return torch.tensor(predicted).ravel(), torch.tensor(lengths), torch.tensor(kept)

    def serve(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Two rows at a time; the next prompt joins as one leaves."""
        waiting = [
            SimpleNamespace(rid=i, origin_input_ids_unpadded=prompt, output_ids=[], late=[best(self.target, prompt)])
            for i, prompt in enumerate(prompts)
        ]
        rows, done = [], {}
        while len(done) < len(prompts):
            while waiting and len(rows) < 2:
                rows.append(waiting.pop(0))
            for one in rows:
                one.text = [*one.origin_input_ids_unpadded, *one.output_ids, *one.late]
            late = SimpleNamespace(
                accept_tokens=torch.tensor([(one.late + [0] * N)[:N] for one in rows]).ravel(),
                accept_lens=torch.tensor([len(one.late) for one in rows]),
            )
            batch = MagicMock(reqs=rows, spec_info=late, has_grammar=False, return_logprob=False)
            batch.grammar_needs_sync.return_value = False
            batch.seq_lens = torch.tensor([len(one.text) for one in rows])
            result = self.worker.forward_batch_generation(batch)
            for one, tokens, n in zip(rows, result.next_token_ids.view(-1, N), result.accept_lens, strict=True):
                one.output_ids, one.late = one.output_ids + one.late, tokens[:n].tolist()
                if len(one.output_ids) >= lengths[one.rid]:
                    done[one.rid] = one.output_ids[: lengths[one.rid]]
            rows = [one for one in rows if one.rid not in done]
        return [done[i] for i in range(len(prompts))]


@pytest.mark.parametrize("method", OPTIONS)
def test_sglang_s_worker_verifies_the_trees_of_our_loop(method, target, algorithm, tmp_path, monkeypatch):
    prompts, lengths, own = random_prompts([3, 20, 9, 17, 8]), [24, 5, 12, 24, 7], []
    for prompt, n in zip(prompts, lengths, strict=True):
        own.append([])
        while len(own[-1]) < n:
            own[-1].append(best(target, [*prompt, *own[-1]]))
    documents = [prompt + text for prompt, text in zip(prompts, own, strict=True)][::2] + random_prompts([20] * 10, 5)
    folder = export_lookup(tmp_path / method, target, method, documents)
    monkeypatch.setenv("SPECTRAIN_LOOKUP", str(folder))
    server = Server(algorithm, target)
    assert server.serve(prompts, lengths) == own
    assert len(server.seen) < (0.85 if (folder / "datastore").is_dir() else 1.1) * sum(lengths)
    drafter, n_drafted = load_method(folder, target, max_nodes=N), 0
    for text, found in server.seen:
        tree, paths = tree_of_our_loop(drafter, target, text, N - 1), []
        for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
            if parent != PADDING_PARENT:
                paths.append([*(paths[parent] if parent >= 0 else []), token])
        assert found == paths + [[text[-1], 0]] * (N - len(paths))
        n_drafted += len(paths) - 1
    assert n_drafted > 20
    assert server.worker.ngram_corpus.states.keys() <= {3, 4}  # the others have left


def test_what_sglang_cannot_serve_is_said_at_the_start(target, algorithm, monkeypatch, tmp_path):
    monkeypatch.delenv("SPECTRAIN_LOOKUP", raising=False)
    with pytest.raises(UserError, match="as the environment variable SPECTRAIN_LOOKUP"):
        algorithm.handle_server_args(arguments())
    monkeypatch.setenv("SPECTRAIN_LOOKUP", str(export_lookup(tmp_path / "pld", target, "pld")))
    with pytest.raises(ValueError, match="need --page-size 1"):
        algorithm.handle_server_args(arguments(page_size=64))
    with pytest.raises(ValueError, match="leave --enable-dp-attention out"):
        algorithm.handle_server_args(arguments(attn_dp_size=2))
