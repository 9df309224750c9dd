"""generate: examples of a random layer, or of one in a file."""

from __future__ import annotations

import enum
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhalearn.cli.exit_codes import Exit, guarded
from mhalearn.cli.options import Count, Folder, Json, Noise, Seed, make_folder
from mhalearn.cli.output import print_facts, print_json, say_heads, times

if TYPE_CHECKING:
    from mhalearn.data import Examples
    from mhalearn.layer.layer import AttentionLayer

commands = typer.Typer()


class Inputs(enum.StrEnum):
    BOOLEAN = "boolean"
    GAUSSIAN = "gaussian"


@commands.command(
    epilog="Examples:\n\n"
    "  mhalearn generate --out data\n\n"
    "  mhalearn generate --heads 4 --dim 32 --tokens 8 --examples 1000 --noise 0.01 --out noisy\n\n"
    "  mhalearn generate --layer data/layer.safetensors --seed 1 --out fresh\n\n"
    "The same seed draws the same inputs; fresh examples of a layer need another one."
)
@guarded
def generate(
    out: Folder,
    layer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw examples of this layer, not of a random one."),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of the random layer; 3 unless given.")
    ] = None,
    dim: Annotated[
        int | None, typer.Option(min=1, help="Features of a token; 16 unless given.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an example.")] = 8,
    examples: Count = 200,
    inputs: Annotated[Inputs, typer.Option(help="Distribution of the tokens.")] = Inputs.BOOLEAN,
    scale: Annotated[
        float | None, typer.Option(help="Norm of each attention matrix; 2 unless given.")
    ] = None,
    noise: Noise = 0.0,
    rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of the heads; full unless given.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Draw a random layer, or take one from a file, and draw labelled examples of it.

    Writes examples.safetensors and layer.safetensors.
    """
    recipe = {"n_heads": heads, "d": dim, "scale": scale, "rank": rank}
    given = {name: value for name, value in recipe.items() if value is not None}
    teacher = _random(given, seed) if layer is None else _from_file(layer, given, out)
    drawn = draw_examples(teacher, inputs.value, examples, tokens, seed, noise)
    with make_folder(out, "examples.safetensors", "layer.safetensors") as paths:
        drawn.save(paths["examples"])
        teacher.save(paths["layer"])
    limit = drawn.counting_limit(replace(teacher.architecture, head_dim=rank))
    if as_json:
        print_json(
            {
                "examples": examples,
                "ratio": examples / limit,
                "files": paths,
            }
        )
    else:
        flags = " --bias" * teacher.architecture.bias + " --causal" * teacher.causal
        print_facts(
            {
                "layer": f"{say_heads(teacher.n_heads)}, d = {teacher.d}: {paths['layer']}",
                "examples": f"{examples} of {tokens} tokens, {times(examples, limit)}: "
                f"{paths['examples']}",
                "next": f"mhalearn learn {paths['examples']} --heads {teacher.n_heads}{flags}",
            }
        )
    return Exit.DONE


def draw_examples(
    layer: AttentionLayer, inputs: str, n: int, tokens: int, seed: int, noise: float = 0.0
) -> Examples:
    """Examples of a layer, in memory; they remember which, for `certify` to tell."""
    import mhalearn as mha
    from mhalearn.layer.base import parameters_hash

    drawn = mha.Examples.from_callable(
        layer, inputs, n=n, k=tokens, d=layer.d, seed=seed, noise=noise
    )
    drawn = drawn.subset(slice(None))
    drawn.metadata["labelled_by"] = parameters_hash(layer)
    return drawn


def _random(recipe: dict[str, Any], seed: int) -> AttentionLayer:
    import mhalearn as mha

    return mha.random_layer(**recipe, seed=seed)


def _from_file(file: Path, recipe: dict[str, Any], out: Path) -> AttentionLayer:
    import mhalearn as mha
    from mhalearn._runtime import storage

    if recipe:
        names = {"n_heads": "heads", "d": "dim"}
        options = ", ".join(f"--{names.get(name, name)}" for name in recipe)
        raise ValueError(
            f"{options} and --layer conflict: a layer from a file is as it is; leave one out"
        )
    if os.path.realpath(file) == os.path.realpath(out / "examples.safetensors"):
        raise ValueError(
            f"--layer {storage.show(file)}: the examples would overwrite it; choose another --out"
        )
    return mha.load_layer(file)
