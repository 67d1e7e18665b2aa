"""Writing the result: its forms, the layers on their way into the journal, and what lies beside the weights."""

from oneshot.export.companions import coordinates, model_classes, write_companions
from oneshot.export.engines import notes_on_engines
from oneshot.export.form import Form
from oneshot.export.forms import FORMS, form_of, stated_shape
from oneshot.export.further import FurtherResult, further_result
from oneshot.export.gguf_result import open_folder, own_gguf
from oneshot.export.imatrix import tensor_names, write_imatrix
from oneshot.export.original_types import OriginalTypes, price_original
from oneshot.export.planned import planned_parts
from oneshot.export.resized import renamed_ranks
from oneshot.export.saving import cast, expected_bytes, part_dtype, with_kept_dtype
from oneshot.export.tensor_types import quantise_result
