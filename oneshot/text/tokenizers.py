"""The tokenizer beside the weights, also one that is stored only in a family's older vocabulary files."""

import logging
from pathlib import Path
from typing import Any

from oneshot.errors import CalibrationError, cause
from oneshot.text.chats import added_start

logger = logging.getLogger(__name__)

FAST = "tokenizer.json"
PIECES = ("tokenizer.model", "spiece.model")  # of sentencepiece
READ_OF_CONFIG = ("model_type", "tokenizer_class", "transformers_version")
VOCABULARIES = (*PIECES, "vocab.json", "vocab.txt")


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer that is stored beside the weights.

    Raises `CalibrationError` without one, for one that cannot be read, and for packages that its file needs.
    """
    from transformers import AutoTokenizer

    if not holds_tokenizer(folder):
        raise CalibrationError(f"{folder} does not hold a tokenizer; copy the model's tokenizer files there.")
    try:
        config = _config_of_unknown_type(folder)
        return AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the readers of tokenizers raise many unrelated types; the cause is named and chained
        pieces = [name for name in PIECES if needs_conversion(folder) and (folder / name).exists()]
        missing = _missing_packages()
        if pieces and missing:
            packages = " and ".join(missing)
            raise CalibrationError(
                f"{folder / pieces[0]} needs the Python package {packages}; pip install 'oneshot-llm[pieces]'."
            ) from error
        raise CalibrationError(
            f"The tokenizer in {folder} cannot be read ({cause(error)}); copy the model's files again."
        ) from error


def _config_of_unknown_type(folder: Path) -> Any:
    """Return what the choice of a tokenizer reads of a model type that transformers does not know; None for others.

    The rest may not fit a config without a type: rotary positions of layers that differ are an error there.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    if config.get("model_type") in CONFIG_MAPPING:
        return None
    return PreTrainedConfig.from_dict({name: config[name] for name in READ_OF_CONFIG if name in config})


def bos_of(tokenizer: Any, folder: Path) -> str:
    """Return the BOS that a tokenizer puts before texts, empty if it puts none; warn if its folder states otherwise.

    With a tokenizer.json, transformers 5 reads only there what stands before texts, and not `add_bos_token`.
    """
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    bos = "" if added_start(tokenizer) is None else str(tokenizer.bos_token)
    stated = get_tokenizer_config(folder, local_files_only=True).get("add_bos_token")
    if isinstance(stated, bool) and stated != bool(bos) and tokenizer.bos_token is not None:
        logger.warning(
            "tokenizer_config.json of %s states add_bos_token %s, but transformers reads tokenizer.json, which puts %s "
            "before texts; so does this run, and the post_processor there changes it.",
            folder,
            str(stated).lower(),
            bos or "no BOS",
        )
    return bos


def holds_tokenizer(folder: Path) -> bool:
    """Return whether a file of a tokenizer lies beside the weights."""
    return any((folder / name).exists() for name in (FAST, *VOCABULARIES))


def needs_conversion(folder: Path) -> bool:
    """Return whether a folder's tokenizer is only in files that transformers reads by the config's model type."""
    return not (folder / FAST).exists() and any((folder / name).exists() for name in VOCABULARIES)


def _missing_packages() -> list[str]:
    """Return the packages that transformers reads files of sentencepiece with and that are not installed."""
    from transformers.utils import is_protobuf_available, is_sentencepiece_available

    needed = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    return [name for name, is_installed in needed.items() if not is_installed]
