"""How much faster speculative decoding would be, by batch and context, on hardware that you need not have.

    python -m spectrain.cost target=<folder or hub id> hardware=h100 batch=[1,8] context_tokens=[512,8192]

Prints the modelled throughput of each method and its best draft length; out=<folder> writes cost.json.
docs/cost.md has the formulas and what they leave out.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.cli import run

    run("spectrain.cost")

from pathlib import Path

from spectrain.config import plain
from spectrain.config.commands import Cost
from spectrain.measure.tables import cost_table, show
from spectrain.planning.cost import CostModel, methods_for, read_hardware, shape_of_model, shape_of_numbers
from spectrain.stores.environment import provenance
from spectrain.stores.files import write_json
from spectrain.stores.locations import BUNDLED

AXES = ("batch", "context_tokens")


def main(options: Cost) -> None:
    content = prediction(plain(options))
    title = f"{content['title']} on {content['hardware']}: throughput relative to plain decoding (and draft length)"
    files = ""
    if options.out is not None:
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "cost.json", content)
        files = f"{out}/cost.json"
    show([(title, cost_table(content))], files=files)


def prediction(options: dict) -> dict[str, object]:
    """Model every method in every cell; the content of cost.json."""
    given = options["numbers"]["target"]
    name = str(options["target"]["path"] or BUNDLED)
    target = shape_of_model(name) if given is None else shape_of_numbers("numbers.target", given)
    model = CostModel(target, read_hardware(options["hardware"], options["dtype"]), options["count_unembedding"])
    axes = {axis: options[axis] for axis in AXES}
    plain_ms = model.hardware.milliseconds(model.verify(*axes.values()))
    methods = {}
    for method in methods_for(target, options):
        multiplier, k = model.best(method, *axes.values())
        if options["k"] != "auto":
            multiplier, k = model.multiplier(method, options["k"], *axes.values()), multiplier * 0 + options["k"]
        methods[method.name] = {
            "parameters": model.parameters(method.shape),
            "acceptance_rate": method.acceptance.rate,
            "multiplier": multiplier.tolist(),
            "k": k.astype(int).tolist(),
        }
    return {
        "kind": "cost",
        **provenance(),
        "title": options["title"] or (name if given is None else "the given shape"),
        "hardware": model.hardware.name,
        "parameters": model.parameters(target),
        **axes,
        "plain_ms": None if plain_ms is None else plain_ms.tolist(),
        "methods": methods,
    }
