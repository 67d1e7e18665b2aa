"""Opening a run: its scratch folder, its limits, and the sentences of errors that libraries raise in it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from oneshot_kernels.backend import KernelError
from safetensors import SafetensorError

from oneshot.config import Config
from oneshot.errors import CheckpointError, DeviceError, OutputError, cause
from oneshot.footprint import offload_folder
from oneshot.machine import exact_products, limited_memory, vendor_solvers
from oneshot.machine.scratch import scratch_folder
from oneshot.report.progress import Shown, Tracker, WarningLog, following
from oneshot.run.run import Run


@contextmanager
def open_run(config: Config, outputs: Sequence[Path] = (), show_progress: Shown | Tracker = False) -> Iterator[Run]:
    """Open the resources of a run, with a scratch folder in the off-load folder until the end.

    Args:
        outputs: the results' folders; text and latencies of an interrupted run of one of them are read again.
        show_progress: whether its progress is shown, or who follows it.
    """
    folder = offload_folder(config.machine)
    with ExitStack() as stack:
        tracker = stack.enter_context(following(show_progress))
        try:
            scratch = stack.enter_context(scratch_folder(folder))
        except OSError as error:
            raise OutputError(
                f"Nothing can be written to {folder} ({error.strerror}); name another folder as --offload-dir."
            ) from error
        stack.enter_context(torch.inference_mode())
        stack.enter_context(exact_products())
        warnings = stack.enter_context(WarningLog())
        try:
            with warnings.shared():
                run = Run(config, scratch, outputs, tracker=tracker, warnings=warnings)
            device, limit = run.machine.device, config.machine.max_device_memory_bytes
            with limited_memory(device, limit), vendor_solvers(device):
                yield run
            run.machine.workers.wait()  # others may still read from this one's scratch folder
        except KernelError as error:
            raise DeviceError(f"{error} Set ONESHOT_KERNELS=torch to compute without Triton.") from error
        except SafetensorError as error:  # of Grams and directions; the checkpoint's and the journal's have sentences
            raise OutputError(
                f"The scratch files in {folder} cannot be written ({cause(error)}); free some space there, or name "
                "another folder as --offload-dir."
            ) from error
        except torch.linalg.LinAlgError as error:
            raise CheckpointError(
                f"A matrix cannot be decomposed ({cause(error)}); run with --dtype float32 or check the weights."
            ) from error
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceError(
                "The CUDA device is out of memory; lower --batch-size or --sequence-length, or give a smaller "
                "--max-device-memory, so that activations leave it."
            ) from error
