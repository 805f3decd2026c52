"""The README.md of an exported folder: what it is, what it was trained on, what was measured, the lines that use it.

Cards are pure text made from plain values; who exports gathers them. The front matter is that of the Hugging Face hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from huggingface_hub import ModelCardData

# The one name of a hub model, with or without its owner.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DRAFT_TOKENS = 5  # in the command lines; vLLM's own example has 5
WHAT = {
    "spire": "A SPIRe drafter: it reads the target's own activations of the text and a sparse window of its cache, and "
    "drafts a chain of tokens for the target to verify.",
    "vanilla": "A small ordinary language model that drafts tokens for a larger one of the same vocabulary to verify.",
    "head": "An acceptance head (SpecDec++): it reads the state of a draft model after each drafted token, and ends "
    "the draft once it expects a rejection. The draft model lies in `drafter/`.",
    "target": "A small Llama from scratch, to draft for.",
}
METHOD = {"spire": "spire", "vanilla": "speculative", "head": "specdecpp"}
# Options of a training's config that say what was trained and how; the others say where and how fast.
TRAINING = ("n_layer", "hidden_size", "k", "window_tokens", "sink_tokens", "init", "feedback", "target_activations")
TRAINING += (
    "loss",
    "omega",
    "n_blocks",
    "w_rej",
    "w_acc",
    "mixing_share",
    "rollout_tokens",
    "seed",
    "optimizer",
    "model",
)


@dataclass(frozen=True)
class Trained:
    """What the card of a trained drafter, head or target is made from."""

    kind: str  # spire | vanilla | head | target
    folder: str  # as the command lines call the export
    target: str  # likewise; "" of a target from scratch
    target_fingerprint: str
    config: Mapping  # the run's, resolved
    trained: Mapping  # steps, tokens, tau, ...: what spectrain.json keeps
    attempts: Sequence[Mapping]  # of run.json: code, versions, devices


def trained_card(facts: Trained) -> str:
    """The README.md of what a run made."""
    parts = [
        front_matter(facts.target, "transformers" if facts.kind in ("vanilla", "target") else "spectrain", facts.kind),
        f"# {PurePath(facts.folder).name}\n\n{WHAT[facts.kind]} Made by spectrain.",
        _target(facts),
        _data(facts),
        tau_table(facts) if facts.kind in ("spire", "vanilla") else "",
        _training(facts),
        "## Use\n\n" + (_use(facts) if facts.kind != "target" else _use_target(facts)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def front_matter(target: str, library: str, kind: str) -> str:
    """The hub's metadata, between its dashes. A local target stands there by its folder's name."""
    name = target if HUB_ID.fullmatch(target) and not target.startswith("checkpoints/") else PurePath(target).name
    data = ModelCardData(
        base_model=name or None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "spectrain", kind],
    )
    return f"---\n{data.to_yaml()}\n---"


def _target(facts: Trained) -> str:
    if not facts.target:
        return ""
    return (
        f"## Target\n\n`{facts.target}`, fingerprint `{facts.target_fingerprint}` (weights, architecture and "
        "tokenizer). For another target it is refused: drafts would be verified all the same, and seldom accepted."
    )


def _data(facts: Trained) -> str:
    config, trained = facts.config, facts.trained
    rows = config.get("data") or {}
    if facts.kind == "head":
        source = rows.get("path") or config.get("responses")
        what = f"responses of the target{_named(source)}, with drafts and labels ({rows.get('source')})"
        share = config.get("held_out_share")
    elif rows.get("source") == "offline":
        what, share = f"stored activations of the target{_named(rows.get('path'))}", None
    else:
        corpus = config.get("corpus") or {}
        most = f"up to {corpus['max_documents']:,} " if corpus.get("max_documents") else ""
        what = f"{most}documents of{_named(corpus.get('path')) or ' the Python standard library'}"
        share = corpus.get("held_out_share")
    lines = [f"- trained on {what}, in rows of {rows.get('row_tokens')} tokens"]
    if trained.get("tokens"):
        lines.append(f"- {trained['tokens']:,} tokens in {trained['steps']:,} optimizer steps")
    else:
        lines.append(f"- {trained['steps']:,} optimizer steps of {rows.get('batch_size')} rows")
    if share is not None:
        texts = "responses" if facts.kind == "head" else "documents"
        lines.append(f"- {share:.1%} of the {texts}, by a hash of their ids, were held out: all numbers are of those")
    elif facts.kind == "spire":
        lines.append("- what was held out is what the store held out: all numbers here are of those rows")
    return "## Data\n\n" + "\n".join(lines)


def _named(path: object) -> str:
    """` name`; of an absolute path its last part alone: a card may be published."""
    if not path:
        return ""
    found = PurePath(str(path))
    return f" `{found.name if found.is_absolute() else found}`"


def tau_table(facts: Trained) -> str:
    """tau as it was measured with these weights, or why there is no number."""
    trained = facts.trained
    settings, selected = trained.get("settings") or {}, trained.get("selected") or {}
    rows = {name: row for name, row in (trained.get("tau") or {}).items() if name != "autoregressive"}
    head = "## tau: tokens a forward of the target\n\n"
    if not rows:
        why = (
            "The run is not finished"
            if trained.get("finished") is False
            else "These are not the weights that were measured"
        )
        text = f"{why}, so there is no table."
        if selected.get("tau") is not None:
            text += f" While it trained, tau on held-out rows was {_estimate(selected, 'tau')} at this step."
        return head + text
    columns = list(next(iter(rows.values())))
    table = [f"| method | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    table += [f"| {name} | {' | '.join(_estimate(row[c]) for c in columns)} |" for name, row in rows.items()]
    note = (
        f"Measured in the real decoding loop on {settings.get('contexts')} held-out contexts of each length, "
        f"{settings.get('new_tokens')} new tokens each; 95 % intervals over contexts. 1 is decoding without drafts."
    )
    return head + "\n".join(table) + "\n\n" + note


def _estimate(values: Mapping, key: str = "value") -> str:
    if values.get("low") is None:
        return f"{values[key]:.2f}"
    return f"{values[key]:.2f} [{values['low']:.2f}, {values['high']:.2f}]"


def _training(facts: Trained) -> str:
    options = {name: facts.config[name] for name in TRAINING if facts.config.get(name) is not None}
    rows = facts.config.get("data") or {}
    options["batch_size"] = rows.get("batch_size")
    options["precision"] = (facts.config.get("trainer") or {}).get("precision")
    lines = [f"- `{name}`: {_plain(value)}" for name, value in options.items() if value is not None]
    selected = facts.trained.get("selected") or {}
    if selected.get("tau") is not None:
        lines.append(
            f"- the weights are those of step {selected['step']:,}, which had the highest tau during training "
            f"({_estimate(selected, 'tau')})"
        )
    elif selected:
        lines.append(f"- the weights are those of step {selected['step']:,}, the last")
    if facts.attempts:
        lines.append(_made_with(facts.attempts[-1]))
    return "## Training\n\n" + "\n".join(lines)


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _made_with(attempt: Mapping) -> str:
    environment, code = attempt.get("environment") or {}, attempt.get("code") or {}
    names = ("python", "torch", "lightning", "transformers", "deepspeed", "spectrain")
    versions = ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name))
    devices = ", ".join(environment.get("devices") or ["unknown devices"])
    commit = (
        f"git commit `{code['commit'][:12]}`{' with changes' if code.get('dirty') else ''}" if code else "no checkout"
    )
    return f"- made with {versions}, on {environment.get('ranks', 1)} rank(s) of {devices}, {commit}"


def _use(facts: Trained) -> str:
    option = "head" if facts.kind == "head" else "drafter"
    loop = (
        "In spectrain's loop:\n\n```bash\n"
        f"python -m spectrain.generate method={METHOD[facts.kind]} {option}={facts.folder} target={facts.target} "
        'prompt="..."\n'
        f"```\n\n{python_lines(facts.folder, facts.target)}"
    )
    if facts.kind != "vanilla":
        return f"{loop}\n\nNo other engine runs this kind of drafter."
    return "\n\n".join([loop, _assistant(facts), _engines(facts)])


def python_lines(folder: str, target: str) -> str:
    """The same from Python."""
    return f"""```python
from spectrain import load_method
from spectrain.decoding import generate, load_target

target = load_target("{target}")
drafter = load_method("{folder}", target)
prompt = target.tokenizer("def read_config(path):")["input_ids"]
(found,) = generate(target, drafter, [prompt], max_new_tokens=64)
print(target.tokenizer.decode(found.tokens))
```"""


def _assistant(facts: Trained) -> str:
    return f"""In transformers, as an assistant model:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{facts.target}")
target = AutoModelForCausalLM.from_pretrained("{facts.target}")
assistant = AutoModelForCausalLM.from_pretrained("{facts.folder}")
inputs = tokenizer("def read_config(path):", return_tensors="pt")
print(tokenizer.decode(target.generate(**inputs, assistant_model=assistant, max_new_tokens=64)[0]))
```"""


def _engines(facts: Trained) -> str:
    config = f'{{"method":"draft_model","model":"{facts.folder}","num_speculative_tokens":{DRAFT_TOKENS}}}'
    return f"""In vLLM (the draft model has the target's vocabulary, as it must):

```bash
vllm serve {facts.target} --speculative-config '{config}'
```

In SGLang:

```bash
python -m sglang.launch_server --model-path {facts.target} --speculative-algorithm STANDALONE \\
  --speculative-draft-model-path {facts.folder} --speculative-num-steps {DRAFT_TOKENS} \\
  --speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFT_TOKENS + 1}
```"""


def _use_target(facts: Trained) -> str:
    return f"""An ordinary Hugging Face model:

```bash
python -m spectrain.train +exp=spire target={facts.folder}
```"""
