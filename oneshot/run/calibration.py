"""The calibration text of a run: from files and the Hub, written by the model, or of an interrupted run."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint import Model, complete_text_config, load_whole, peek_saved
from oneshot.checkpoint.safe_files import read_config
from oneshot.config import Config, TextOptions
from oneshot.errors import CalibrationError
from oneshot.export import model_classes
from oneshot.families import COMPRESSED
from oneshot.machine import Machine
from oneshot.machine.memory import device_capacity
from oneshot.method import TOKENS_PER_NEURON
from oneshot.profiling import text_of_profile
from oneshot.report.progress import ProgressBar, Tracker
from oneshot.report.sharing import told_sources
from oneshot.text import (
    BUILTIN,
    SELF,
    Fillings,
    Text,
    bos_of,
    check_source,
    documents_together,
    fillings_of,
    has_tokens,
    holds_tokenizer,
    load_examples,
    load_pairs,
    load_text,
    load_token_ids,
    load_tokenizer,
    mix,
    shares,
    split_sources,
    warn_if_long,
    write_text,
)

logger = logging.getLogger(__name__)

SAVED_TEXT = "self"  # the journal's name for text that the model wrote
BROAD_TOKENS = 1024  # of `BUILTIN` at least, which hold about three kinds
LEAST_PARTS, MOST_PARTS = 4, 8  # of the text, one of which is `BUILTIN`


def broadened(options: TextOptions, model: Model) -> TextOptions:
    """Return the text for a smaller model: if one source is asked for, an eighth of the tokens is the package's.

    From text of one source a run removes what other kinds of text need, code above all (docs/guides/text.md). Of fewer
    than 8,192 tokens 1,024 are the package's. A source that is named twice is read alone, as are mixtures.
    """
    family, sources = model.family, split_sources(options.calibration)
    is_alone = len(sources) == 1 and sources[0] not in (SELF, BUILTIN) and not has_tokens(sources[0])
    packs_text = family.stack.causal and family.decoder is None and model.shape.experts is None
    parts = min(MOST_PARTS, options.num_sequences // math.ceil(BROAD_TOKENS / options.sequence_length))
    if not (is_alone and packs_text and parts >= LEAST_PARTS):
        return options
    return replace(options, calibration="+".join([*(parts - 1) * sources, BUILTIN]))


class Calibration:
    """Read the calibration text of a config, in the kind that the model's family reads.

    Args:
        options: what is read: the config's text or, if that is another, what `broadened` makes of it. `BUILTIN` then
            has no larger share than of a source with enough text.
        outputs: the results' folders; text that an interrupted run of one of them saved is read again.

    Attributes:
        written: the sequences that the model wrote; None if it wrote none.
        num_read: sequences of packed text, by source.
    """

    def __init__(
        self, config: Config, options: TextOptions, model: Model, outputs: Sequence[Path], tracker: Tracker
    ) -> None:
        self._config, self._options, self._model = config, options, model
        self._outputs, self._tracker = outputs, tracker
        self.written: Text | None = None
        self.num_read: dict[str, int] = {}
        self._profile: str | None = None  # whose text is read again

    def check(self) -> None:
        """Raise `CalibrationError` if a file of the text cannot be read; nothing is read yet."""
        reads_pairs = not self._model.family.stack.causal or self._model.family.decoder is not None
        for source in split_sources(self._options.calibration):
            if source != SELF:
                check_source(source, reads_pairs=reads_pairs)

    def warn_if_few(self, num_tokens: int) -> None:
        """Warn if a text has too few tokens for the width of the FFNs."""
        shape = self._model.shape
        needed = math.ceil(TOKENS_PER_NEURON * shape.intermediate_size * shape.tokens_per_arrival)
        if num_tokens < needed:
            logger.warning(
                "%d calibration tokens are few for %s of width %d: the correction will fit the text, not the "
                "model; give at least %d tokens, such as --num-sequences %d of %d tokens each.",
                num_tokens,
                "an FFN" if shape.experts is None else f"{shape.experts.count} experts",
                shape.intermediate_size,
                needed,
                math.ceil(needed / self._options.sequence_length),
                self._options.sequence_length,
            )

    def warn_if_long(self) -> None:
        """Warn if a model that writes text reads longer sequences than its config is for."""
        if self._model.family.stack.causal:
            complete = complete_text_config(self._model.family, self._model.checkpoint.config)
            warn_if_long(self._options.sequence_length, complete.get("max_position_embeddings"), "the model")

    def read(self, machine: Machine, *, plans_by_profile: bool = False) -> Text:
        """Return the text in all processes; raises `CalibrationError` if a source does not suit the family.

        Args:
            machine: where the model writes text.
            plans_by_profile: whether the given profile is used, so that the text written for it need not be again.
        """
        self._profile = self._config.profile if plans_by_profile else None
        options, seed = self._options, self._config.seed
        given = machine.workers.share(0, self._given)
        if isinstance(given, Text):
            return given
        parts = {
            source: part if isinstance(part, Text) else self._write(part, machine) for source, part in given.items()
        }
        self.num_read, self.written = {source: part.num_sequences for source, part in parts.items()}, parts.get(SELF)
        sources = split_sources(options.calibration)
        return mix([*parts.values()], seed, options.calibration if len(parts) == len({*sources}) else sources[0])

    def _given(self) -> Text | dict[str, Text | int]:
        """Return the text, or of packed text the part of each source; of one to be written the number of sequences."""
        options, family, shape, seed = self._options, self._model.family, self._model.shape, self._config.seed
        self._tracker.step(f"reading the text {told_sources(options.calibration)}")
        sources = split_sources(options.calibration)
        tokens = [source for source in sources if has_tokens(source)]
        if tokens and not (family.stack.causal and family.decoder is None):
            raise CalibrationError(f"{tokens[0]} holds tokens, which only models that write text read; give a text.")
        tokenizer = None if tokens == sources else load_tokenizer(self._model.checkpoint.folder)
        reason = family.reason_against("self text")
        if SELF in sources and reason is not None:
            raise CalibrationError(reason)
        if family.decoder is not None:
            return load_pairs(
                sources,
                tokenizer,
                num_tokens=options.num_tokens,
                longest=options.sequence_length,
                seed=seed,
                start_token=self._model.start_token,
            )
        if not family.stack.causal:
            return load_examples(
                sources,
                tokenizer,
                num_tokens=options.num_tokens,
                longest=min(options.sequence_length, shape.num_positions or options.sequence_length),
                seed=seed,
                with_types=shape.num_token_types > 1,
            )
        if tokenizer is not None:
            bos_of(tokenizer, self._model.checkpoint.folder)  # it warns
        counts, parts = shares(options.num_sequences, sources), dict[str, Text | int]()
        for source, count in counts.items():
            if source == BUILTIN and options != self._config.text:
                first = parts[sources[0]]
                assert isinstance(first, Text)
                count = first.num_sequences * count // counts[sources[0]]
            if count:
                parts[source] = self._source(source, count, tokenizer)
        return parts

    def _source(self, source: str, num_sequences: int, tokenizer: Any) -> Text | int:
        """Return so many sequences of one source of packed text, or their number if they are to be written."""
        length, seed = self._options.sequence_length, self._config.seed
        if has_tokens(source):
            return load_token_ids(
                source,
                num_sequences=num_sequences,
                sequence_length=length,
                seed=seed,
                fillings=self._fillings(tokenizer),
            )
        if source != SELF:
            return load_text(source, tokenizer, num_sequences=num_sequences, sequence_length=length, seed=seed)
        return self._saved(num_sequences) or num_sequences

    def _fillings(self, tokenizer: Any) -> Fillings:
        """Return the tokens that may fill up rows without a mask; a model without a tokenizer states one at most."""
        folder = self._model.checkpoint.folder
        if tokenizer is None and holds_tokenizer(folder):
            tokenizer = load_tokenizer(folder)
        return fillings_of(tokenizer, self._model.checkpoint.config.get("pad_token_id"))

    def _saved(self, num_sequences: int) -> Text | None:
        """Return what the model wrote for an interrupted run, or else for the profile that this run plans from.

        Fingerprint or profile say whether it is the same model.
        """
        found = [peek_saved(output, SAVED_TEXT) for output in self._outputs if self._config.resume]
        of_profile = None if self._profile is None else text_of_profile(Path(self._profile).expanduser())
        if of_profile is not None and of_profile["seed"] == self._config.seed:
            found.append(of_profile)
        for saved in found:
            if saved is not None:
                token_ids = torch.tensor(saved["token_ids"])
                if token_ids.shape == (num_sequences, self._options.sequence_length):
                    return Text(token_ids, SELF)
        return None

    def _write(self, num_sequences: int, machine: Machine) -> Text:
        """Let the model write the text, in all processes."""
        length, folder = self._options.sequence_length, self._model.checkpoint.folder
        capacity = device_capacity(machine.device, self._config.machine.max_device_memory_bytes)
        progress = ProgressBar(self._tracker, total=num_sequences * length, stage="writing text")
        text = write_text(
            folder,
            load_tokenizer(folder),
            num_sequences=num_sequences,
            sequence_length=length,
            seed=self._config.seed,
            device=machine.device,
            dtype=machine.dtype,
            max_memory_bytes=self._config.machine.max_memory_bytes,
            together=documents_together(self._model.shape, machine.dtype, capacity),
            advance=progress.advance,
            tell=self._tracker.say,
            load=_load_whole,
            workers=machine.workers,
        )
        if machine.workers.is_main:
            self._model.checkpoint.log_all()  # the text comes from all weights, which transformers has read
        return text


def _load_whole(auto_class: Any, folder: Path, **options: Any) -> Any:
    """Return the model of a local folder; of a result of ours by this package's class, so no file in it is run."""
    config = read_config(folder)
    if config.get("model_type") in COMPRESSED:
        _, auto_class = model_classes(config)
    return load_whole(auto_class, folder, **options)
