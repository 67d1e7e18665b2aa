"""Single layers and streams of hidden states against transformers' own forward pass; stores and prefetching."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from arrivals import by_expert
from factories import MakeCheckpoint, build_model, cpu_machine
from families.cases import CASES, variants
from strategies import TOLERANCES
from torch.nn import functional

from oneshot.architecture import Attention, Carried, Experts, FeedForward, Stack, Sublayer
from oneshot.checkpoint import Model, open_model
from oneshot.compression.correction import Factors
from oneshot.compression.fold import fold_sublayer, head_columns
from oneshot.errors import CalibrationError, DeviceError
from oneshot.machine import Store, Workers, resolve_device
from oneshot.machine.transfer import prefetch
from oneshot.stream import ActivationStore, Layer, LayerBuilder, OutputHead, States, Step
from oneshot.stream.memory import memory_of
from oneshot.text import Batch, Text


def batch_of(token_ids: torch.Tensor) -> Batch:
    return Text(token_ids, "a test").batches(len(token_ids))[0]


TOKEN_IDS = torch.randint(0, 400, (3, 24), generator=torch.Generator().manual_seed(1))
VARIANTS = variants()


def open_builder(folder: Path, scratch: Path, **changes: Any) -> tuple[Model, LayerBuilder]:
    model = open_model(str(folder), scratch)
    return model, LayerBuilder(model, cpu_machine(scratch, **changes), TOKEN_IDS.shape[1])


def test_a_text_longer_than_the_positions_is_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = open_model(str(make_checkpoint(family="opt", groups=4)), tmp_path)
    ids = torch.zeros(1, 600, dtype=torch.int64)
    with pytest.raises(CalibrationError, match="512 positions"):
        LayerBuilder(model, cpu_machine(tmp_path), 600).embed(model.read_embedding(), batch_of(ids))


def test_a_token_without_a_row_is_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model, builder = open_builder(make_checkpoint(), tmp_path)
    with pytest.raises(CalibrationError, match="token 400 but the embedding has 400 rows"):
        builder.embed(model.read_embedding(), batch_of(torch.full((1, 24), 400)))


def record_inputs(model: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """Return a dictionary that gets the input of each named module when the model runs."""
    inputs: dict[str, torch.Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: inputs.update({name: args[0].detach().clone()})
        )
    return inputs


def entrance(stack: Stack, sublayer: Sublayer) -> str:
    """Return the first module of a sublayer, which reads the stream; the layer itself before a carried mixer."""
    if isinstance(sublayer.mixer, Carried):
        return ""
    return stack.stored_linear(sublayer.readers[0]) if sublayer.before is None else sublayer.before.name


def assert_experts_equal(layer: Layer, index: int, x: torch.Tensor, experts: Any) -> None:
    """Assert that all tokens arrive with the neurons that the eager loop of the stock class computes."""
    routing = layer.route(index, x)
    assert routing.chosen.shape == routing.gates.shape == (x.shape[0] * x.shape[1], 2)
    seen = torch.zeros_like(routing.chosen)
    for one in by_expert(routing):
        expected = stock_neurons(experts, one.expert, routing.inputs[one.tokens])
        torch.testing.assert_close(one.neurons, expected, rtol=1e-4, atol=1e-4)
        places = routing.chosen[one.tokens] == one.expert
        assert torch.equal(routing.gates[one.tokens][places], one.gates)
        seen[one.tokens] += places.long()
    assert torch.equal(seen, torch.ones_like(seen)), "every token arrives at each of its experts once"
    torch.testing.assert_close(routing.summed(), routing.mixed, rtol=1e-4, atol=1e-4)


def stock_neurons(experts: Any, expert: int, inputs: torch.Tensor) -> torch.Tensor:
    """Return the neurons `(tokens, width)` of one expert, by the weights of the stock class."""
    weight = experts.gate_up_proj[expert]
    if hasattr(experts, "gate_up_proj_bias"):  # gpt-oss: biases, and gate and up by turns
        neurons: torch.Tensor = experts._apply_gate(inputs @ weight + experts.gate_up_proj_bias[expert])
        return neurons
    gate, up = (inputs @ weight.T).chunk(2, dim=1)
    return experts.act_fn(gate) * up


def left_of_gemma4(stock: Any, number: int, total: torch.Tensor) -> torch.Tensor:
    """Return what the stream is after a layer that multiplies it with a number, from the sum of its last sublayer."""
    layer, base = stock.model.layers[number], stock.model
    if layer.hidden_size_per_layer_input:
        embedded = base.embed_tokens(TOKEN_IDS)
        read = base.project_per_layer_inputs(embedded, base.get_per_layer_inputs(TOKEN_IDS, embedded))
        gated = layer.act_fn(layer.per_layer_input_gate(total)) * read[:, :, number]
        total = total + layer.post_per_layer_input_norm(layer.per_layer_projection(gated))
    left: torch.Tensor = total * layer.layer_scalar
    return left


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_sublayers_equal_the_stock_model(variant: str, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Hooks on the stock model give the states before every norm and the inputs of every writer."""
    options = VARIANTS[variant]
    stock = build_model(**options)
    model, builder = open_builder(make_checkpoint(**options), tmp_path)
    stack = model.family.stack
    tolerance = 1e-5 if variant.startswith("opt") else TOLERANCES["float32 layer"]
    assert_close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    assert stack.final_norm is not None
    layers = range(model.shape.num_hidden_layers)
    names = [
        (stack.layer_prefix(layer) + name).rstrip(".")
        for layer in layers
        for sublayer in model.family.stack_of(layer).sublayers  # some layers of mixtures have one FFN
        for name in (entrance(stack, sublayer), sublayer.writer)
    ]
    inputs = record_inputs(stock, [*names, stack.final_norm.name])
    states = stock(TOKEN_IDS, output_hidden_states=True).hidden_states
    # OPT's layers see the tokens as rows
    before = [inputs[name].view_as(states[0]) for name in [*names[::2], stack.final_norm.name]]
    x = builder.embed(model.read_embedding(), batch_of(TOKEN_IDS))
    memory = memory_of(model, cpu_machine(tmp_path), [batch_of(TOKEN_IDS)])
    for number in layers:
        assert_close(x, states[number])
        prefix, layer = stack.layer_prefix(number), builder.layer(number, model.read_layer(number), memory)
        assert_close(layer.run_all(x), before[stack.position(number + 1)])
        for index, sublayer in enumerate(model.family.stack_of(number).sublayers):
            position = stack.position(number, index)
            assert_close(x, before[position])
            total, base = layer.sum(index, x), layer.base(index, x)
            moved = layer.moved(index, x, total)
            assert_close(moved, before[position + 1])
            after = layer.run(index, x)
            is_scaled = stack.layer_scale is not None and index == len(stack.sublayers) - 1
            left = left_of_gemma4(stock, number, total) if is_scaled else total
            if stack.token_inputs is None:
                assert torch.equal(layer.leave(index, total), left), "no norm follows the sum"
            else:
                assert_close(layer.leave(index, total), left)
            assert torch.equal(after, moved)
            assert stack.parallel or (base is x and (is_scaled or moved is total))
            if isinstance(sublayer.mixer, Experts):
                assert_experts_equal(layer, index, x, stock.get_submodule(prefix + sublayer.mixer.experts))
            if isinstance(sublayer.mixer, Experts | Carried):
                x = after
                continue
            inner = layer.inner(index, x)
            expected = inputs[prefix + sublayer.writer].flatten(0, -2)
            torch.testing.assert_close(inner, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(base + layer.added(index, layer.write(index, inner)).view_as(x), total)
            x = after
    head = builder.output_head()
    assert_close(head.norm(x) / model.head_scale, states[-1])
    assert torch.equal(head.weight, stock.get_output_embeddings().weight)


def assert_queries_and_keys_equal(
    ours: tuple[torch.Tensor, torch.Tensor], outputs: dict[str, torch.Tensor], attention: Attention, stack: Stack
) -> None:
    """Assert that queries and keys before their norms and rotation are what the stock linears write."""
    queries, keys = ours
    if attention.q in outputs:
        expected = outputs[attention.q], outputs[attention.k]
    else:
        together = outputs[stack.stored_linear(attention.q)]
        if stack.fused_heads:
            together = together.unflatten(-1, (stack.fused_heads, 3, -1)).transpose(-3, -2).flatten(-3)
        expected = together[..., : queries.shape[1]], together[..., queries.shape[1] :][..., : keys.shape[1]]
    for rows, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(rows, theirs.flatten(0, -2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_parts_of_sublayers_equal_the_stock_modules(
    variant: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Queries and keys before their norms and rotation, and the gates, against outputs of the stock linears."""
    options = VARIANTS[variant]
    stock = build_model(**options)
    model, builder = open_builder(make_checkpoint(**options), tmp_path)
    numbers = (one for one in range(model.shape.num_hidden_layers) if model.family.stack_of(one).attentions)
    number = next(numbers, 0)  # the first one of them with attention of its own
    stack = model.family.stack_of(number)
    outputs: dict[str, torch.Tensor] = {}
    for name, module in stock.get_submodule(f"{stack.layers}.{number}").named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: output}))
    x = stock(TOKEN_IDS, output_hidden_states=True).hidden_states[number]
    layer, ffn = builder.layer(number, model.read_layer(number)), stack.feed_forward
    for attention in stack.attentions:
        assert_queries_and_keys_equal(layer.queries_keys(stack.index_of("heads"), x), outputs, attention, stack)
    if isinstance(ffn, FeedForward) and ffn.gate is not None:
        index = stack.index_of("ffn")
        attended = layer.run(0, x)
        normed, gates = layer.gates(index, attended)
        norm = stack.sublayers[index].before
        read = attended if norm is None else outputs[norm.name]
        torch.testing.assert_close(normed, read.flatten(0, -2), rtol=1e-4, atol=1e-4)
        known = ffn.activation
        theirs = outputs[known] if isinstance(known, str) else known(outputs[ffn.gate])
        torch.testing.assert_close(gates, theirs.flatten(0, -2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "index", "units"),
    [
        ({}, 1, [1, 5, 30]),
        ({"mlp_bias": True}, 1, [0, 63]),
        ({"family": "opt", "groups": 4}, 1, [1, 5, 30]),
        ({}, 0, [2, 3]),  # a whole KV group
        ({"attention_bias": True}, 0, [0, 3]),  # one head of each group
        ({"family": "qwen3", "head_dim": 16}, 0, [1, 2]),
        # numbers of heads that do not divide the hidden size, which these config classes refuse
        *(
            (options | {"groups": 4}, 0, [0, 2, 3])
            for family in ("llama", "arcee", "cwm", "gemma2", "gemma3_text")
            for options in (CASES[family].options, CASES[family].options | {"attention_bias": True})
        ),
        ({"groups": 4, "mlp_bias": True}, 0, [0, 2, 3]),
    ],
    ids=str,
)
@torch.inference_mode()
def test_narrow_layers_equal_layers_with_silent_columns(
    options: dict[str, Any], index: int, units: list[int], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A builder makes layers of any width; the removed columns of the full layer's writer are zeros."""
    model, builder = open_builder(make_checkpoint(**options), tmp_path)
    sublayer, tensors = model.family.stack.sublayers[index], model.read_layer(0)
    weight, columns = tensors[f"{sublayer.writer}.weight"], torch.tensor(units)
    if sublayer.kind == "heads":
        columns = head_columns(columns, model.shape.head_dim)
    silent = torch.zeros_like(weight)
    silent[:, columns] = weight[:, columns]
    kept, new_weight = columns, weight[:, columns].double()
    bias = tensors.get(f"{sublayer.writer}.bias")
    if bias is not None:
        kept = torch.cat((columns, torch.tensor([weight.shape[1]])))
        new_weight = torch.cat((new_weight, bias.double().unsqueeze(1)), dim=1)
    narrow = builder.layer(0, fold_sublayer(tensors, sublayer, model.shape, Factors(kept, new_weight)))
    full = builder.layer(0, tensors | {f"{sublayer.writer}.weight": silent})
    x = torch.randn(2, 24, 32)
    assert narrow.inner(index, x).shape == (48, len(columns))
    torch.testing.assert_close(narrow.inner(index, x), full.inner(index, x)[:, columns], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(narrow.run_all(x), full.run_all(x), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_the_sliding_window_matters_here(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Without this the window variant above could pass with no window at all."""
    outputs = []
    for window in (7, None):
        model, builder = open_builder(make_checkpoint(family="mistral", sliding_window=window), tmp_path)
        layer = builder.layer(0, model.read_layer(0))
        outputs.append(layer.run(0, torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(2))))
    torch.testing.assert_close(outputs[0][:, :7], outputs[1][:, :7])
    assert float((outputs[0] - outputs[1])[:, 7:].abs().max()) > 1e-3


@torch.inference_mode()
def test_a_bfloat16_stream_is_near_the_float32_one(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    x = torch.randn(2, 24, 32)
    results: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        model, builder = open_builder(make_checkpoint(), tmp_path, dtype=dtype)
        results.append(builder.layer(0, model.read_layer(0)).run_all(x.to(dtype)))
    assert results[1].dtype == torch.bfloat16
    assert 0 < float((results[0] - results[1]).norm() / results[0].norm()) < 0.02


def test_layers_hold_no_gradients(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model, builder = open_builder(make_checkpoint(), tmp_path)
    assert not builder.layer(0, model.read_layer(0)).run_all(torch.randn(1, 24, 32)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("store", get_args(Store))
def test_stores_return_the_same_bits(store: Store, dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(5, 3, 4).to(dtype)
    values[0, 0] = torch.tensor([torch.inf, -0.0, torch.nan, 1e-38])
    machine = cpu_machine(tmp_path, dtype=dtype, store=store)
    first, second = (ActivationStore(15, 4, machine) for _ in range(2))
    order = [slice(0, 2), slice(2, 4), slice(4, 5)]
    rows = {batch.start: slice(3 * batch.start, 3 * batch.stop) for batch in order}
    for batch in reversed(order):
        first.write(rows[batch.start], values[batch])
        second.write(rows[batch.start], values[batch] + 1)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for batch in order:
        read = first.read(rows[batch.start]).view(-1, 3, 4)
        assert read.dtype == dtype
        assert torch.equal(read.view(bits), values[batch].contiguous().view(bits))
        read.zero_()  # a copy, so the store does not change
    assert torch.equal(first.read(rows[0]).view(-1, 3, 4).view(bits), values[:2].contiguous().view(bits))
    assert not list(tmp_path.iterdir())  # a file without a name: nothing stays behind, not even after SIGKILL
    first.close()
    second.close()


SEQUENCES = torch.randint(0, 400, (7, 24), generator=torch.Generator().manual_seed(3))


def make_states(folder: Path, scratch: Path, **options: Any) -> tuple[Model, States]:
    """Return states of seven sequences in batches of two."""
    workers = options.pop("workers", Workers())
    model = open_model(str(folder), scratch)
    machine = cpu_machine(scratch, batch_size=2, workers=workers)
    return model, States(model, machine, Text(SEQUENCES, "text"), **options)


def read_all(states: States) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return both whole streams."""
    compressed, dense = zip(*states.read(), strict=True)
    return torch.cat(compressed), torch.cat(dense) if states.has_dense else None


def step_through(layer: Layer, index: int) -> Step:
    return lambda x, _: layer.run(index, x)


def all_of(layer: Layer) -> Step:
    return lambda x, _: layer.run_all(x)


@pytest.mark.parametrize("options", [{"layers": 3}, {"family": "opt", "groups": 4, "layers": 3}], ids=str)
@torch.inference_mode()
def test_deferred_steps_move_both_streams(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The dense stream equals the stock model's states; the compressed one passes other weights and embeddings."""
    stock = build_model(**options)
    model, states = make_states(make_checkpoint(**options), tmp_path, dense_every=1)
    other_embedding = model.read_embedding() + 0.1
    states.close()
    _, states = make_states(make_checkpoint(**options), tmp_path, dense_every=1, compressed_embedding=other_embedding)
    writers = [f"{sublayer.writer}.weight" for sublayer in model.family.stack.sublayers]
    hidden = stock(SEQUENCES, output_hidden_states=True).hidden_states
    stock.get_input_embeddings().weight.copy_(other_embedding)
    for layer in stock.get_submodule(model.family.stack.layers):
        for name in writers:
            layer.get_parameter(name).mul_(0.5)
    other_hidden = stock(SEQUENCES, output_hidden_states=True).hidden_states
    for number in range(2):
        compressed, dense = read_all(states)
        torch.testing.assert_close(compressed, other_hidden[number], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dense, hidden[number], rtol=1e-4, atol=1e-4)
        tensors = model.read_layer(number)
        dense_layer = states.builder.layer(number, tensors)
        layer = states.builder.layer(number, tensors | {name: 0.5 * tensors[name] for name in writers})
        for index in range(len(model.family.stack.sublayers)):
            states.defer(step_through(layer, index))
            states.defer_dense(step_through(dense_layer, index))
            if number:
                states.settle()
    compressed, dense = read_all(states)
    torch.testing.assert_close(compressed, other_hidden[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dense, hidden[2], rtol=1e-4, atol=1e-4)
    last, last_dense = states.read_judged()
    assert torch.equal(last, compressed[6:])
    assert last_dense is not None
    assert dense is not None
    assert torch.equal(last_dense, dense[6:])
    states.close()


@pytest.mark.parametrize("store", get_args(Store))
@torch.inference_mode()
def test_each_stream_keeps_the_keys_that_later_layers_read(
    store: Store, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The dense stream has every second batch. A pass that is made again, or of some batches, changes nothing."""
    options = VARIANTS["gemma4_text-tokens"]
    stock, model = build_model(**options), open_model(str(make_checkpoint(**options)), tmp_path)
    machine = cpu_machine(tmp_path, batch_size=2, store=store)
    states = States(model, machine, Text(SEQUENCES, "text"), dense_every=2)
    writer = f"{model.family.stack.ffn.down}.weight"
    hidden: list[torch.Tensor] = []
    stock.model.norm.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].clone()))
    stock(SEQUENCES)
    for layer in stock.model.layers:
        layer.get_parameter(writer)[:, ::2] = 0
    stock(SEQUENCES)
    for number in range(model.shape.num_hidden_layers):
        tensors = model.read_layer(number)
        narrow = tensors | {writer: tensors[writer].clone()}
        narrow[writer][:, ::2] = 0
        states.defer(all_of(states.layer(number, narrow)))
        states.defer_dense(all_of(states.dense_layer(number, tensors)))
        list(states.read(again=True))
        states.settle()
        list(states.read(2))
    compressed, dense = zip(*states.read(), strict=True)
    torch.testing.assert_close(torch.cat(compressed), hidden[1], rtol=1e-4, atol=1e-4)
    kept = torch.cat([one for one in dense if one is not None])
    torch.testing.assert_close(kept, torch.cat((hidden[0][:2], hidden[0][4:6])), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(hidden[0], hidden[1], rtol=1e-2)
    assert not list(tmp_path.iterdir())
    states.close()


def test_steps_run_once_and_know_the_last_batch(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Steps that are deferred during a pass wait for the next pass."""
    _, states = make_states(make_checkpoint(), tmp_path)
    calls: list[tuple[str, int, bool]] = []

    def step(name: str) -> Any:
        def add_one(x: torch.Tensor, is_judged: bool) -> torch.Tensor:
            calls.append((name, len(x), is_judged))
            return x + 1

        return add_one

    start, dense = read_all(states)
    assert dense is None
    states.defer(step("first"))
    states.defer(step("second"))
    states.defer_dense(step("dense"))  # there is no dense stream
    for number, (x, _) in enumerate(states.read()):
        torch.testing.assert_close(x, start[2 * number : 2 * number + 2] + 2)
        if number == 0:
            states.defer(step("third"))
    expected = [
        (name, size, is_judged)
        for size, is_judged in ((2, False), (2, False), (2, False), (1, True))
        for name in ("first", "second")
    ]
    assert calls == expected
    states.settle()
    assert [call for call in calls if call not in expected] == [
        ("third", 2, False),
        ("third", 2, False),
        ("third", 2, False),
        ("third", 1, True),
    ]
    states.settle()
    assert len(calls) == 12
    torch.testing.assert_close(read_all(states)[0], start + 3)


@torch.inference_mode()
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_dense_stream_may_have_every_nth_batch(size: int, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Batches 0 and 2 of four have it, whoever reads them; errors are measured on the last of them."""
    folder = make_checkpoint()
    _, whole = make_states(folder, tmp_path)
    start, _ = read_all(whole)
    found = []
    for rank in range(size):
        _, states = make_states(folder, tmp_path, workers=Workers(rank, size), dense_every=2)
        assert states.dense_share == 4 / 7
        numbers = range(states.first_batch, states.first_batch + len(list(states.read())))
        with_dense = [number for number in numbers if number % 2 == 0]
        assert states.has_dense == bool(with_dense)
        judged: list[bool] = []
        states.defer(lambda x, is_judged, judged=judged: (judged.append(is_judged), x + 1)[1])  # type: ignore[misc]
        states.defer_dense(lambda x, _: x + 2)
        found += list(states.read())
        assert [number for number, is_judged in zip(numbers, judged, strict=True) if is_judged] == (
            with_dense or list(numbers)
        )[-1:]
        x, dense = states.read_judged()
        assert (dense is not None) == states.has_dense
        if dense is not None:
            torch.testing.assert_close(dense, x + 1)
    assert [dense is not None for _, dense in found] == [True, False, True, False]
    torch.testing.assert_close(torch.cat([x for x, _ in found]), start + 1)
    dense_batches = [dense for _, dense in found if dense is not None]
    torch.testing.assert_close(torch.cat(dense_batches), start[[0, 1, 4, 5]] + 2)


def test_only_every_nth_batch_is_read(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    _, states = make_states(make_checkpoint(), tmp_path)
    start, _ = read_all(states)
    read = [x for x, _ in states.read(every=2)]
    assert torch.equal(torch.cat(read), start[[0, 1, 4, 5]])
    assert states.share_read(2) == 4 / 7
    assert states.share_read(1) == 1


def test_progress_counts_tokens_divided_by_passes(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    counted: list[float] = []
    _, states = make_states(make_checkpoint(), tmp_path, advance=counted.append)
    states.passes = 4
    states.settle()
    assert counted == [2 * 24 / 4] * 3 + [24 / 4]


def test_workers_share_the_sequences(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    _, whole = make_states(make_checkpoint(), tmp_path)
    parts, first_rows = [], []
    for rank in range(3):
        _, states = make_states(make_checkpoint(), tmp_path, workers=Workers(rank, 3))
        assert states.num_tokens == 7 * 24
        first_rows.append(states.first_row)
        parts.append(read_all(states)[0])
    assert torch.equal(torch.cat(parts), read_all(whole)[0])
    assert first_rows == [0, 4 * 24, 6 * 24]


def test_prefetch_keeps_the_order_and_loads_one_ahead() -> None:
    started = [threading.Event() for _ in range(4)]
    here = threading.get_ident()
    threads = set()

    def load(index: int) -> int:
        threads.add(threading.get_ident())
        started[index].set()
        return index * 10

    values = []
    for index, value in enumerate(prefetch(load, 4)):
        if index < 3:
            assert started[index + 1].wait(timeout=10), "the next one is loaded while this one is worked on"
        assert not any(event.is_set() for event in started[index + 2 :]), "no more than one is held ahead"
        values.append(value)
    assert values == [0, 10, 20, 30]
    assert here not in threads


def test_prefetch_passes_errors_on() -> None:
    def load(index: int) -> int:
        if index == 1:
            raise KeyError("damaged")
        return index

    results = prefetch(load, 3)
    assert next(results) == 0
    with pytest.raises(KeyError, match="damaged"):
        next(results)


def test_prefetch_stops_its_thread_when_the_caller_fails() -> None:
    def consume() -> None:
        for _ in prefetch(lambda index: index, 3):
            raise RuntimeError

    before = set(threading.enumerate())  # also of tests whose generators are not collected yet
    with pytest.raises(RuntimeError):
        consume()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "meta", "cpu:x"])
def test_missing_devices_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=name):
        resolve_device(name)


def test_auto_takes_cuda_if_torch_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    is_available: Callable[[], bool]
    for is_available, expected in ((lambda: False, "cpu"), (lambda: True, "cuda")):
        monkeypatch.setattr("torch.cuda.is_available", is_available)
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        assert resolve_device("auto").type == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distance", [0.0, 1e-2, 1.0])
def test_divergences_equal_those_of_whole_softmaxes(
    distance: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against log-softmaxes of whole rows in float64; the vocabulary is not a multiple of a panel."""
    monkeypatch.setattr("oneshot.stream.output_head.VOCABULARY_PANEL", 64)
    generator = torch.Generator().manual_seed(2)
    dense = torch.randn(7, 32, generator=generator).to(dtype)
    other = (dense + distance * torch.randn(7, 32, generator=generator)).to(dtype)
    head = OutputHead(torch.nn.LayerNorm(32, dtype=dtype), torch.randn(150, 32, generator=generator).to(dtype))

    def log_softmax(x: torch.Tensor) -> torch.Tensor:
        return (head.norm(x).double() @ head.weight.double().T).log_softmax(-1)

    with torch.no_grad():
        expected = functional.kl_div(log_softmax(other), log_softmax(dense), log_target=True, reduction="none").sum(-1)
        torch.testing.assert_close(
            head.divergence(head.prediction(dense), other).double(), expected, rtol=1e-4, atol=2e-5
        )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_workers_share_whole_batches(size: int, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Seven sequences in batches of two are four batches, for any number of workers; then some have none."""
    folder = make_checkpoint()
    shares = [make_states(folder, tmp_path, workers=Workers(rank, size))[1] for rank in range(size)]
    assert [len(x) for states in shares for x, _ in states.read()] == [2, 2, 2, 1]
    for every in (2, 3):
        everything = [x for x, _ in make_states(folder, tmp_path)[1].read(every)]
        found = [x for states in shares for x, _ in states.read(every)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, everything, strict=True))
    for states in shares:
        length = SEQUENCES.shape[1]
        has_text = states.part.start < states.part.stop
        assert states.first_row == (length * states.part.start if has_text else 0)
        assert (states.read_judged()[0] is None) == (not has_text)
        assert torch.equal(torch.arange(7)[states.part], torch.arange(states.part.start, states.part.stop))
