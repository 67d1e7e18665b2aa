"""Tell of weights that are larger or smaller than the numbers of float16, which GGUF's types also scale by."""

import logging

from oneshot.errors import PlanError

LITTLE = 2.0**-18  # below its normal numbers float16 loses a bit by each halving; here six are left
logger = logging.getLogger(__name__)


def beyond_float16(module: str, largest: float) -> PlanError:
    """Return the error of a weight that no type has numbers for."""
    return PlanError(
        f"The weights of {module} are up to {largest:.1e}, and float16, which the types of GGUF scale by, does not "
        "hold that; leave --bits and --max-file-size out."
    )


def below_float16(module: str, largest: float) -> PlanError:
    """Return the error of a weight of which no type keeps half."""
    return PlanError(
        f"No type of GGUF keeps half of what the weights of {module} do: they are at most {largest:.1e}, and float16, "
        "which these types scale by, ends at 6e-08, or columns beside each other differ far too much; leave --bits and "
        "--max-file-size out."
    )


def tell_of_little(name: str, largest: float, save_dtype: str, steps: int = 1) -> None:
    """Warn of a matrix whose largest value, as so many steps of a scale, is where float16 ends."""
    if 0 < largest < LITTLE * steps:
        logger.warning("%s is at most %.1e, so %s keeps little of it; bfloat16 keeps more.", name, largest, save_dtype)
