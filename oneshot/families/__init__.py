"""Model families: odd ones have a file each, short ones are in `llamas`, `layer_norms` and `other_mixtures`.

To add one: a `Description`, and its name in `reading.FAMILIES`.
"""

from oneshot.families.bert import BERT
from oneshot.families.llama import LLAMA
from oneshot.families.reading import FAMILIES, find_family
from oneshot.families.refusals import (
    COMPRESSED,
    COMPRESSED_MODEL_TYPE,
    ENCODER_MODEL_TYPE,
    NAS_MODEL_TYPE,
    RESIZED_MODEL_TYPE,
    UnknownFamilyError,
)
from oneshot.families.wrappers import is_text, text_of, with_text
