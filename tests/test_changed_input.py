"""An input that changes while a run is interrupted: never a result of two models; a new time of a file is no change."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from damage import edit_config, edit_json, edit_tensors, turn_bit
from factories import MakeCheckpoint, MakeConfig
from interruptions import contents, stop_at, undisturbed

from oneshot import Config
from oneshot.checkpoint.read_log import tensor_hash
from oneshot.errors import OneshotError, OutputError, ProfileError
from oneshot.pipeline import compress, profile

LAYER = "model.layers.{}.mlp.up_proj.weight"


def change(folder: Path, name: str, value: float = 0.5) -> None:
    """Change the last element of a tensor, which is not in its first row."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-1] = value

    edit_tensors(folder, edit)


def refused(config: Config, *words: str) -> None:
    """Check that a run is not continued, that one sentence says so, and that everything of it is kept."""
    work = Path(f"{config.output}.incomplete")
    before = {path.name for path in work.iterdir()}
    with pytest.raises(OneshotError) as caught:
        compress(replace(config, resume=True))
    assert {path.name for path in work.iterdir()} == before
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.fixture
def model(own_checkpoint: MakeCheckpoint) -> Path:
    return own_checkpoint(layers=2)


@pytest.mark.parametrize(
    ("moment", "name"),
    [(1, LAYER.format(0)), (1, "model.embed_tokens.weight"), ("commit", LAYER.format(1)), ("commit", "lm_head.weight")],
)
def test_weights_that_finished_layers_come_from(
    moment: int | str, name: str, model: Path, make_config: MakeConfig
) -> None:
    """Also after the last layer, when a resumed run has no need to read them."""
    config = make_config(model)
    stop_at(moment, partial(compress, config))
    shutil.copytree(model, model.with_name("as it was"))
    change(model, name)
    refused(config, name, "give the same weights")
    change(model, name, torch.nan)
    refused(config, name)
    shutil.copytree(model.with_name("as it was"), model, dirs_exist_ok=True)
    for path in model.iterdir():
        os.utime(path, (0, 0))
    compress(replace(config, resume=True))
    assert contents(Path(config.output)) == undisturbed(config)


def test_weights_that_were_not_read_yet(own_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """Finished layers are as the changed model's own, so the result is that model's."""
    model = own_checkpoint(layers=4)
    config = make_config(model, num_sequences=4)
    stop_at(1, partial(compress, config))
    change(model, LAYER.format(3))
    compress(replace(config, resume=True))
    assert contents(Path(config.output)) == undisturbed(config)


def test_a_finished_result_of_other_weights(model: Path, make_config: MakeConfig) -> None:
    config = make_config(model)
    compress(config)
    change(model, LAYER.format(1))
    with pytest.raises(OutputError, match="exists already"):
        compress(replace(config, resume=True))


FILES: dict[str, Callable[[Path], None]] = {
    "rope_theta": lambda folder: edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e3}),
    "rms_norm_eps": lambda folder: edit_config(folder, rms_norm_eps=1e-3),
    "generation_config.json": lambda folder: edit_json(
        folder / "generation_config.json", lambda it: it.update(top_k=3)
    ),
    "chat_template.jinja": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
    "LICENSE": lambda folder: (folder / "LICENSE").write_text("others"),
    "README.md": lambda folder: (folder / "README.md").write_text("---\nlicense: mit\n---\n"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_decide_the_result(name: str, model: Path, make_config: MakeConfig) -> None:
    config = make_config(model, num_sequences=4)
    stop_at(1, partial(compress, config))
    FILES[name](model)
    refused(config, "license" if name == "README.md" else name if "." in name or name == "LICENSE" else "config.json")


@pytest.mark.parametrize("what", ["versions", "code_hash", "processor_name"])
def test_other_software_or_processor(
    what: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(make_checkpoint(layers=2), num_sequences=4)
    stop_at(1, partial(compress, config))
    monkeypatch.setattr(f"oneshot.run.earlier.{what}", lambda: {"torch": "3"} if what == "versions" else "other")
    refused(config, {"versions": "torch", "code_hash": "code", "processor_name": "processor"}[what])


def test_a_profile_of_other_weights_and_a_damaged_one(model: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(model, form="per-layer", round_to=4, curvature="none", num_sequences=4)
    folder = tmp_path / "profile"
    profile(replace(config, output=str(folder)))
    planned = replace(config, profile=str(folder))
    stop_at(1, partial(compress, planned))
    shutil.move(folder, tmp_path / "moved")  # its place does not count, but its content
    compress(replace(planned, profile=str(tmp_path / "moved"), resume=True))
    again = replace(planned, profile=str(tmp_path / "moved"), output=str(tmp_path / "again"))
    stated = (model / "config.json").read_bytes()
    FILES["rms_norm_eps"](model)
    with pytest.raises(ProfileError, match=r"another config\.json"):
        compress(again)
    (model / "config.json").write_bytes(stated)
    change(model, LAYER.format(1))
    with pytest.raises(ProfileError, match=rf"belongs to another model: {LAYER.format(1)}"):
        compress(again)
    for name in ("profile.json", "profile.safetensors"):
        content = (tmp_path / "moved" / name).read_bytes()
        turn_bit(tmp_path / "moved" / name)
        with pytest.raises(ProfileError, match="not a readable profile"):
            compress(again)
        (tmp_path / "moved" / name).write_bytes(content)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"layers": 3}', '{"layers": [1], "footprint": null}'])
def test_a_damaged_report_of_a_finished_run(
    content: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(layers=2), recipe="magnitude")
    output = Path(config.output)
    output.mkdir()
    (output / "config.json").write_text("{}")
    (output / "oneshot_report.json").write_text(content)
    with pytest.raises(OutputError, match=r"oneshot_report\.json is damaged .* or add --overwrite\."):
        compress(replace(config, resume=True))
    assert (output / "oneshot_report.json").read_text() == content


def test_a_hash_is_of_all_bytes_and_of_no_panels() -> None:
    tensor = torch.randn(7, 5).bfloat16()
    whole = tensor_hash([tensor])
    assert tensor_hash([tensor[:3], tensor[3:]]) == whole
    assert tensor_hash([tensor.view(torch.float16)]) != whole
    assert tensor_hash([tensor.view(5, 7)]) != whole
    for place in range(tensor.numel()):
        turned = tensor.clone()
        turned.view(torch.int16).view(-1)[place] ^= 1
        assert tensor_hash([turned]) != whole
