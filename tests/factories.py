"""Shared by fixtures and tests: types of factories, help topics, tiny models of the stock classes."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from oneshot.config import Config, Target
from oneshot.machine import ALONE, Machine, Workers
from oneshot.method import Method
from oneshot.planning import Budget, Damages, Grid, Problem
from oneshot.text import load_text, load_tokenizer
from oneshot.text.kinds import PROBED

GPT2_SIZES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "num_key_value_heads": "",
}
# sizes that families call otherwise; "": they have none
RENAMED_SIZES: dict[str, dict[str, str]] = {
    "falcon": {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": ""},
    "gpt2": GPT2_SIZES,
    "gpt_bigcode": GPT2_SIZES,
    "gpt_neox": {"num_key_value_heads": ""},
}
ENCODERS = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra", "modernbert")
MakeCheckpoint = Callable[..., Path]
MakeConfig = Callable[..., Config]
MakeResult = Callable[..., Path]
Fails = Callable[..., str]


def topics(start: int = 0, stop: int | None = None) -> str:
    """Return Python's help topics in a fixed order: text that every machine has."""
    from pydoc_data.topics import topics as texts

    return "\n\n".join(texts[name] for name in sorted(texts)[start:stop])


def small_config(checkpoint: Path, text: Path, *, output: Path | str, **changes: Any) -> Config:
    """Make a `Config` from flat options: small settings, and sparsity 0.2 unless a target is given."""
    options: dict[str, Any] = {
        "calibration": str(text),
        "num_sequences": 16,
        "sequence_length": 32,
        "batch_size": 16,
        "device": "cpu",
        "dtype": "float32",
    }
    if changes.get("recipe", "oneshot") == "oneshot":
        options["form"] = "stock"  # no profile
    stated = {"parameters", "hidden_size", "value_size", "query_key_size", "hidden_rate", "inner_rate"}
    if not changes.keys() & stated:
        options["sparsity"] = 0.2
    return Config.of(str(checkpoint), str(output), **options | changes)


def small_arguments(checkpoint: Path, output: Path, text: Path) -> list[str]:
    """Return the arguments of a small compression for the command line."""
    options = ["--sparsity=0.2", "--num-sequences=4", "--sequence-length=16", "--device=cpu", "--dtype=float32"]
    return [str(checkpoint), f"--output={output}", f"--calibration={text}", "--form=stock", *options]


def tiny_tokenizer() -> Any:
    """Return a byte-level BPE of 400 tokens, trained on help topics."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics(0, 20)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def calibration_tokens(config: Config) -> torch.Tensor:
    """Return the token sequences that a run with this config reads, `(num_sequences, sequence_length)`."""
    return load_text(
        config.text.calibration,
        load_tokenizer(Path(config.checkpoint)),
        num_sequences=config.text.num_sequences,
        sequence_length=config.text.sequence_length,
        seed=config.seed,
    ).token_ids


def profiled_tokens(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences that a decoder's profile has its statistics of, and the sequences that are its probes.

    Probes are halves of the text's last sequences, and beginnings of the built-in texts of other kinds, as long.
    """
    tokens, tokenizer = calibration_tokens(config), load_tokenizer(Path(config.checkpoint))
    own, length = max(1, min(2, len(tokens) // 8)), tokens.shape[1] // 2
    rows = [json.loads(line) for line in PROBED.read_text().splitlines()]
    kinds = [tokenizer(row["text"])["input_ids"][:length] for row in rows]
    assert {len(ids) for ids in kinds} == {length}
    return tokens[:-own], torch.cat((tokens[-own:].reshape(-1, length), torch.tensor(kinds)))


def cpu_machine(scratch: Path, *, batch_size: int = 16, workers: Workers = ALONE, **changes: Any) -> Machine:
    """Return a machine that computes in float32 on the CPU."""
    settings: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32} | changes
    return Machine(scratch=scratch, batch_size=batch_size, workers=workers, **settings)


def problem_of(
    grid: Grid, target: float, damages: Damages | None = None, *, round_to: int | None = None, **method: Any
) -> Problem:
    """Return what a planner is asked: so many stored parameters, by a method that reduces FFNs unless it says else."""
    asked = Method(**{"ffn": "id", "heads": "none", "correction": "two-stream"} | method)
    return Problem(grid, asked, Target(sparsity=0.1, round_to=round_to), Budget(target), damages)


def alternate_(model: Any) -> Any:
    """Give tokens with even and with odd numbers rows in other coordinates, and return the model.

    So tokens move to ranges of their own kind where an embedding gets ranks.
    """
    rows = model.get_input_embeddings().weight.data
    for kind in (0, 1):
        rows[kind::2, kind::2] = 0
    return model


def silence(model: Any, *, attention: Sequence[int] = (), ffn: Sequence[int] = ()) -> None:
    """Let attention or the FFN of these layers of a Llama or an OPT add nothing to the residual stream."""
    layers = getattr(model.model, "decoder", model.model).layers
    linears = [
        getattr(layers[number].self_attn, "o_proj", None) or layers[number].self_attn.out_proj for number in attention
    ]
    linears += [
        layers[number].mlp.down_proj if hasattr(layers[number], "mlp") else layers[number].fc2 for number in ffn
    ]
    for linear in linears:
        torch.nn.init.zeros_(linear.weight)
        if linear.bias is not None:
            torch.nn.init.zeros_(linear.bias)


def assert_cache_changes_nothing(model: Any, tokens: int, **inputs: Any) -> None:
    """Assert that a model writes so many tokens greedily with a cache as without one."""
    written = [
        model.generate(**inputs, max_new_tokens=tokens, do_sample=False, use_cache=cached) for cached in (True, False)
    ]
    assert torch.equal(*written)


def stored_numbers(model: Any) -> int:
    """Return the numbers that a model stores: parameters, and buffers that its checkpoints have."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = sum(tensor.numel() for name, tensor in model.state_dict().items() if name not in parameters)
    return buffers + sum(parameter.numel() for parameter in model.parameters())


def build_model(
    family: str = "llama",
    *,
    hidden: int = 32,
    width: int = 64,
    heads: int = 4,
    groups: int = 2,
    layers: int = 2,
    vocabulary: int = 400,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    sliding_window: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    model_class: str = "AutoModelForCausalLM",
    **extra: Any,
) -> Any:
    """Return a random model of a stock class; every parameter, also of norms and biases, changes its output.

    `model_class`: of transformers, an auto class or one of the family.
    """
    import transformers
    from transformers import AutoConfig

    sizes = dict(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        **extra,
    )
    if family == "llama" or attention_bias or mlp_bias:
        sizes |= {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
    if family == "mistral" or sliding_window is not None:
        sizes |= {"sliding_window": sliding_window}
    if family == "opt":
        sizes = {"dropout": 0.0, "ffn_dim": sizes.pop("intermediate_size")} | sizes
        del sizes["num_key_value_heads"]
    if family in ("gpt2", "gpt_bigcode"):
        sizes = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} | sizes
    if family in ENCODERS:
        del sizes["num_key_value_heads"]
        sizes |= {"max_position_embeddings": 64}
    if family == "electra":
        sizes |= {"embedding_size": hidden}
    if family == "distilbert":
        names = {
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
        }
        sizes = {names.get(name, name): size for name, size in sizes.items()}
    sizes = {RENAMED_SIZES.get(family, {}).get(name, name): size for name, size in sizes.items()}
    sizes.pop("", None)
    config, chosen = AutoConfig.for_model(family, **sizes), getattr(transformers, model_class)
    model: Any = chosen.from_config(config) if model_class.startswith("Auto") else chosen(config)
    return randomise(model, seed).to(dtype).eval()


def randomise(model: Any, seed: int) -> Any:
    """Return the model with seeded random parameters: norms around one, small biases, linears by their width."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.lower().endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "positions.weight")):
                parameter.copy_(1 + 0.1 * noise)
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, tensor in model.state_dict().items():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
            elif name.endswith("layer_scalar"):
                tensor.copy_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
    return model


def module_of_the_plugin(name: str) -> Any:
    """Import a file of the plugin, which is not installed here."""
    path = Path(__file__).parents[1] / "vllm-plugin" / "oneshot_vllm" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_of_the_plugin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
