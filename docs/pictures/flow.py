"""The picture of the landing page: the way of an update."""

from __future__ import annotations

from drawing import Drawing

_WORKERS = 3


def flow() -> str:
    """Return the picture of an update from the trainer to its workers."""
    drawing = Drawing(
        "flow",
        520,
        372,
        "The strategy reads named tensors from the trainer's model, the encoding turns them into chunks, "
        "the transport moves the chunks, and each worker switches its model to the new version.",
    )
    drawing.group(4, 10, 166, 316, "Trainer")
    drawing.box(16, 46, 142, 46, "model", kind="main")
    drawing.box(16, 144, 142, 56, "strategy", "selects, converts")
    drawing.box(16, 252, 142, 56, "encoding", "dense, bucket, patch")
    drawing.arrow((87, 92), (87, 144), kind="weights")
    drawing.arrow((87, 200), (87, 252), kind="weights")
    drawing.label(87, 116, "weights")
    drawing.label(87, 224, "named tensors")

    drawing.box(216, 46, 112, 262, "transport", "shared memory", "sockets", "NCCL", "Ray", "your own")
    drawing.arrow((158, 280), (216, 280), kind="weights")
    drawing.text(193, 271, "chunks", "small middle")

    for worker in range(_WORKERS):
        top = 10 + worker * 108
        drawing.group(354, top, 162, 100, f"Worker {worker}")
        drawing.box(362, top + 36, 66, 50, "staged", "checked")
        drawing.box(450, top + 36, 58, 50, "model", kind="main")
        drawing.arrow((328, top + 61), (362, top + 61), kind="weights")
        drawing.arrow((428, top + 61), (450, top + 61), kind="weights")
    drawing.arrow((437, 326), (437, 350), (87, 350), (87, 326), kind="answer")
    drawing.label(262, 350, "version applied, by each worker")
    return drawing.svg()
