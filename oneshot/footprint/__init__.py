"""The footprint of a run, predicted before it starts: memory on the host and on the device, disk, seconds.

`work` says what there is to do. `memory` (sums of `terms`) and `seconds` say what it takes, `bounds` whether it may.
"""

from oneshot.footprint.bounds import Bounds, current_bounds, fits, load_libraries, predict_footprint
from oneshot.footprint.check import check_stages
from oneshot.footprint.conversion import refuse_conversion, with_conversion
from oneshot.footprint.disk import offload_folder
from oneshot.footprint.seconds import TYPES, stage_seconds
from oneshot.footprint.work import Work, describe_work
