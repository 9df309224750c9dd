"""Write docs/audit.md: the tutorial, what benchmarks/audit.py measured, and the catalogue.

python benchmarks/pages/write_audit.py
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS, RESULTS
from benchmarks.pages.picture import picture
from mhalearn.auditing.catalogue import FAULTS

OUT = DOCS / "audit.md"
Record = dict[str, Any]

TUTORIAL = """# Which attention does this box really compute?

Written by `benchmarks/pages/write_audit.py` from the code's own catalogue and from
`benchmarks/results/audit.json`; no figure here is typed by hand.

Whoever ports, compiles, quantises or serves a model meets silent faults: a window lost, a sink
dropped, the rotary layout swapped, heads of a group in the wrong order. `mha.audit(claimed, box)`
says what differs: the name of the fault, the head, the number behind it.

## A Llama block, ported with two mistakes

The block of transformers is the truth, and what is claimed are its weights with its config. The
port below is a dozen lines, as one writes them, and wrong in two of them.

```python
import mhalearn as mha
import torch
import transformers

torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=64, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=1,
    intermediate_size=64, vocab_size=32, initializer_range=0.2, rope_theta=500000.0,
)  # fmt: skip
model = transformers.LlamaModel(config).eval()
claimed = mha.from_huggingface(model.state_dict(), config=config.to_dict())
block = model.layers[0].self_attn


@torch.no_grad()
def original(x):
    x = torch.as_tensor(x, dtype=torch.float32)
    places = model.rotary_emb(x, torch.arange(x.shape[1])[None])
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
    return block(x, position_embeddings=places, attention_mask=mask)[0]


assert mha.audit(claimed, original, n=32, k=24).ok
```

```python
@torch.no_grad()
def ported(x):
    x = torch.as_tensor(x, dtype=torch.float32)
    n, k, _ = x.shape
    q = block.q_proj(x).view(n, k, 8, 8).transpose(1, 2)
    key = block.k_proj(x).view(n, k, 2, 8).transpose(1, 2)
    v = block.v_proj(x).view(n, k, 2, 8).transpose(1, 2)
    angles = torch.arange(k)[:, None] * 500000.0 ** (-torch.arange(0, 8, 2) / 8)

    def rotate(z):  # the first mistake: pairs are (0, 1), (2, 3), ...
        a, b = z[..., 0::2], z[..., 1::2]
        turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
        return torch.stack(turned, dim=-1).flatten(-2)

    key, v = key.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)  # the second: 0, 1, 0, 1, ...
    logits = rotate(q) @ rotate(key).mT / 8**0.5
    logits = logits.masked_fill(torch.ones(k, k).triu(1).bool(), -torch.inf)
    return block.o_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


found = mha.audit(claimed, ported, n=32, k=24)
print(found)

assert not found.ok
assert {one.name for one in found.findings} == {"rotary-layout", "groups-interleaved"}
```

It prints both, each with the error without it and with it. `found.findings` has the same as
records (`name`, `head`, `heads`, `sentence`, `numbers`, `confidence`, `seen_in`);
`found.write_report(path)` writes a page with expected and found patterns of the first rows that
differ, and a notebook shows a card.

## What it takes

`claimed` is a layer, the file of one, or weights of a [Hugging Face model](interop.md) with their
config. The box is a function, a torch module or a JAX function, which is asked; or examples that
were [recorded](activations.md) elsewhere, padded or not, with position ids or without.

```bash
mhalearn generate --heads 2 --dim 8 --tokens 6 --examples 50 --out claim
mhalearn audit claim/layer.safetensors claim/examples.safetensors --report audit.html
mhalearn audit claim/layer.safetensors claim/examples.safetensors --json
```

Exit code 0: it computes what was claimed; 3: it differs. `mhalearn audit LAYER MODULE:FUNCTION`
asks a function of a Python file in the working folder; `--config` and `--layer` say which layer of
a model's weights is meant.

## In the tests of a port

`assert_same_attention` fails with the findings as its message:

```python
from mhalearn.testing import assert_same_attention

try:
    assert_same_attention(claimed, ported, n=32, k=24)
except AssertionError as error:
    message = str(error)

assert "the rotary layout is interleaved where half-split was claimed" in message
```

In continuous integration, with weights that fit into the repository (one layer at random weights
finds the same faults as the model's own):

```yaml
# .github/workflows/attention.yml
on: [push]
jobs:
  attention:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - run: pip install mhalearn
      - run: mhalearn audit tests/layer.safetensors port:attention --report audit.html
      - uses: actions/upload-artifact@v4
        if: failure()
        with: {path: audit.html}
```

## How it works, and what to trust

1. **What a right box leaves** is measured: the claimed layer is computed with every step rounded
   to the box's format, as its labels show it. A box within that is `ok` at that precision, unless
   step 4 finds something.
2. **Every change of the catalogue is tried** on a few sequences, its number, where it has one,
   fitted. Outputs are a sum over heads, so one Gram matrix tells which heads have a change.
3. **Pairs, and a third change to the best of them,** where one does not bring the error down to
   rounding (`depth`, three unless said otherwise, and `max_seconds`).
4. **Below rounding** a change is believed where the residual has slope one along it, on either
   half of the sequences; rounding has slope zero along any.
5. **Two explanations** are compared along the step between them. Where they cannot be told apart,
   both are named, each says so, and neither is sure.
6. **What no change explains** is called `unexplained`, with the heads, rows and sequences it lies
   in. A fault is named beside it only where it takes off nine tenths of the squared error, and then
   with a confidence below one half.

Not done: what lies outside attention (norms before it, residual paths), cross-attention, latent
keys; int8 steps that depend on a whole batch, or were calibrated before. Errors are relative
root-mean-square errors.
"""

CATALOGUE = """
## The catalogue

| fault | of | what the box does | seen in |
|---|---|---|---|
"""


def main() -> None:
    runs = json.loads((RESULTS / "audit.json").read_text())["runs"]
    text = TUTORIAL + _figures(runs) + CATALOGUE
    for fault in FAULTS:
        seen = ", ".join(map(_link, fault.seen)) or "none on record"
        text += f"| `{fault.name}` | {fault.family} | {fault.words} | {seen} |\n"
    OUT.write_text(text)


def _link(issue: str) -> str:
    place, number = issue.split("#")
    return f"[{issue}](https://github.com/{place}/issues/{number})"


def _made(runs: list[Record], study: str) -> list[Record]:
    return [one for one in runs if one["study"] == study and "findings" in one]


def _figures(runs: list[Record]) -> str:
    single, pairs = _made(runs, "single"), _made(runs, "pairs")
    clean, outside = _made(runs, "clean"), _made(runs, "outside")
    _draw(single + pairs + outside)
    text = "\n## What was measured\n\n"
    text += (
        "`benchmarks/audit.py`: layers of 64 features, four drawn (Llama-, gpt-oss- and "
        "Gemma-like, and an encoder with ALiBi) and one trained, 48 sequences of 32 tokens that "
        "were drawn, or of 16 that were recorded from text, boxes in NumPy that share no code with "
        "the package. A "
        "fault that changes outputs by less than half of what the box rounds is not counted.\n\n"
    )
    text += "| | cases | as it should be | share |\n|---|---|---|---|\n"
    for precision in ("float32", "bfloat16"):
        some = [one for one in single if one["precision"] == precision]
        text += _row(f"one fault, {precision}: named first, with its head", some, _named)
    for precision in ("float32", "bfloat16"):
        some = [one for one in pairs if one["precision"] == precision]
        text += _row(f"two faults, {precision}: both named", some, _named)
    for precision in ("float32", "bfloat16"):
        some = [one for one in clean if one["precision"] == precision]
        text += _row(f"right boxes, {precision}: ok", some, lambda one: one["ok"])
    text += _row("ten faults outside the catalogue: not misnamed", outside, _humble)
    text += _row("the same: at the right place", outside, lambda one: one["right_locus"])
    skipped = Counter(
        one["skipped"] for one in runs if one["study"] == "single" and "skipped" in one
    )
    text += (
        f"\nOf {sum(skipped.values()) + len(single)} combinations of fault, layer, precision and "
    )
    text += "tokens that were run, " + "; ".join(
        f"{count} were left out: {why}" for why, count in skipped.most_common()
    )
    crashed = sum("crashed" in one for one in runs)
    text += f". {crashed} runs crashed.\n\n" + _missed(single, pairs, clean, outside)
    text += _large(_made(runs, "large"))
    text += (
        "\n![How often findings of a confidence are right](images/audit_reliability.svg)\n\n"
        "Every finding of these runs but `unexplained`, by the confidence it was given.\n"
    )
    return text


def _row(what: str, made: list[Record], good: Any) -> str:
    right = sum(bool(good(one)) for one in made)
    share = f"{right / len(made):.1%}" if made else "-"
    return f"| {what} | {len(made)} | {right} | {share} |\n"


def _named(one: Record) -> bool:
    return bool(one.get("named"))


def _humble(one: Record) -> bool:
    return not any(f["name"] != "unexplained" and f["confidence"] > 0.5 for f in one["findings"])


def _missed(*studies: list[Record]) -> str:
    """Each case that is not as it should be."""
    text = ""
    for one in (one for made in studies for one in made):
        good = {"clean": one["ok"], "outside": _humble(one) and one.get("right_locus")}
        if good.get(one["study"], _named(one)):
            continue
        what = one.get("fault") or " and ".join(one.get("faults", ())) or "nothing"
        said = [f["name"] for f in one["findings"]] or ["ok"]
        place = f"{one['layer']}, {one['precision']}, {one['tokens']} tokens"
        text += f"| {what} | {place} | {', '.join(said)} |\n"
    return f"Those that are not:\n\n| planted | in | said |\n|---|---|---|\n{text}" if text else ""


def _large(made: list[Record]) -> str:
    if not made:
        return ""
    text = (
        "\nA layer of 576 features, 9 heads and 3 key heads, 256 sequences of 64 tokens, on a "
        "machine that others used too:\n\n"
        "| planted | said | seconds | of the processor |\n|---|---|---|---|\n"
    )
    for one in made:
        said = ", ".join(f["name"] for f in one["findings"]) or "ok"
        text += f"| {one['fault']} | {said} | {one['seconds']:.0f} | {one['cpu_seconds']:.0f} |\n"
    return text


def _rightness(made: list[Record]) -> list[tuple[float, bool]]:
    """Confidence and truth of every finding that names a fault."""
    found = []
    for one in made:
        planted = {one.get("fault"), *one.get("faults", ())}
        named = [f for f in one["findings"] if f["name"] != "unexplained"]
        found += [(f["confidence"], f["name"] in planted) for f in named]
    return found


def _draw(made: list[Record]) -> None:
    bins: dict[float, list[bool]] = {}
    for sure, right in _rightness(made):
        bins.setdefault(round(sure, 1), []).append(right)
    with picture("audit_reliability.svg", 4.2, 3.2) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for sure, rights in sorted(bins.items()):
            axes.plot(sure, sum(rights) / len(rights), "o", color="#1f6fc4")
            axes.annotate(f" {len(rights)}", (sure, sum(rights) / len(rights)), fontsize=8)
        axes.set(xlabel="confidence", ylabel="share that is right", xlim=(0, 1.08), ylim=(0, 1.08))


if __name__ == "__main__":
    main()
