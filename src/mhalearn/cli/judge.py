"""certify, compare and check: what can be said of a layer in a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mhalearn.cli.cache import use_compilation_cache
from mhalearn.cli.exit_codes import Exit, guarded
from mhalearn.cli.options import Inputs, Json, LayerFile, Mask, Outputs
from mhalearn.cli.output import print_facts, print_json, print_table, print_verdict, say_certificate

if TYPE_CHECKING:
    from mhalearn.judge.certificate import Certificate

commands = typer.Typer()


@commands.command(
    "certify",
    epilog="Example:\n\n"
    "  mhalearn certify layer.safetensors fresh.safetensors --delta 0.01\n\n"
    "The examples must be new: those the layer was learned from are refused, and left out where "
    "they come in another order of tokens, with other signs or roundings.",
)
@guarded
def certify_command(
    layer: LayerFile,
    examples: Annotated[
        Path, typer.Argument(metavar="EXAMPLES", help="Examples not learned from.")
    ],
    delta: Annotated[float, typer.Option(help="1 - delta is the confidence.")] = 0.05,
    residual: Annotated[
        bool, typer.Option("--residual", help="Labels are y = x + F(x) of the layer F.")
    ] = False,
    inputs: Inputs = None,
    outputs: Outputs = None,
    mask: Mask = None,
    as_json: Json = False,
) -> int:
    """State what is certain about a layer, from fresh examples."""
    import mhalearn as mha
    from mhalearn.layer.base import parameters_hash
    from mhalearn.report.terminal import Progress

    if not 0 < delta < 1:
        raise ValueError(f"--delta {delta}: give a number between 0 and 1, such as 0.05")
    learned = mha.load_layer(layer)
    data = mha.load_examples(examples, inputs=inputs, outputs=outputs, mask=mask)
    data = data.without_residual() if residual else data
    use_compilation_cache()
    with Progress() as progress:
        certificate = mha.certify(learned, data, delta=delta, on_event=progress.on_event)
    circular = data.metadata.get("labelled_by") == parameters_hash(learned)
    if as_json:
        print_json(certificate.to_dict() | {"labelled_by_this_layer": circular})
    else:
        beware = {"beware": "this very layer made these labels: that it fits them shows nothing"}
        print_verdict(
            _say(certificate),
            certificate.reason,
            {
                "relative error": f"{certificate.relative_mse:.1e} squared, "
                f"{certificate.n_examples} examples",
                "certificate": say_certificate(certificate),
            }
            | (beware if circular else {}),
        )
    certified = certificate.recovered or certificate.recovered_on_span
    return Exit.DONE if certified else Exit.NOT_RECOVERED


def _say(certificate: Certificate) -> str:
    if certificate.recovered_on_span:
        return "RECOVERED_ON_SPAN"
    return "RECOVERED" if certificate.recovered else "NOT RECOVERED"


@commands.command(
    "compare",
    epilog="Example:\n\n"
    "  mhalearn compare layer.safetensors truth.safetensors\n\n"
    "In JSON max_error is null, comparable false, and why a sentence, where heads, shapes or masks "
    "differ.",
)
@guarded
def compare_command(
    learned: Annotated[Path, typer.Argument(metavar="LAYER", help="The learned layer.")],
    truth: Annotated[Path, typer.Argument(metavar="LAYER", help="The layer to compare with.")],
    inputs: Annotated[
        Path | None,
        typer.Option(metavar="EXAMPLES", help="Compare in the metric of these tokens."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare two layers head by head, up to the order of heads."""
    import mhalearn as mha

    first, second = mha.load_layer(learned), mha.load_layer(truth)
    found = mha.compare(first, second, None if inputs is None else mha.load_examples(inputs))
    if as_json:
        print_json({"comparable": found.comparable, **dataclasses.asdict(found)})
    elif found.comparable:
        print_table(
            ("head", "learned as", "error of Theta", "error of W"),
            [
                (str(i + 1), str(int(j) + 1), f"{theta:.1e}", f"{w:.1e}")
                for i, (j, theta, w) in enumerate(
                    zip(found.order, found.theta_errors, found.w_errors, strict=True)
                )
            ],
        )
        print_facts({"largest relative error": f"{found.max_error:.1e}"})
    else:
        print_facts({"not comparable": found.why, "layers": f"{first} against {second}"})
    return Exit.DONE


@commands.command("check", epilog="Example:\n\n  mhalearn check layer.safetensors --tokens 8")
@guarded
def check_command(
    layer: LayerFile,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an example.")],
    as_json: Json = False,
) -> int:
    """Measure the non-degeneracy conditions under which learning is proved."""
    import mhalearn as mha

    subject = mha.load_layer(layer)
    use_compilation_cache()
    found = mha.check_nondegeneracy(subject, k=tokens, seed=0)
    if as_json:
        names = ("name", "value", "threshold", "at_most", "ok", "explanation")
        items = [{name: getattr(item, name) for name in names} for item in found.items]
        print_json({"ok": found.ok, "tokens": tokens, "items": items})
    else:
        print_table(
            ("condition", "value", "asked for", "holds"),
            [
                (
                    item.name,
                    f"{item.value:.3g}",
                    f"{'at most' if item.at_most else 'at least'} {item.threshold:.3g}",
                    "yes" if item.ok else "NO",
                )
                for item in found.items
            ],
        )
    return Exit.DONE if found.ok else Exit.NOT_RECOVERED
