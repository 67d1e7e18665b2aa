"""The verdict on a mixture from one profile, beside plans of the same sizes, and the order of its experts."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, small_config
from families.cases import CASES, variants

from oneshot.checkpoint import open_model
from oneshot.cli.main import main
from oneshot.compression.expert_scores import ExpertSums
from oneshot.errors import PlanError
from oneshot.export.stock import StockForm
from oneshot.linalg.expert_sets import removal_order
from oneshot.pipeline import compress, predict, profile
from oneshot.planning import Profile, mixture_verdict, profiled_damages
from oneshot.planning.mixture import MixtureSize, MixtureVerdict
from oneshot.profiling import load_profile, ranking_lines
from oneshot.profiling.expert_counts import expert_order
from oneshot.report.mixture import verdict_record

OPTIONS = CASES["qwen3_moe"].options | {"num_experts": 6}


@pytest.mark.parametrize("seed", range(3))
def test_experts_go_one_by_one_where_each_adds_least(seed: int) -> None:
    """Against brute force on effects that cancel each other; super experts go last, and errors never fall again."""
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = torch.tensor([False, False, True, False, False, False])
    order, changes = removal_order(rows @ rows.T, kept=kept)
    gone = list[int]()
    for expert, change in zip(order.tolist(), changes.tolist(), strict=True):
        left = [one for one in range(6) if one not in gone and (one != 2 or len(gone) == 5)]
        with_each = {one: float(rows[[*gone, one]].sum(0).square().sum()) for one in left}
        assert change == pytest.approx(min(with_each.values()))
        assert with_each[expert] == pytest.approx(change)
        gone.append(expert)
    assert gone[-1] == 2
    sums = ExpertSums(6)
    sums.effects, sums.peaks = rows @ rows.T, torch.where(kept, 100.0, 1.0)
    most_needed, errors = expert_order(sums)
    assert most_needed.tolist() == gone[::-1]
    assert (errors.diff() <= 0).all()
    assert float(errors[-1]) == pytest.approx(float(changes[0]))


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(**OPTIONS)


@pytest.fixture(scope="module")
def made(folder: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile, Any, str]:
    """Return the folder of a profile that the command made, the profile, its config, and what was printed."""
    output, shown = tmp_path_factory.mktemp("mixture") / "profile", io.StringIO()
    arguments = ["profile", str(folder), "-o", str(output), "--calibration", str(text_file), "--batch-size", "16"]
    arguments += ["--num-sequences", "16", "--sequence-length", "32", "--device", "cpu", "--dtype", "float32"]
    with contextlib.redirect_stdout(shown):
        assert main([*arguments, "--set", "curvature=none"]) == 0
    config = small_config(folder, text_file, curvature="none", output=output)
    return output, load_profile(output), config, shown.getvalue()


def test_the_verdict_is_what_plans_of_the_same_size_lose(folder: Path, made: tuple[Path, Profile, Any, str]) -> None:
    """At every number of experts, and at widths on both sides of its size; the file and the report have the same."""
    output, measured, config, shown = made
    grid = StockForm().grid(open_model(str(folder), output))
    verdict, shape = mixture_verdict(grid, measured), grid.shape
    assert verdict is not None
    damages = profiled_damages(measured, "sensitivity", grid)
    layers, whole = shape.num_hidden_layers, shape.stack().stored_parameters()
    one_expert, one_neuron = 3 * 32 * shape.hidden_size + shape.hidden_size, 3 * shape.hidden_size * 6
    assert [size.num_experts for size in verdict.sizes] == [5, 4, 3, 2]
    for size in verdict.sizes:
        gone = layers * (6 - size.num_experts) * one_expert
        assert size.removed == pytest.approx(gone / whole)
        assert size.fewer == pytest.approx(
            sum(float(damages["num_experts"][layer, size.num_experts]) for layer in range(layers))
        )
        assert size.intermediate_size == pytest.approx(32 - gone / (layers * one_neuron))
        around = [int(size.intermediate_size // 8) * 8, -int(-size.intermediate_size // 8) * 8]
        most, least = (float(damages["ffn"][:, width].sum()) for width in around)
        assert least <= size.narrower <= most
    stated = json.loads((output / "mixture.json").read_bytes())
    assert [size["fewer"]["nats"] for size in stated["sizes"]] == [size.fewer for size in verdict.sizes]
    assert stated["sentences"][-1].startswith("Open: no large mixture was measured.")
    words = " ".join(shown.split())
    assert "5 of 6" in words
    assert all(sentence in words for sentence in stated["sentences"])
    planned = replace(config, profile=str(output), output=str(output.parent / "out"), form="per-layer")
    report = compress(planned)
    assert report.mixture == stated
    page = (output.parent / "out" / "report.html").read_text()
    assert stated["sentences"][0] in page
    assert json.loads((output.parent / "out" / "oneshot_report.json").read_bytes())["mixture"] == stated


def test_no_expert_goes_where_a_token_passes_all(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """A profile measures the neurons alone, and a selector of experts is refused in every form."""
    folder = make_checkpoint(**OPTIONS | {"num_experts": 2, "num_experts_per_tok": 2, "layers": 1})
    measured = profile(make_config(folder, curvature="none", num_sequences=2))
    assert measured.ffn_sensitivity.any()
    assert not measured.expert_sensitivity.any()
    for form in ("stock", "per-layer"):
        with pytest.raises(PlanError, match="passes all 2 experts"):
            predict(make_config(folder, experts="effects", form=form, output="out"))


def test_what_is_cheaper_has_a_margin() -> None:
    size = MixtureSize(removed=0.1, num_experts=5, intermediate_size=24.0, fewer=0.1, narrower=0.2)
    assert size.cheaper == "fewer"
    assert replace(size, fewer=0.3).cheaper == "narrower"
    assert replace(size, fewer=0.199).cheaper == "equal"


@pytest.mark.parametrize(
    ("cheaper", "said"),
    [
        ("", "not compared"),
        ("==", "lose the same"),
        ("n=n", "Narrower experts are predicted to lose less at every stored size"),
        ("nff", "narrower experts are predicted to lose less, but fewer ones from −20% on"),
        ("nfn", "more than once"),
        ("nfnf", "more than once"),
    ],
)
def test_what_is_cheaper_is_said_of_all_sizes(cheaper: str, said: str) -> None:
    losses = {"n": (0.2, 0.1), "f": (0.1, 0.2), "=": (0.1, 0.1)}
    sizes = tuple(
        MixtureSize(0.1 * number, 9 - number, 40.0 - number, *losses[one]) for number, one in enumerate(cheaper, 1)
    )
    verdict = MixtureVerdict(9, 2, 40, sizes, {"0.01": {"narrower": 0.0, "fewer": 0.2}}, unseen=0, routed=18)
    first, second, *_ = verdict_record(verdict)["sentences"]
    assert said in first
    assert "nothing may go by narrower experts, or −20.0% by fewer." in second


def test_the_order_of_the_experts_has_a_line_for_each_layer(made: tuple[Path, Profile, Any, str]) -> None:
    """Scores fall, and the least needed expert's is its own effect times the layer's sensitivity."""
    output, measured, _, shown = made
    lines = [json.loads(line) for line in (output / "experts.jsonl").read_text().splitlines()]
    assert [line["layer"] for line in lines] == [0, 1]
    for line in lines:
        assert sorted(line["experts"]) == list(range(6))
        assert line["scores"] == sorted(line["scores"], reverse=True)
        alone = measured.expert_sensitivity[line["layer"]] * measured.expert_errors[line["layer"], 5]
        assert line["scores"][-1] == pytest.approx(float(alone))
        assert sum(line["tokens"]) == sum(lines[0]["tokens"]) > 0
        assert line["measured"]["model_hash"] == measured.origin.model_hash
    assert str(output / "experts.jsonl") in "".join(shown.split())


def test_layers_without_experts_have_no_line(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_checkpoint(**variants()["qwen3_moe-mixed"])
    measured = profile(make_config(folder, curvature="none", output=str(tmp_path / "profile")))
    lines = (tmp_path / "profile" / "experts.jsonl").read_text().splitlines()
    assert [json.loads(line)["layer"] for line in lines] == [0, 2]
    assert (measured.expert_tokens[1] == 0).all()
    unmeasured = replace(measured, expert_sensitivity=torch.zeros(3, dtype=torch.float64))
    assert ranking_lines(unmeasured) == []
    assert mixture_verdict(StockForm().grid(open_model(str(folder), tmp_path)), unmeasured) is None
