"""The machine of a run: device, dtype, processes, scratch folder and where activations are stored."""

from oneshot.machine.device import (
    exact_products,
    limited_memory,
    repeatable_attention,
    resolve_device,
    usual_settings,
    vendor_solvers,
)
from oneshot.machine.dtype import DtypeChoice, choose_dtype, resolve_dtype, stored_dtype
from oneshot.machine.machine import Machine, Store
from oneshot.machine.workers import ALONE, Workers, join_workers
