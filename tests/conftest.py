"""Tiny random Hugging Face models of several families: float32, seeded, on the CPU.

Weights are large, so that the argmax depends on the context and logits are far apart: a wrong mask, position or cache
slot then changes the text, and rounding does not.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_only
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from spectrain import cli, config, train
from spectrain.config.training import Train
from spectrain.data import row_cache
from spectrain.data.texts import train_tokenizer
from spectrain.decoding import Sampling, generate
from spectrain.drafting import precompile
from spectrain.drafting import step_costs as seconds_table
from spectrain.errors import UserError
from spectrain.kernels import works
from spectrain.kernels.cpu import products, tiles
from spectrain.kernels.cpu.processor import SWITCH, cpu_features
from spectrain.methods.speculative import Speculative
from spectrain.planning.plan import Machine, Plan
from spectrain.retrieval.datastore import Manifest, write_manifest, write_shard
from spectrain.stores import locations
from spectrain.stores.signals import SIGNALS
from spectrain.target import TargetModel, tokenizer_fingerprint
from spectrain.target.weights import is_emulated, most_rows
from tests.support import forks

pytest_plugins = ["tests.support.seconds"]
CACHE = tempfile.TemporaryDirectory()
os.environ["HF_HOME"] = CACHE.name  # of commands in processes of their own, too
row_cache.ROWS = Path(CACHE.name, "rows")
VOCAB_SIZE = 61
EOS_ID = 3

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama_gqa": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"num_key_value_heads": 1, "head_dim": 8}),
}
WINDOW_TOKENS = 4


def _of_type(model_type: str, **options) -> tuple:
    options = {"num_key_value_heads": 2, "head_dim": 8, **options}
    return AutoModelForCausalLM.from_config, partial(AutoConfig.for_model, model_type), options


_WINDOW = {"max_position_embeddings": 1024, "sliding_window": WINDOW_TOKENS}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_UNTIED = {**_MIXED, "tie_word_embeddings": False}  # or Gemma repeats its last token
_EAGER = {**_UNTIED, "attn_implementation": "eager"}  # soft-capped scores, and sinks
WINDOWED = {
    "mistral": _of_type("mistral", **_WINDOW),
    "gemma2": _of_type("gemma2", **_EAGER),
    "gemma3": _of_type("gemma3_text", **_UNTIED),
    "gpt_oss": _of_type("gpt_oss", num_local_experts=4, num_experts_per_tok=2, **_EAGER),
}
SCALED = {"granite": _of_type("granite", logits_scaling=8.0), "cohere": _of_type("cohere", logit_scale=0.25)}


def tiny_model(family: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """A random model of a family; `overrides` go to its config."""
    model_class, config_class, options = (FAMILIES | WINDOWED | SCALED)[family]
    torch.manual_seed(seed)
    return model_class(config_class(**{**COMMON, **options, **overrides})).eval().requires_grad_(False)


def in_turn(names: Iterable, others: Sequence) -> list:
    """Parameters: each name with each of the others, of which all but one are slow. That one they take in turn."""
    return [
        pytest.param(name, other, marks=() if other == others[i % len(others)] else pytest.mark.slow)
        for i, name in enumerate(names)
        for other in others
    ]


def noisy_copy(model: PreTrainedModel, scale: float = 0.05, seed: int = 0) -> PreTrainedModel:
    """The model with relative noise on every weight: it agrees with the original often, but not always."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in noisy.parameters():
        weight.mul_(1 + scale * torch.randn(weight.shape, generator=generator))
    return noisy


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Prompts of the given lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def compile_operations() -> None:
    """Compile what every forward, draw and verification runs."""
    drafter = Speculative(TargetModel(tiny_model()))
    generate(TargetModel(tiny_model()), drafter, [[4, 5, 6]], 6, Sampling(temperature=1.0, top_k=5))


def compile_lookups() -> None:
    """Compile what searches a datastore of one shard."""
    precompile.lookups()


def compile_trees() -> None:
    """Compile what drafts trees of several sources."""
    from tests.methods.every import Artifacts, build

    with tempfile.TemporaryDirectory() as folder:
        artifacts = Artifacts(Path(folder), tiny_model(), tiny_model, lambda: [range(4, 20)], k=3)
        generate(artifacts.target, build("spire_sssd", artifacts), [[4, 5, 6]], 6)


@pytest.fixture(autouse=True, scope="session")
def _compiled(tmp_path_factory):
    """Compile into this user's folder what several test processes (-n 2) need: each part in one."""
    parts, worker = [compile_operations, compile_trees, compile_lookups], os.environ.get("PYTEST_XDIST_WORKER")
    for part in {None: [], "gw0": parts}.get(worker, parts[::-1]):
        with FileLock(tmp_path_factory.getbasetemp().parent / f"{part.__name__}.lock"):
            part()


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several processes (-n 2) one thread, and all of them one Python that starts at once.

    A shell makes background processes ignore Ctrl-C, which tests send to their own processes.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    elif not torch.cuda.is_available():  # which a fork could not use
        os.environ[forks.PYTHON] = forks.write_python(Path(CACHE.name))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Keep the tests of a file in one process, so that what they share is made once, but for those of `tests/slow`."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith("tests/slow/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=list(FAMILIES))
def family_target(request) -> TargetModel:
    """A target of each family in turn."""
    return TargetModel(tiny_model(request.param))


@pytest.fixture(params=[*FAMILIES, *WINDOWED])
def any_target(request) -> TargetModel:
    """The same, and of families whose layers have windows."""
    return TargetModel(tiny_model(request.param))


@pytest.fixture
def llama_target() -> TargetModel:
    return TargetModel(tiny_model("llama"))


def table_of(folder: Path, forward: dict[int, float], draft: dict[int, float]) -> Path:
    """Write a table of seconds by nodes and by reads, which are those of any method, sampling and number of rows."""
    seconds = {"forward of chains": forward, "forward of trees": forward, "*": draft}
    file = folder / "seconds.json"
    file.write_text(json.dumps({"kind": "seconds", "schema": seconds_table.SCHEMA, "machine": {}, "seconds": seconds}))
    return file


@pytest.fixture(autouse=True, scope="session")
def _seconds_of_a_made_up_machine(tmp_path_factory):
    """Nothing is timed: a further node costs a tenth of the first, and a token of a draft model as much."""
    file = table_of(tmp_path_factory.mktemp("seconds"), {1: 1.0, 64: 7.3}, {0: 0.01, 10: 1.0})
    os.environ[seconds_table.FILE] = str(file)
    yield
    del os.environ[seconds_table.FILE]


@pytest.fixture(autouse=True)
def _nothing_shipped(monkeypatch, request):
    """Hide what was trained and comes with spectrain, unless a test has the mark `shipped`: most make their own."""
    if "shipped" not in request.keywords:
        monkeypatch.setattr(locations, "SHIPPED", ())
        monkeypatch.setattr(locations, "SHIPPED_STORES", ())


@pytest.fixture(autouse=True, scope="session")
def _quick_commands():
    """Begin trainings at once: they predict what they will take, and go on without where that fails."""
    plan_for = train.plan_for

    def plan_if_asked(config: Train) -> tuple[Plan, Machine]:
        if not config.plan:
            raise UserError("only plan=true is for tests")
        return plan_for(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "plan_for", plan_if_asked)
        yield


@pytest.fixture(autouse=True)
def _small_commands(monkeypatch):
    """Fit a drafter's input on little, and decode with the bundled target by default. Fixtures of a module do not."""
    monkeypatch.setattr("spectrain.models.packages.DEFAULT", locations.BUNDLED)
    monkeypatch.setattr("spectrain.training.drafters.FIT_TOKENS", FIT_TOKENS)


# The processors that the code tells apart, and what SPECTRAIN_CPU says to take their ways on any machine.
PROCESSORS = {
    "no FMA": "-fma",
    "SSE": "-avx512f,-avx2,-avx512bf16,-amx-bf16",
    "AVX2": "-avx512f,-avx512bf16,-amx-bf16",
    "AVX-512": "+avx512f,-avx512bf16,-amx-bf16,-narrow-mkl",
    "AMX": "+avx512f,+avx512bf16,+amx-bf16,-narrow-mkl",
    "Zen 5": "+avx512f,+avx512bf16,-amx-bf16,+narrow-mkl",
}


@pytest.fixture
def use_processor(monkeypatch):
    """Takes the ways of one of `PROCESSORS` until the test ends."""
    known = cpu_features, products._rows_together, products._compiled, tiles.available, works
    known += tiles.kernels, is_emulated, most_rows

    def use(name: str) -> None:
        monkeypatch.setenv(SWITCH, PROCESSORS[name])
        for function in known:
            function.cache_clear()

    yield use
    monkeypatch.undo()
    for function in known:
        function.cache_clear()


@pytest.fixture(params=PROCESSORS)
def processor(request, use_processor) -> str:
    """Each of `PROCESSORS` in turn."""
    use_processor(request.param)
    return request.param


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_rank_or_signal_is_left():
    """Forget which rank a training in this process has said that it is, and which signal ended a command."""
    yield
    SIGNALS.anew()
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    rank_zero_only.rank = 0


FIT_TOKENS = 1000  # from which the input of a drafter is fitted, so that a training begins at once
# Options that make a training, and what it measures of itself, take a second.
SMALL_TRAINING = (
    *("data.row_tokens=64", "data.batch_size=2", "data.val_rows=2", "trainer.precision=32-true", "max_steps=2"),
    *("tau.context_tokens=[16]", "tau.contexts=2", "tau.new_tokens=4", "tau.timed_contexts=1"),
)
TEXT = (
    'def read_{0}(path):\n    """Reads {0}."""\n    with open(path) as file:\n        return file.read() + "{0}"\n\n\n'
)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A tiny target `target/` and a corpus `corpus/` of 60 modules."""
    root = tmp_path_factory.mktemp("shared")
    write_target_and_corpus(root, 60)
    return root


def write_target_and_corpus(root: Path, n_modules: int) -> list[str]:
    """Write a tiny target `target/` and a corpus `corpus/`, and return the texts of its modules."""
    (root / "corpus").mkdir(parents=True)
    texts = [TEXT.format(f"config_{i % 7}") * 6 for i in range(n_modules)]
    for i, text in enumerate(texts):
        (root / "corpus" / f"m{i}.py").write_text(text)
    tokenizer = train_tokenizer(texts, 300)
    model = tiny_model("llama", vocab_size=300, eos_token_id=0, num_hidden_layers=4, initializer_range=0.05)
    model.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    return texts


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def chatty(shared, tmp_path_factory) -> Path:
    """The tiny target with a chat template."""
    folder = tmp_path_factory.mktemp("chatty") / "target"
    shutil.copytree(shared / "target", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def stored(shared, tmp_path_factory) -> Path:
    """A datastore of the corpus, and of every token once, as the tiny target writes nonsense."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "target")
    texts = [file.read_text() for file in sorted((shared / "corpus").iterdir())[:20]]
    documents = [np.array(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    documents.append(np.arange(300))
    folder = tmp_path_factory.mktemp("stored")
    shard = write_shard(folder, 0, documents, 300)
    facts = ("the tiny target", "0" * 16, tokenizer_fingerprint(tokenizer), 300)
    write_manifest(folder, Manifest(*facts, len(documents), sum(map(len, documents)), [shard]))
    return folder


@pytest.fixture
def typed(monkeypatch, capfd):
    """Runs a command as if typed; returns exit code, stdout, stderr."""

    def call(name: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        code = 0
        try:
            cli.run(f"spectrain.{name}")
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        for line in re.findall("^next: spectrain (.*)", out, re.MULTILINE):  # each can be typed as it stands
            following, *options = shlex.split(line)
            config.options_of(following, cli.composed(following, *options))
        return code, out, err

    return call


@pytest.fixture
def run(shared, tmp_path, monkeypatch, typed):
    """Runs a command for the tiny target in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: str, target: str | None = None) -> tuple[int, str, str]:
        return typed(name, f"target={target or shared / 'target'}", *arguments)

    return call
