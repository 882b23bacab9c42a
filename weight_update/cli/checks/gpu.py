"""GPUs: whether PyTorch sees one, whether another process can open its memory, and NCCL."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from weight_update.cli.checks.base import BYTE, Finding, fail, ok, problem_of_reader, skipped
from weight_update.transports.distributed.store import HashStore
from weight_update.transports.shared_memory.cuda_slots import CudaBuffer

GPU_SECONDS = 30.0
"""Seconds that a check may take in which a process imports torch, or NCCL starts."""
_OPEN = """
import sys
from weight_update.transports.shared_memory.cuda_slots import CudaSlotMapping
fd, handle = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
print(int(CudaSlotMapping("doctor", handle, fd).first(1)[0]))
"""
_NO_GPU = "torch sees no GPU"
_DRIVER = (
    "if there is one: install its driver and a build of torch for CUDA, and look at CUDA_VISIBLE_DEVICES"
)
IPC_CURE = (
    "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, run containers with --ipc=host, "
    "or leave slot_device= out"
)
NCCL_CURE = "run with NCCL_DEBUG=INFO to see why, or use backend='gloo', the default"


def look_at_cuda() -> Finding:
    """List the GPUs, and use the first."""
    if not torch.cuda.is_available():
        return skipped(_NO_GPU, _DRIVER)
    count = torch.cuda.device_count()
    torch.ones(1, device="cuda").add_(1).item()
    return ok(f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")


def look_at_ipc() -> Finding:
    """Open GPU memory of this process in another process, as workers do with slot_device="cuda"."""
    if not torch.cuda.is_available():
        return skipped(_NO_GPU)
    with contextlib.closing(CudaBuffer(1, torch.device("cuda", 0))) as buffer:
        buffer.tensor.fill_(BYTE)
        torch.cuda.synchronize()
        arguments = ["-c", _OPEN, str(buffer.fd), buffer.handle.hex()]
        problem = problem_of_reader(arguments, GPU_SECONDS, pass_fds=[buffer.fd])
    if problem:
        return fail(f"another process cannot open memory of the GPU: {problem}", IPC_CURE)
    return ok("another process can open memory of the GPU")


def look_at_nccl() -> Finding:
    """Reduce a tensor on the first GPU by NCCL."""
    if not torch.cuda.is_available():
        return skipped(_NO_GPU)
    if not dist.is_nccl_available():
        return fail("torch was built without NCCL", "install a build of torch for CUDA")
    group_class: Any = dist.ProcessGroupNCCL
    group = group_class(HashStore(), 0, 1)
    try:
        group.allreduce([torch.ones(1, device="cuda")]).wait()
        torch.cuda.synchronize()
    finally:
        group.abort()
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return ok(f"NCCL {version} works on the first GPU")
