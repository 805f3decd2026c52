"""The README.md of an exported lookup method: what it looks up in, and the lines that make engines use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from spectrain.reporting.model_card import front_matter, python_lines

PROPOSER = "spectrain.serving.vllm_proposer.LookupProposer"
VLLM_TOKENS = 8  # drafted in a step: a lookup costs microseconds, and the target scores few tokens for the price of one
SGLANG_NODES, SGLANG_CORPUS_NODES = 16, 8  # of a draft tree, and those of them that the corpus may fill
CORPUS_MARGIN = 1.2  # SGLang refuses a corpus that has more tokens than it was told


@dataclass(frozen=True)
class Lookup:
    """What the card is made from."""

    folder: str  # as the command lines call the export
    target: str  # likewise
    method: str
    options: Mapping
    tokenizer_fingerprint: str
    documents: int  # of the datastore; 0: it has none
    tokens: int
    built_from: Mapping  # the datastore's config
    same_tokens: float | None  # share of sampled documents whose text has the tokens they came from


def lookup_card(facts: Lookup) -> str:
    """The README.md of an exported lookup method."""
    parts = [
        front_matter(facts.target, "spectrain", "lookup"),
        f"# {PurePath(facts.folder).name}\n\nThe lookup method `{facts.method}`: it has no weights, and drafts "
        f"what followed the last tokens before, in {_sources(facts)}. Made by spectrain.",
        f"## Target\n\nAny model with the tokenizer of `{facts.target}` (fingerprint `{facts.tokenizer_fingerprint}`).",
        _data(facts),
        "## Options\n\n"
        + "\n".join(f"- `{name}`: {value}" for name, value in facts.options.items() if value is not None),
        "## Use\n\n" + "\n\n".join(filter(None, [_loop(facts), _vllm(facts), _sglang(facts)])),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _sources(facts: Lookup) -> str:
    own = facts.method in ("pld", "anpd") or facts.options.get("input_source", facts.method == "sssd")
    named = ["the text itself"] * bool(own) + [f"a datastore of {facts.tokens:,} tokens"] * bool(facts.documents)
    return " and ".join(named)


def _data(facts: Lookup) -> str:
    if not facts.documents:
        return ""
    corpus = (facts.built_from.get("corpus") or {}).get("path")
    name = f"`{PurePath(str(corpus)).name}`" if corpus else "the Python standard library"
    text = f"## Data\n\n{facts.documents:,} documents of {name}, {facts.tokens:,} tokens, below `datastore/`"
    text += f" (kept: {facts.built_from.get('keep')}). "
    text += "The same documents as text stand in `corpus.jsonl`, a JSON string a line"
    if facts.same_tokens is not None:
        text += f"; {facts.same_tokens:.1%} of those that were tried have the same tokens again"
    return text + "."


def _loop(facts: Lookup) -> str:
    store = f" datastore={facts.folder}/datastore" if facts.documents else ""
    return (
        "In spectrain's loop, where drafts are trees:\n\n```bash\n"
        f'python -m spectrain.generate method={facts.method}{store} target={facts.target} prompt="..."\n```\n\n'
        f"{python_lines(facts.folder, facts.target)}"
    )


def _vllm(facts: Lookup) -> str:
    config = f'{{"method":"custom_class","model":"{PROPOSER}","num_speculative_tokens":{VLLM_TOKENS}}}'
    return f"""In vLLM, where drafts are chains (spectrain must be installed beside it):

```bash
SPECTRAIN_LOOKUP={facts.folder} vllm serve {facts.target} --speculative-config '{config}'
```

or, without the environment variable, `--additional-config '{{"spectrain_lookup":"{facts.folder}"}}'`. Custom
proposers are experimental there: they need the V1 model runner (`VLLM_USE_V2_MODEL_RUNNER=0`), and
asynchronous scheduling is off."""


def _sglang(facts: Lookup) -> str:
    if not facts.documents:
        return ""
    limit = math.ceil(facts.tokens * CORPUS_MARGIN / 1000) * 1000
    return f"""In SGLang, whose own n-gram matching reads the same documents:

```bash
python -m sglang.launch_server --model-path {facts.target} --speculative-algorithm NGRAM \\
  --speculative-num-draft-tokens {SGLANG_NODES} --speculative-ngram-external-corpus-path {facts.folder}/corpus.jsonl \\
  --speculative-ngram-external-sam-budget {SGLANG_CORPUS_NODES} \\
  --speculative-ngram-external-corpus-max-tokens {limit}
```"""
