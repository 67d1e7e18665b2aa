"""Records of a source that give no text: left out, counted and told; an error where most are such."""

import logging

from oneshot.errors import CalibrationError
from oneshot.text.bounded import BoundError

logger = logging.getLogger(__name__)

MOST_SHARE = 0.5
MOST_BEYOND_BOUNDS = 3  # each takes seconds
CHECKED_EVERY = 100  # records of a source without an end


class OddRecords:
    """The records of a source that give no text, beside those that do."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._good = self._odd = self._beyond = 0
        self._first: CalibrationError | None = None
        self._is_told = False

    def count_good(self) -> None:
        self._good += 1

    def leave_out(self, error: CalibrationError) -> None:
        """Count a record. Raises `CalibrationError` where it is plain that most are odd, or take too much."""
        self._first = self._first or error
        self._odd += 1
        self._beyond += isinstance(error, BoundError)
        if self._beyond >= MOST_BEYOND_BOUNDS:
            self._is_told = True
            raise error
        if self._odd % CHECKED_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raise `CalibrationError` if more than half of the records so far are odd."""
        if self._first is None or self._odd <= MOST_SHARE * (self._odd + self._good):
            return
        self._is_told = True
        if self._good == 0:
            raise self._first
        raise CalibrationError(
            f"{self._odd} of {self._odd + self._good} records of {self._source} give no text; mend them, or give "
            f"another file. The first: {self._first}"
        ) from self._first

    def tell(self) -> None:
        """Warn of the records that were left out, if an error has not told of them."""
        if self._first is not None and not self._is_told:
            logger.warning(
                "%d of %d records of %s give no text and are left out. The first: %s",
                self._odd,
                self._odd + self._good,
                self._source,
                self._first,
            )
