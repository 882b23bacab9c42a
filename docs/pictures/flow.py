"""The picture of the landing page: the way of an update."""

from __future__ import annotations

from drawing import Drawing

_WORKERS = 3


def flow() -> str:
    """Return the picture of an update from the trainer to its workers."""
    drawing = Drawing(
        "flow",
        640,
        372,
        "The strategy reads named tensors from the trainer's model, the encoding turns them into chunks, "
        "the transport moves the chunks, and each worker switches its model to the new version.",
    )
    drawing.group(10, 10, 200, 316, "Trainer")
    drawing.box(30, 46, 160, 46, "model", kind="main")
    drawing.box(30, 144, 160, 56, "strategy", "selects, converts")
    drawing.box(30, 252, 160, 56, "encoding", "dense, bucket, patch")
    drawing.arrow((110, 92), (110, 144), kind="weights")
    drawing.arrow((110, 200), (110, 252), kind="weights")
    drawing.label(110, 116, "weights")
    drawing.label(110, 224, "named tensors")

    drawing.box(264, 46, 116, 262, "transport", "shared memory", "sockets", "NCCL", "Ray", "your own")
    drawing.arrow((190, 280), (264, 280), kind="weights")
    drawing.label(236, 265, "chunks")

    for worker in range(_WORKERS):
        top = 10 + worker * 108
        drawing.group(430, top, 200, 100, f"Worker {worker}")
        drawing.box(442, top + 36, 80, 50, "staged", "checked")
        drawing.box(556, top + 36, 62, 50, "model", kind="main")
        drawing.arrow((380, top + 61), (442, top + 61), kind="weights")
        drawing.arrow((522, top + 61), (556, top + 61), kind="weights")
    drawing.arrow((530, 326), (530, 350), (110, 350), (110, 326), kind="answer")
    drawing.label(320, 350, "version applied, by each worker: SyncReport")
    return drawing.svg()
