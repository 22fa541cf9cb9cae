"""Exceptions of torch, NCCL and RCCL, as users reported them, have the right failure kind."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from actors.distributed.device_check import DeviceCheck, begin_device_check, kernel_on
from actors.storage.errors import BrokenDevice, ProgramRefused, TornApply, UnsuitableMachine
from actors.worker.error_kinds import kind_of
from elastic.protocol.votes import BrokenVote

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, "
UNHANDLED = (
    NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure "
)
REMOTE = (
    NCCL + "remote process exited or there was a network error, NCCL version 2.28.8\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\n"
)
ASYNCHRONOUS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with "
    "exception: "
)
BACKEND, NETWORK, STORE = dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError

KINDS = {
    "device": [
        BACKEND(UNHANDLED + "'uncorrectable ECC error encountered'"),
        BACKEND(UNHANDLED + "999 'unknown error'"),
        BACKEND(UNHANDLED + "700 'an illegal memory access was encountered'"),
        BACKEND("NCCL error in: ../NCCLUtils.hpp:275, unhandled cuda error, NCCL version 2.20.5"),
        RuntimeError("NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered" + ASYNCHRONOUS),
        RuntimeError(WATCHDOG + "CUDA error: unspecified launch failure" + ASYNCHRONOUS),
        BACKEND(WATCHDOG + "CUDA error: uncorrectable ECC error encountered" + ASYNCHRONOUS),
        RuntimeError("CUDA error: device-side assert triggered" + ASYNCHRONOUS),
        RuntimeError("CUDA error: an illegal memory access was encountered" + ASYNCHRONOUS),
        RuntimeError("CUDA error: misaligned address" + ASYNCHRONOUS),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("CUDA driver error: unknown error"),
        RuntimeError("HIP error: an illegal memory access was encountered\nSearch for `hip"),
        RuntimeError("HIP error: unspecified launch failure"),
        BACKEND(NCCL + "unhandled hip error, NCCL version 2.18.3"),
        RuntimeError("NVRM: Xid (PCI:0000:0f:00): 79, GPU has fallen off the bus."),
        TornApply("the apply of step 3 broke: CUDA error: unspecified launch failure"),
        BrokenDevice("the device did not finish a small kernel in 10 s"),
    ],
    "memory": [
        BACKEND(UNHANDLED + "2 'out of memory'"),
        RuntimeError("CUDA error: out of memory" + ASYNCHRONOUS),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    "peer": [
        BACKEND(REMOTE + "socketProgressOpt: Call to recv from 172.16.0.4<33759> failed"),
        BACKEND(REMOTE + "NET/IB : Got completion from peer 11.214.147.122<39138> with error 12"),
        BACKEND(NCCL + "internal error, NCCL version 2.14.3\nNet : Connection closed by remote"),
        BACKEND(NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details)"),
        BACKEND("NCCL communicator was aborted on rank 1."),
        RuntimeError(WATCHDOG + "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8"),
        NETWORK("The client socket has timed out after 600000ms while trying to connect to (172."),
        STORE("wait timeout after 100ms, keys: /the_key"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection"),
        RuntimeError("Connection closed by peer [127.0.0.1]:40961"),
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenVote("the all-reduced vote of step 3 is corrupt: the steps sum to 0, not 12"),
    ],
    "program": [
        ValueError("batch 3 is empty"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
        RuntimeError("CUDA error: invalid configuration argument" + ASYNCHRONOUS),
        RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx(...)`"),
        KeyError("gloomy"),
    ],
    "machine": [UnsuitableMachine("no way to the data: CUDA error: is only quoted here")],
}


@pytest.mark.parametrize(
    ("kind", "error"),
    [(kind, error) for kind, errors in KINDS.items() for error in errors],
    ids=lambda value: value if isinstance(value, str) else f"{value}"[-50:].replace("\n", " "),
)
def test_reported_exception_has_its_failure_kind(kind: str, error: Exception) -> None:
    assert kind_of(error) == kind
    kind_beside_abandoned = "device" if kind == "memory" else kind
    assert kind_of(error, has_abandoned_thread=True) == kind_beside_abandoned


def test_cause_of_an_exception_determines_its_kind() -> None:
    try:
        try:
            raise BACKEND(UNHANDLED + "'uncorrectable ECC error encountered'")
        except BACKEND as error:
            raise RuntimeError("the step failed") from error
    except RuntimeError as error:
        assert kind_of(error) == "device"


def test_lost_store_of_the_installed_torch_is_a_peer_failure() -> None:
    with pytest.raises(RuntimeError) as raised:
        dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(seconds=1))
    assert kind_of(raised.value) == "peer"


def test_working_device_passes_the_check() -> None:
    assert DeviceCheck(kernel_on(torch.device("cpu"))).failure() is None


def test_device_that_raises_fails_the_check() -> None:
    def compute() -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    failure = DeviceCheck(compute).failure()
    assert "uncorrectable ECC" in str(failure) and failure is not None
    assert kind_of(failure) == "device"


def test_device_that_hangs_fails_the_check_after_its_limit() -> None:
    over = threading.Event()
    started = time.monotonic()
    failure = DeviceCheck(lambda: over.wait() and None, limit_s=0.2).failure()
    over.set()
    assert "did not finish a small kernel in 0.2 s" in str(failure)
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(2, "No such file or directory", "train.txt"), "program"),
        (PermissionError(13, "Permission denied"), "program"),
        (ProgramRefused("train.py, line 3: no step"), "mistake"),
        (ConnectionResetError(104, "Connection reset by peer"), "peer"),
        (TimeoutError("timed out"), "peer"),
    ],
)
def test_file_errors_are_program_failures_and_broken_connections_peer_failures(
    error: OSError, kind: str
) -> None:
    assert kind_of(error) == kind


@pytest.mark.parametrize(
    ("code", "module", "kind"),
    [
        ("raise TimeoutError('timed out')", "feature_store", "program"),
        (
            "raise RuntimeError('Timed out waiting for the feature store')",
            "custom.model",
            "program",
        ),
        ("import socket; socket.create_connection(('127.0.0.1', 1), 1.0)", "custom", "program"),
        ("raise TimeoutError('timed out')", "torch.distributed.rendezvous", "peer"),
        ("raise RuntimeError('Timed out waiting 1000ms')", "torch.distributed.c10d", "peer"),
        (
            "import socket; socket.create_connection(('127.0.0.1', 1), 1.0)",
            "actors.distributed.state_transfer",
            "peer",
        ),
    ],
)
def test_timeout_is_a_peer_failure_only_outside_of_user_code(
    code: str, module: str, kind: str
) -> None:
    with pytest.raises((OSError, RuntimeError)) as raised:
        exec(code, {"__name__": module})
    traceback = raised.value.__traceback__
    assert traceback is not None
    assert kind_of(raised.value.with_traceback(traceback.tb_next)) == kind


def test_prove_refuses_devices_that_hang_or_compute_wrongly() -> None:
    over = threading.Event()
    with pytest.raises(BrokenDevice, match="did not finish a small kernel"):
        begin_device_check(lambda: over.wait() and (lambda: None), limit_s=0.2)
    over.set()

    def compute_wrongly() -> None:
        raise ValueError("1 + 1 is not 2 on this device")

    with pytest.raises(BrokenDevice, match="is not 2 on this device"):
        begin_device_check(lambda: compute_wrongly)
    assert begin_device_check(lambda: kernel_on(torch.device("cpu"))).failure() is None
