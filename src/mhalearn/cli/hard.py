"""hard: layers made to be hard to learn, and what learning them costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhalearn.cli.cache import use_compilation_cache
from mhalearn.cli.exit_codes import Exit, guarded
from mhalearn.cli.generate import draw_examples
from mhalearn.cli.options import Count, Folder, Json, Noise, Seed, make_folder
from mhalearn.cli.output import print_facts, print_json, print_table, strict
from mhalearn.learners.registry import BUILTIN

if TYPE_CHECKING:
    from mhalearn.hardness.curve import Cell, Growth, Line
    from mhalearn.hardness.secret import Secret

commands = typer.Typer()
_METHODS = ",".join(learner.name for learner in BUILTIN if learner.consistent)
hard = typer.Typer(
    no_args_is_help=True, help="Make layers that are hard to learn; see what they cost."
)
commands.add_typer(hard, name="hard")

Heads = Annotated[int, typer.Option(min=2, help="Heads, an even number.")]
Dim = Annotated[int, typer.Option(min=2, help="Features of a token.")]
Sharpness = Annotated[float, typer.Option(help="How near the layer is to its closed form.")]
Mix = Annotated[float, typer.Option(min=0, max=1, help="0 is hard, 1 a random layer.")]
_DIALS = "a larger --mix or a smaller --sharpness makes them easier"
_EASIER = {
    "parity": _DIALS,
    "rounding": _DIALS,
    "lwr": "a smaller --dimension or --modulus makes them easier",
}


@hard.command(epilog="Example:\n\n  mhalearn hard parity --heads 4 --dim 16 --out secret")
@partial(guarded, group="hard")
def parity(
    out: Folder,
    heads: Heads = 4,
    dim: Dim = 16,
    examples: Count = 1000,
    sharpness: Sharpness = 8.0,
    mix: Mix = 0.0,
    noise: Noise = 0.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """A layer whose heads carry a parity of as many secret bits.

    Writes layer.safetensors, secret.safetensors and examples.safetensors.
    """
    recipe = {"n_heads": heads, "d": dim, "seed": seed, "sharpness": sharpness, "mix": mix}
    return _write("parity", recipe, out, examples, noise, as_json)


@hard.command(epilog="Example:\n\n  mhalearn hard rounding --heads 4 --dim 16 --out secret")
@partial(guarded, group="hard")
def rounding(
    out: Folder,
    heads: Heads = 4,
    dim: Dim = 16,
    modulus: Annotated[
        int | None, typer.Option(min=2, help="Of the inner product, even; 8 unless given.")
    ] = None,
    examples: Count = 1000,
    sharpness: Sharpness = 8.0,
    mix: Mix = 0.0,
    noise: Noise = 0.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """A layer whose label rounds a secret inner product modulo an integer.

    Writes layer.safetensors, secret.safetensors and examples.safetensors.
    """
    recipe = {"n_heads": heads, "d": dim, "seed": seed, "sharpness": sharpness, "mix": mix}
    return _write("rounding", recipe | {"modulus": modulus}, out, examples, noise, as_json)


@hard.command(epilog="Example:\n\n  mhalearn hard lwr --dimension 4 --modulus 8 --out secret")
@partial(guarded, group="hard")
def lwr(
    out: Folder,
    dimension: Annotated[int, typer.Option(min=1, help="Integers of the secret vector.")] = 4,
    modulus: Annotated[
        int | None, typer.Option(min=2, help="Of the inner product, a power of 2; 8 unless given.")
    ] = None,
    examples: Count = 1000,
    sharpness: Sharpness = 40.0,
    noise: Noise = 0.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """A layer whose labels are samples of learning with rounding: a bit of a secret inner product.

    Heads and features are as many as the two sizes ask for. Half of the examples show a bit.
    Writes layer.safetensors, secret.safetensors and examples.safetensors.
    """
    recipe = {"dimension": dimension, "modulus": modulus, "seed": seed, "sharpness": sharpness}
    return _write("lwr", recipe, out, examples, noise, as_json)


@hard.command(
    epilog="Example:\n\n"
    "  mhalearn hard curve --heads 2,4 --dims 8 --secrets 3 --budget 5\n\n"
    "The full study of the documentation takes an hour: benchmarks/studies/hard_curve.py."
)
@partial(guarded, group="hard")
def curve(
    heads: Annotated[str, typer.Option(help="Numbers of heads, between commas.")] = "2,4,6",
    dims: Annotated[str, typer.Option(help="Features of a token, between commas.")] = "8",
    methods: Annotated[str, typer.Option(help="Learners, between commas.")] = _METHODS,
    secrets: Annotated[int, typer.Option(min=1, help="Secrets for each shape.")] = 3,
    budget: Annotated[float, typer.Option(min=0.1, help="Seconds for each fit.")] = 5.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the records as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the costs as an SVG picture.")
    ] = None,
    as_json: Json = False,
) -> int:
    """What parities of ever more bits cost each learner, beside random layers of the same shape."""
    from mhalearn._runtime import storage
    from mhalearn.hardness.curve import growth, measure_cost, record_of, summarise

    cells = _cells(heads, dims, methods)
    for path in (out, plot):
        if path is not None:
            storage.check_writable(path)
    use_compilation_cache()
    records = [
        record_of(cell, budget, measure_cost(cell, seed, budget))
        for cell in cells
        for seed in range(secrets)
    ]
    lines = summarise(records)
    rates = growth(lines)
    facts = strict({"runs": records, "growth": [asdict(rate) for rate in rates]})
    if out is not None:
        text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
        storage.write_atomically(out, text.encode())
    if plot is not None:
        from mhalearn.hardness.plot import draw_curve

        draw_curve(records, plot)
    if as_json:
        print_json(facts)
    else:
        _print_costs(lines, rates)
    return Exit.DONE


def _cells(heads: str, dims: str, methods: str) -> list[Cell]:
    """All combinations of what was asked for, for parities and for random layers."""
    from mhalearn.hardness.curve import Cell, list_curve_methods

    counts, widths, learners = (
        _integers("--heads", heads),
        _integers("--dims", dims),
        methods.split(","),
    )
    known = list_curve_methods()
    for name in learners:
        if name not in known:
            raise ValueError(f"--methods {name}: choose among {', '.join(known)}")
    for m in counts:
        if m < 2 or m % 2 or m + 1 > min(widths):
            raise ValueError(f"--heads {m}: give even numbers below --dims, such as 2,4,6")
    return [
        Cell(family, m, d, method)
        for family in ("parity", "generic")
        for d in widths
        for method in learners
        for m in counts
    ]


def _print_costs(lines: list[Line], rates: list[Growth]) -> None:
    print_table(
        ("family", "heads", "dim", "learner", "learned", "seconds a success"),
        [
            (
                line.cell.family,
                str(line.cell.n_heads),
                str(line.cell.d),
                line.cell.method,
                f"{line.learned}/{line.secrets}",
                f"{'> ' * line.at_least}{line.seconds:.1f}",
            )
            for line in lines
        ],
    )
    print_facts(
        {
            f"{rate.family}, {rate.method}, d = {rate.d}": "seconds grow "
            f"{'more than ' * rate.at_least}{rate.factor:.1f} times with each head"
            for rate in rates
        }
    )


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: give integers between commas, such as 2,4,6") from None


def _check_recipe(family: str, recipe: dict[str, Any]) -> None:
    """In the command's own words, what the library would refuse in those of its parameters."""
    modulus = recipe.get("modulus")
    if family == "lwr":
        if modulus is not None and modulus & (modulus - 1):
            raise ValueError(f"--modulus {modulus}: integers enter bit by bit; give a power of two")
        return
    heads, dim = recipe["n_heads"], recipe["d"]
    if heads % 2:
        raise ValueError(f"--heads {heads}: heads cancel in pairs; give an even number")
    if family == "parity" and dim < heads + 1:
        raise ValueError(
            f"--heads {heads} --dim {dim}: a parity of {heads} bits needs --dim {heads + 1} or more"
        )
    if modulus is not None and modulus % 2:
        raise ValueError(f"--modulus {modulus}: half periods are integers; give an even number")


def _say_secret(secret: Secret) -> str:
    from mhalearn.hardness import LwrSecret

    if isinstance(secret, LwrSecret):
        return f"{secret.vector.tolist()} modulo {secret.modulus}"
    return str(secret.weights.tolist())


def _write(
    family: str, recipe: dict[str, Any], out: Path, n: int, noise: float, as_json: bool
) -> int:
    import mhalearn as mha

    _check_recipe(family, recipe)
    layer, secret = mha.hard_layer(family, **recipe)
    drawn = draw_examples(layer, "boolean", n, 2, recipe["seed"], noise)
    names = ("layer.safetensors", "secret.safetensors", "examples.safetensors")
    with make_folder(out, *names) as paths:
        layer.save(paths["layer"])
        secret.save(paths["secret"])
        drawn.save(paths["examples"])
    if as_json:
        vector = {"vector": secret.vector} if isinstance(secret, mha.hardness.LwrSecret) else {}
        print_json({"weights": secret.weights, **vector, "examples": n, "files": paths})
    else:
        print_facts(
            {
                "layer": f"{layer.n_heads} heads, d = {layer.d}, two tokens: {paths['layer']}",
                "secret": f"{_say_secret(secret)}: {paths['secret']}",
                "examples": f"{n}: {paths['examples']}",
                "next": f"mhalearn learn {paths['examples']} --heads {layer.n_heads} "
                "--max-seconds 60",
                "expect": f"that it fails: such layers are made to be hard; {_EASIER[family]}",
            }
        )
    return Exit.DONE
