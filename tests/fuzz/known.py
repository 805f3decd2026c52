"""Cases that once went wrong, or that issue 16 names, tried in each run of the tests."""

from __future__ import annotations

from tests.fuzz.checks import Case
from tests.fuzz.files import FileCase
from tests.fuzz.options import OptionCase
from tests.fuzz.pairs import PairCase

LONG_NAME = "a" * 5000
# command -> options as typed, each of which must be refused
TYPED: dict[str, tuple[str, ...]] = {
    "train": (
        *(
            "fresh=no",
            "seed=nan",
            "seed=-1",
            "seed=1e26",
            "optimizer.betas=[]",
            "optimizer.betas=[2,2]",
            "optimizer.betas=[0.9]",
        ),
        *("optimizer.betas=[0.9,0.9,0.9]", "+trainer.max_time=nan", "+trainer.gradient_clip_algorithm=5"),
        *("+trainer.max_epochs=0", "+trainer.limit_train_batches=0"),
        *("optimizer.betas=[nan,nan]", "tau.context_tokens=[]", "+exp=vanilla n_layer=0", "feedback=5", "corpus=5"),
        *("run_dir=a_file", "run_dir=/dev/null", "run_dir=a_file/below", f"run_dir={LONG_NAME}", "kind=foo"),
        "corpus=/ corpus.max_files=9",
    ),
    "generate": (
        "+trainer.foo=nan",
        *("baseline=perhaps", "sampling.temperature=inf", "target=5", "drafter=5", "stop_strings=[5]"),
        *("stop_strings=null", "max_new_tokens=nan", "target.device=meta", f"prompt={'9' * 5000}"),
    ),
    "bench": (
        *("fresh=no", "methods=null", "methods={}", "variants=[]", "kind=foo", "out=[a]", "out=/dev/null"),
        *("out=a_file", "out=/proc/fuzz", f"out={LONG_NAME}", "out=a_file/below"),
    ),
    "tune": ("grid=null", "grid.input_scale=[]"),
    "cost": (
        *("investment.decoding=inf", "hardware.flops_per_s={a:{b:nan}}", "out=/dev/null", "out=a_file"),
        "++hardware.flops_per_s.fp8={b:nan}",
    ),
    "export": (
        "tuned=a_file/below",
        *("out=a_file/below", "out=/dev/null", "out=a_file", f"out={LONG_NAME}"),
    ),
    "report": ("runs=/", "out=/dev/null", "out=a_file", "out=a_folder", f"out={LONG_NAME}", "out=a_file/below"),
    "parity": ("out=/dev/null", "out=a_file"),
    "responses": ("out=/dev/null", "out=a_file", "out=a_file/below", f"out={LONG_NAME}", "stop_strings=[5]"),
    "acceptance": ("responses=5", "out=a_file"),
    "activations": ("corpus=5", "out=/proc/fuzz", "corpus=/ corpus.max_files=9"),
    "datastore": ("corpus=5", "out=a_file", "inspect=fifo", "corpus=/ corpus.max_files=9"),
}
FAILED: tuple[Case, ...] = (
    FileCase("target", "generation_config.json", "huge number", 2),
    FileCase("method", "config.json", "value", 68955143),
    FileCase("begun build", "work.json", "wrong type", 0),
    FileCase("run", "config.yaml", "wrong type", 0),
    FileCase("run", "config.yaml", "wrong type", 16),
    FileCase("run", "config.yaml", "wrong type", 29),
    FileCase("run", "run.json", "wrong type", 7),
    FileCase("run", "run.json", "wrong type", 16),
    FileCase("run of parity", "config.yaml", "wrong type", 22),
    FileCase("run of parity", "config.yaml", "wrong type", 46),
    FileCase("complete build", "store/manifest.json", "value", 1230189),
    FileCase("runs", "run.json", "value", 86530),
    FileCase("datastore of export", "manifest.json", "number", 50444),
    OptionCase("cost", ("operational_intensity=1e300",), True),
    OptionCase("parity", ("new_tokens=1",), True),
    FileCase("inspect", "manifest.json", "another value", 3518),
    OptionCase("cost", ("++numbers.spire={}",), True),
    OptionCase("cost", ("++hardware.name=''",), True),
    OptionCase("export", ("target=foo",), True),
    FileCase("target", "generation_config.json", "another value", 54),
    FileCase("features", "manifest.json", "another value", 495508331),
    FileCase("drafter of cost", "config.json", "value", 845),
    FileCase("run", "run.json", "value", 4283329),
    FileCase("run of parity", "config.yaml", "tensor", 1511609),
    FileCase("begun build", "failed-0.jsonl", "a folder", 0),
    FileCase("begun build", "work.json", "bytes changed", 506373),
    FileCase("begun build", "work.json", "yaml bomb", 157),
    FileCase("complete build", "complete", "yaml bomb", 0),
    FileCase("forward times", "forwards-*.json", "a folder", 9199),
    FileCase("tuned", "tuned.yaml", "empty", 0),
    OptionCase("tune", ("++stopping.entropy='a\nb'",), True),
    OptionCase("train", ("-m", "fresh=no,5"), True),
    OptionCase("activations", ("+unknown=1",), True),
    OptionCase("activations", ("corpus.fields=''",), True),
    FileCase("unfinished run", "metrics/version_0/metrics.csv", "binary", 382454),
    FileCase("begun build", "rows-0.jsonl", "another number", 33359),
    OptionCase("report", ("out=fifo",), True),
    OptionCase("cost", ("window_share=9223372036854775808",), True),
    OptionCase("datastore", ("~seed",), True),
    OptionCase("bench", ("=5",), True),
    OptionCase("bench", ("--foo",), True),
    FileCase("unfinished run", "checkpoints/best/step-*.safetensors", "another value", 2654435761),
    FileCase("target", "tokenizer_config.json", "another number", 770928614),
    OptionCase("export", ("++target.device=''",), True),
    OptionCase("cost", ("++hardware.source=''",), True),
    FileCase("drafter of spire", "config.json", "number", 4069),
    FileCase("run", "config.yaml", "cut off", 1712),
)
CASES: tuple[Case, ...] = (
    *(OptionCase(command, tuple(typed.split(" ")), True) for command, texts in TYPED.items() for typed in texts),
    *FAILED,
    FileCase("last weights of a run", "result.json", "value", 103192),
    FileCase("tuned", "tuned.yaml", "cut off", 1052602),
    OptionCase("tune", ("limit=null",), False),
    OptionCase("cost", ("target=null",), True),
    OptionCase("generate", ("+exp=null",), True),
    OptionCase("bench", ("hardware=5",), True),
    PairCase("bench", ("bench",), 0.2),
    PairCase("acceptance", ("cost", "out=labels"), 0.0),
)
