"""More processes than batches of text: those without text add nothing, and results have the bytes of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES
from worker_threads import run_in_threads

from oneshot.pipeline import compress, profile
from oneshot.report.card import REPORT_NAME
from oneshot.run import open_run

TELLING = {REPORT_NAME, "report.html", "README.md"}  # of time and memory
LENT_KEYS, MIXTURE, ENCODER = (CASES[name].options for name in ("gemma4_text", "glm4_moe", "bert"))
FEW_BATCHES = {"num_sequences": 4, "batch_size": 2}

# name -> (workers, model, options)
FEW: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "a profile, output curvature": (3, {}, {"form": "per-layer", "round_to": 4}),
    "a dense stream, up_proj, held-out text": (8, {}, {"up_steps": 1, "damping": "auto"}),
    "subspaces": (4, {}, {"recipe": "group-pca", "correction": "two-stream", "sparsity": 0.1}),
    "whole experts": (5, MIXTURE, {"num_experts": 3, "experts": "effects", "sparsity": 0.35}),
    "an encoder": (6, ENCODER, {}),
}


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in TELLING]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", FEW)
def test_workers_without_text_change_nothing(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    size, model, options = FEW[name]
    options = FEW_BATCHES | options
    one, several = (
        make_config(make_checkpoint(**model), output=tmp_path / each, **options) for each in ("one", "several")
    )
    alone, (shared, *_) = compress(one), run_in_threads(size, lambda: compress(several))
    assert contents(tmp_path / "one") == contents(tmp_path / "several")
    assert shared.plan == alone.plan
    assert [layer.gram_notes for layer in shared.layers] == [layer.gram_notes for layer in alone.layers]
    assert all(
        one.measured_error is not None for layer in shared.layers for one in layer.sublayers if one.kind == "ffn"
    )


def test_a_profile_of_one_sequence_by_five_workers(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Two of four sequences are probes; of one sequence both is made."""
    for count in (1, 4):
        one, several = (
            make_config(make_checkpoint(), output=tmp_path / f"{each} {count}", num_sequences=count, form="per-layer")
            for each in ("one", "several")
        )
        profile(one)
        run_in_threads(5, lambda config=several: profile(config))  # type: ignore[misc]
        assert contents(Path(one.output)) == contents(Path(several.output))


def test_output_curvature_where_keys_are_read_again(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(**LENT_KEYS), **FEW_BATCHES)

    def measured() -> list[torch.Tensor]:
        with open_run(config) as run:
            layers = [
                run.curvature.of_layer(number, run.machine.device)
                for number in range(run.model.shape.num_hidden_layers)
            ]
            return [layer.ffn for layer in layers]

    whole = measured()
    for of_worker in run_in_threads(3, measured):
        assert all(map(torch.equal, of_worker, whole))
