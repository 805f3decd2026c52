"""Every method with its paper's budget writes the tokens that it wrote at commit f89c134, before the code was halved.

f89c134.json has for each method and sampling the digest of each text, and how many tokens were drafted and accepted, on
24 prompts of the bundled target. GOLDEN_PROMPTS=24 compares all of them; 3 take a minute on one core. Samples at T=1
without top-k are left out: f89c134 itself repeats them only up to rounding.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
from pathlib import Path

import numpy as np
import pytest

from spectrain import load_method, load_target
from spectrain.decoding import Sampling, generate
from spectrain.retrieval.datastore import Manifest, write_manifest, write_shard
from spectrain.target import TargetModel, tokenizer_fingerprint

pytestmark = [pytest.mark.slow, pytest.mark.shipped]
N_PROMPTS = int(os.environ.get("GOLDEN_PROMPTS", "3"))
GOLDEN = json.loads(Path(__file__).with_name("f89c134.json").read_text())
SOURCES = Path(inspect.getsourcefile(inspect)).parent
PROMPTS = [
    *("ast", "bdb", "cmd", "copy", "csv", "dis", "gzip", "heapq", "imaplib", "json/decoder", "keyword", "locale"),
    *(
        "mailbox",
        "netrc",
        "optparse",
        "pdb",
        "queue",
        "random",
        "sched",
        "tabnanny",
        "uuid",
        "wave",
        "xdrlib",
        "zipapp",
    ),
]
STORED = ("bz2", "calendar", "cgi", "code", "fileinput", "argparse", "ftplib", "getopt", "lzma", "plistlib")
STORE, VANILLA = {"datastore": "store"}, {"drafter": "vanilla"}  # folders that are made here
OPTIONS = {  # besides max_nodes=paper
    **dict.fromkeys(("rest", "spectra", "spectra_retrieval", "sssd", "spire_sssd"), STORE),
    **dict.fromkeys(("confidence_stop", "entropy_stop"), VANILLA),
    "speculative": {**VANILLA, "gamma": 4},
    "magicdec": {"gamma": 4},
    "spire": {"gamma": 4},
}
SAMPLINGS = {
    "greedy": (Sampling(), 1),
    "t08": (Sampling(temperature=0.8, top_k=50, draws="inverse"), 4),
    "shared": (Sampling(temperature=1.0, draws="shared"), 1),
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return load_target("pystdlib-8l")


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory) -> Path:
    """A drafter `vanilla/`, the target's first two blocks, and a datastore `store/` of ten modules."""
    root = tmp_path_factory.mktemp("golden")
    small = copy.deepcopy(target.model).float()
    small.model.layers, small.config.num_hidden_layers, small.config.layer_types = small.model.layers[:2], 2, None
    small.save_pretrained(root / "vanilla")
    target.tokenizer.save_pretrained(root / "vanilla")
    (root / "store").mkdir()
    documents = [np.array(tokens(target, name)[:4000]) for name in STORED]
    shard = write_shard(root / "store", 0, documents, target.vocab_size)
    facts = ("pystdlib-8l", "0" * 16, tokenizer_fingerprint(target.tokenizer), target.vocab_size)
    write_manifest(root / "store", Manifest(*facts, len(documents), sum(map(len, documents)), [shard]))
    return root


def tokens(target: TargetModel, module: str) -> list[int]:
    return target.tokenizer((SOURCES / f"{module}.py").read_text())["input_ids"]


@pytest.mark.skipif(not (SOURCES / "xdrlib.py").exists(), reason="the prompts are sources of Python 3.11")
@pytest.mark.parametrize("name", sorted({key.split("/")[0] for key in GOLDEN}))
def test_tokens_are_those_of_f89c134(name, target, folders):
    made = {"store": str(folders / "store"), "vanilla": str(folders / "vanilla")}
    options = {option: made.get(value, value) for option, value in OPTIONS.get(name, {}).items()}
    prompts = [tokens(target, module)[100:180] for module in PROMPTS[:N_PROMPTS]]
    budget = {} if name == "autoregressive" else {"max_nodes": "paper"}
    for drawn, (sampling, batch_size) in SAMPLINGS.items():
        method = load_method(name, target, **options, **budget)
        found = generate(target, method, prompts, 32, sampling, batch_size=batch_size)
        theirs = GOLDEN[f"{name}/{drawn}"][:N_PROMPTS]
        ours = [hashlib.sha256(str(generation.tokens).encode()).hexdigest()[:8] for generation in found]
        assert ours == [text for text, *_ in theirs], drawn
        if sampling.greedy:  # shared noise no longer says which candidates of a lookup are scored
            counts = [[sum(generation.drafted), sum(generation.accepted)] for generation in found]
            assert counts == [counts for _, *counts in theirs], drawn
