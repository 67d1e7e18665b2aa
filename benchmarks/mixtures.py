"""Remove a share of the experts' parameters from a mixture: whole experts, or neurons inside every expert.

`train_mixture.py` and `split_mixture.py` make the mixtures. At equal bytes the selectors of whole experts are compared
as published, without any correction, and with corrections in closed form; so are the neurons inside experts. All see
the same tokens. One row for every variant, share and seed goes to `results/mixtures.jsonl`.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from harness import Row, append_row, parser, provenance
from judging import judging_windows, model_losses, score, text_records
from mixture_hope import removed_by_pairs
from mixture_parts import Correction, LayerSums, correct_, load_stock, sums_of_layers, without_parts
from mixture_router import RouterCorrection, correct_router_

import oneshot
from oneshot.compression.expert_scores import ExpertSelector, removed_experts
from oneshot.evaluation import load_model, load_windows
from oneshot.text import load_tokenizer

LENGTH = 512  # tokens of a window
# settings of `oneshot.compress`; `experts`: whole experts go
ENGINE: tuple[Row, ...] = (
    {"correction": "none"},
    {"correction": "same-layer"},
    {},
    {"experts": "reap", "correction": "none"},
    {"experts": "reap"},
    {"experts": "effects"},
    {"form": "per-layer", "ranks": "none", "embedding": "none"},
    {"form": "per-layer", "ranks": "none", "embedding": "none", "curvature": "fisher"},
    {"form": "per-layer"},
    {"form": "per-layer", "experts": "effects", "ffn": "none", "embedding": "none"},
    {"form": "per-layer", "experts": "effects", "ranks": "none", "embedding": "none"},
)
OWN = "own text"  # held out from the text that a mixture was trained on
Selector = ExpertSelector | Literal["hope"]
# corrections of the router, and the shares of their changes that are made
ROUTERS: tuple[tuple[RouterCorrection, float], ...] = (
    ("gain", 1.0),
    ("ideal", 1.0),
    ("newton", 1.0),
    ("kronecker", 1.0),
)


@dataclass(frozen=True)
class Variant:
    """What goes, how it is chosen, and what is corrected.

    Attributes:
        part: `experts` or `neurons`. selector: of experts as `removed_experts`, or `hope`; of neurons `energy`, as
            CAMERA ranks them (2508.02322), or `random`. keep_super: experts with outlying outputs stay.
        router, router_step: as in `correct_router_`.
    """

    part: str
    selector: Selector
    correction: Correction = "none"
    residual_weight: float = 1.0
    keep_super: bool = False
    router: RouterCorrection = "none"
    router_step: float = 1.0


def variants(corrections: Sequence[Correction], residual_weight: float) -> list[Variant]:
    """Return the published selectors, then the corrected ones."""
    published = [Variant("experts", selector) for selector in get_args(ExpertSelector) if selector != "effects"]
    published += [Variant("experts", "hope"), Variant("experts", "effects", keep_super=True)]
    published += [Variant("neurons", "energy"), Variant("neurons", "random")]
    corrected = [
        Variant(part, selector, correction, residual_weight, keep_super=selector == "effects")
        for correction in corrections
        for part, selector in (("experts", "reap"), ("experts", "hope"), ("experts", "effects"), ("neurons", "energy"))
    ]
    return published + corrected


def routed_variants(residual_weight: float, only: Sequence[RouterCorrection] = ()) -> list[Variant]:
    """Return the corrections of the router, with and without the correction of the experts; all if none is named."""
    return [
        Variant("experts", selector, correction, residual_weight, selector == "effects", router, step)
        for correction in ("none", "separable")
        for selector in ("reap", "effects")
        for router, step in ROUTERS
        if not only or router in only
    ]


def kept_experts(variant: Variant, sums: Sequence[LayerSums], share: float, seed: int) -> list[torch.Tensor]:
    """Return the kept experts of every layer."""
    generator = torch.Generator().manual_seed(seed)
    kept = []
    for of_layer in sums:
        num_experts = len(of_layer.experts.tokens)
        num_removed = round(share * num_experts)
        if variant.selector == "hope":
            removed = removed_by_pairs(of_layer.pairs.interactions(), num_removed)
        else:
            removed = removed_experts(
                variant.selector, of_layer.experts, num_removed, generator, keep_super=variant.keep_super
            )
        kept.append(torch.tensor([expert for expert in range(num_experts) if expert not in removed]))
    return kept


def kept_neurons(variant: Variant, sums: Sequence[LayerSums], share: float, seed: int) -> list[torch.Tensor]:
    """Return the kept neurons of every expert of every layer, equally many."""
    generator = torch.Generator().manual_seed(seed)
    kept = []
    for energy in (of_layer.energies for of_layer in sums):
        scores = energy if variant.selector == "energy" else torch.rand(energy.shape, generator=generator)
        kept.append(scores.topk(round((1 - share) * energy.shape[1]), dim=1).indices.sort(dim=1).values)
    return kept


def by_engine(
    model: Path, output: Path, text: torch.Tensor, size: Row, settings: Row, seed: int
) -> tuple[torch.nn.Module, int]:
    """Return the smaller mixture by `oneshot.compress` with the same tokens, and the numbers that it stores."""
    shape = {"num_sequences": len(text), "sequence_length": text.shape[1]}
    options = {"dtype": "float32", "round_to": 8, "overwrite": True, "seed": seed}
    result = oneshot.compress(model, output, calibration=text, **size, **shape, **options, **settings)
    loaded: torch.nn.Module = load_model(output, device=torch.device("cpu"), dtype=torch.float32)
    return loaded, result.report.stored_parameters["compressed"]


def asked_of_engine(settings: Row, dense: torch.nn.Module, share: float) -> tuple[str, str, Row]:
    """Return what goes, how it is chosen, and the size that is asked for, equal in bytes for all settings."""
    named = dict(dense.named_parameters())
    count, _, width = next(one.shape for name, one in named.items() if name.endswith("experts.down_proj"))
    if "experts" in settings and "form" not in settings:
        return "experts", settings["experts"], {"num_experts": round((1 - share) * count), "ffn": "none"}
    if "form" not in settings:
        return "neurons", "pivots", {"intermediate_size": round((1 - share) * width)}
    of_experts = sum(one.numel() for name, one in named.items() if ".experts." in name)
    sparsity = share * of_experts / sum(one.numel() for one in named.values())
    if "experts" in settings:
        part, selector = (
            ("experts", "own counts") if settings.get("ffn") == "none" else ("both", "own counts and widths")
        )
        return part, selector, {"sparsity": sparsity}
    selector = "own widths" if settings.get("ranks") == "none" else "own sizes"
    return "neurons", selector + " by curvature" * ("curvature" in settings), {"sparsity": sparsity}


def texts_of(arguments: argparse.Namespace, tokenizer: Any, scratch: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the windows for calibration, and the windows that models are judged on by kind."""
    beside = {
        part: arguments.model.with_name(f"{arguments.model.name}-{part}.jsonl")
        for part in ("calibration", "evaluation")
    }
    given = beside["calibration"] if beside["calibration"].exists() else arguments.data_dir / "general.jsonl"
    windows = load_windows(str(given), tokenizer, sequence_length=LENGTH, max_windows=None)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(arguments.seed))
    judged = judging_windows(arguments.data_dir, scratch, tokenizer, arguments.max_windows, sequence_length=LENGTH)
    if beside["evaluation"].exists():
        own = load_windows(str(beside["evaluation"]), tokenizer, sequence_length=LENGTH, max_windows=None)
        judged[OWN] = own[: 4 * arguments.max_windows]
    return windows[order[: arguments.num_sequences]], judged


def beside(row: Row, dense: Row) -> Row:
    """Return a row with its ratios to the dense model's perplexities; the score is over kinds of other text."""
    both = [{name: value for name, value in one["perplexity"].items() if name != OWN} for one in (row, dense)]
    ratios = {name: value / dense["perplexity"][name] for name, value in row["perplexity"].items()}
    return row | score(*both) | {"ratios": ratios}


def main() -> None:
    """Measure the variants on one mixture."""
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("model", type=Path, help="what train_mixture.py or split_mixture.py wrote")
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5])
    options.add_argument("--corrections", nargs="*", choices=get_args(Correction), default=["separable", "joint"])
    options.add_argument("--residual-weight", type=float, default=1.0)
    options.add_argument("--only-corrected", action="store_true", help="the other rows are there already")
    options.add_argument(
        "--routers",
        nargs="*",
        choices=get_args(RouterCorrection),
        help="only rows of these corrections of the router, or of all",
    )
    options.add_argument("--selectors", nargs="*", help="only rows of these selectors")
    options.add_argument("--no-engine", dest="engine", action="store_false", help="no rows of `oneshot.compress`")
    options.add_argument("--only-engine", action="store_true", help="only rows of `oneshot.compress`")
    options.add_argument("--num-sequences", type=int, default=64, help=f"of {LENGTH} tokens for calibration")
    options.add_argument("--max-windows", type=int, default=4)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        tokenizer = load_tokenizer(arguments.model)
        dense = load_stock(arguments.model)
        text, windows = texts_of(arguments, tokenizer, Path(scratch))
        sums = [] if arguments.only_engine else sums_of_layers(dense, text)
        of_dense = model_losses(dense, windows)
        named = {"model": arguments.model.name, "seed": arguments.seed, "calibration_tokens": text.numel()}
        named |= {"dense_perplexity": of_dense["perplexity"], "texts": text_records(windows)}
        named |= {"parameters": sum(one.numel() for one in dense.parameters())}
        for share in arguments.shares:
            known = variants(arguments.corrections, arguments.residual_weight)
            if arguments.routers is not None:
                known = routed_variants(arguments.residual_weight, arguments.routers)
            for variant in () if arguments.only_engine else known:
                if arguments.only_corrected and variant.correction == "none":
                    continue
                if arguments.selectors and variant.selector not in arguments.selectors:
                    continue
                experts = kept_experts(variant, sums, share, arguments.seed) if variant.part == "experts" else None
                neurons = kept_neurons(variant, sums, share, arguments.seed) if experts is None else None
                smaller = without_parts(dense, experts, neurons)
                router = partial(correct_router_, how=variant.router, step=variant.router_step)
                correct_(
                    *(smaller, dense, text, variant.correction, variant.residual_weight, experts),
                    None if variant.router == "none" else router,
                )
                row = named | vars(variant) | {"share": share} | beside(model_losses(smaller, windows), of_dense)
                row["kept_parameters"] = sum(one.numel() for one in smaller.parameters())
                append_row("mixtures", provenance(**row))
            for settings in ENGINE if arguments.engine else ():
                part, selector, size = asked_of_engine(settings, dense, share)
                if arguments.selectors and selector not in arguments.selectors:
                    continue
                place = Path(scratch) / "smaller"
                smaller, kept = by_engine(arguments.model, place, text, size, settings, arguments.seed)
                row = named | {"part": part, "selector": selector, "share": share, "settings": settings}
                row["correction"] = f"engine {settings.get('correction', 'two-stream')}"
                row |= beside(model_losses(smaller, windows), of_dense)
                row["kept_parameters"] = kept
                append_row("mixtures", provenance(**row))


if __name__ == "__main__":
    main()
