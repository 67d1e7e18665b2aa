"""How exact every family is: tiny random models of the tests' table, in the stock form, beside the stock class.

One row for every family goes to `exactness.jsonl`, with three largest differences. `removed_nothing`: of what the model
says about random tokens, between a result at sparsity 0 and the input. `full_width`: between our own stream of the
input and the hidden states of the stock class after every layer. `removed`: between the stream of a run that removes
10 % and the states that the stock class computes from the result. The last two are divided by the largest state.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import ROOT, Row, append_row, parser, provenance

from oneshot import Config
from oneshot.checkpoint import Model, open_model
from oneshot.machine import Machine
from oneshot.pipeline import compress
from oneshot.stream import States
from oneshot.text import Text

sys.path.insert(0, str(ROOT / "tests"))
from factories import calibration_tokens, cpu_machine, tiny_tokenizer, topics
from families.cases import CASES
from last_states import keep_last_states

T5 = CASES["t5"]
TABLE = CASES | {"mt5": replace(T5, options=T5.options | {"model_type": "mt5"})}
TABLE |= {  # families that are dense, or read their tokens once, without
    f"{name}-{variant}": replace(CASES[name], options=CASES[name].options | CASES[name].variants[variant])
    for name, variant in (("gemma4_text", "experts"), ("gemma4_text", "tokens"), ("granitemoehybrid", "experts"))
}
SHARE = 0.1


def random_text(vocabulary: int, *, decoder: bool) -> Text:
    """Return sequences of random tokens, none of them special; those of a decoder beside them."""
    ids = torch.randint(4, vocabulary, (2, 4, 24), generator=torch.Generator().manual_seed(0))
    return Text(ids[0], "random tokens", decoder=Text(ids[1, :, :16], "random tokens") if decoder else None)


def inputs_of(text: Text) -> dict[str, torch.Tensor]:
    """Return what the stock class is called with."""
    return {"input_ids": text.token_ids} | ({"decoder_input_ids": text.decoder.token_ids} if text.decoder else {})


def load(folder: Path) -> Any:
    """Return the model of the class that its config states."""
    [stated] = transformers.AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, stated).from_pretrained(folder).eval()


def states_after(stock: Any, layers: list[Any], inputs: dict[str, torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Return what the stock model computes, and the states after these layers of it."""
    states: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda _, __, output: states.append(output[0] if isinstance(output, tuple) else output)
        )
        for layer in layers
    ]
    output = stock(**inputs)
    for handle in handles:
        handle.remove()
    return output, states


def layers_of(stock: Any, model: Model) -> list[Any]:
    """Return the layers of a stock model, those of an encoder first."""
    return [layer for stack in model.family.stacks for layer in stock.get_submodule(stack.layers)]


def own_states(model: Model, machine: Machine, text: Text) -> list[torch.Tensor]:
    """Return our stream of a model after every layer; the text is one batch."""
    states, after = States(model, machine, text), []
    for number in range(model.shape.num_hidden_layers):
        if model.family.decoder is not None and number == model.family.decoder.first_layer:
            states.enter_decoder()
        layer = states.layer(number, model.read_layer(number))
        states.defer(lambda x, _, layer=layer: layer.run_all(x))
        [(x, _)] = states.read()
        after.append(x.clone())
    return after


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference ÷ the largest state."""
    return float((ours - theirs.view_as(ours)).abs().max() / theirs.abs().max())


@torch.inference_mode()
def measure(name: str, folder: Path) -> Row:
    """Return the differences of a family; `folder` takes the model and the results."""
    case, source = TABLE[name], folder / "input"
    case.build(**case.options).save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    (folder / "text.txt").write_text(topics(0, 10))
    model, stock = open_model(str(source), folder), load(source)
    text = random_text(model.shape.vocab_size, decoder=model.family.decoder is not None)
    output, theirs = states_after(stock, layers_of(stock, model), inputs_of(text))
    ours = own_states(model, cpu_machine(folder), text)
    row: Row = {"class": type(stock).__name__, "full_width": max(map(relative, ours, theirs))}

    options: dict[str, Any] = {"calibration": str(folder / "text.txt"), "num_sequences": 16, "sequence_length": 32}
    options |= {"batch_size": 16, "device": "cpu", "dtype": "float32", "form": "stock"}
    compress(Config.of(str(source), str(folder / "same"), sparsity=0.0, **options))
    same = load(folder / "same")(**inputs_of(text))
    row["removed_nothing"] = float((same[0] - output[0]).abs().max())
    if model.family.reason_against("self text") is not None:  # examples of many lengths: no batch with all of them
        return row
    with pytest.MonkeyPatch.context() as patch:
        last = keep_last_states(patch)
        config = Config.of(str(source), str(folder / "smaller"), sparsity=SHARE, **options)
        compress(config)
    smaller = load(folder / "smaller")
    _, states = states_after(smaller, layers_of(smaller, model)[-1:], {"input_ids": calibration_tokens(config)})
    return row | {"removed": relative(last[0], states[0])}


def main() -> None:
    """Write a row of every family of the table, or of those that are named."""
    options = parser(__doc__)
    options.add_argument("families", nargs="*", default=list(TABLE))
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.families:
        with tempfile.TemporaryDirectory(prefix="oneshot-") as folder:
            append_row("exactness", provenance(model_type=name) | measure(name, Path(folder)))


if __name__ == "__main__":
    main()
