"""The messages of a synchronization by each method of a Synchronizer."""

from __future__ import annotations

from dataclasses import dataclass

from drawing import Drawing

_WIDTH, _TOP, _STEP = 640, 62, 40


@dataclass(frozen=True)
class Message:
    """A message from one lane to another; the kinds are those of :meth:`Drawing.arrow`."""

    sender: str
    receiver: str
    text: str
    kind: str = ""


@dataclass(frozen=True)
class Note:
    """A note on a lane: something happens there, or is awaited."""

    lane: str
    text: str


def _sequence(name: str, description: str, lanes: list[str], steps: list[Message | Note]) -> str:
    drawing = Drawing(name, _WIDTH, _TOP + len(steps) * _STEP + 8, description)
    width = 140
    gap = (_WIDTH - width - 20) // (len(lanes) - 1)
    centres = {lane: 10 + width // 2 + number * gap for number, lane in enumerate(lanes)}
    for lane, x in centres.items():
        drawing.line(x, 46, _TOP + len(steps) * _STEP)
        drawing.box(x - width // 2, 8, width, 38, lane)
    for number, step in enumerate(steps):
        y = _TOP + number * _STEP + 22
        if isinstance(step, Note):
            _note(drawing, centres[step.lane], y, step.text)
            continue
        first, last = centres[step.sender], centres[step.receiver]
        drawing.arrow((first, y), (last, y), kind=step.kind)
        drawing.label((first + last) / 2, y - 12, step.text)
    return drawing.svg()


def _note(drawing: Drawing, x: int, y: int, text: str) -> None:
    width = round(len(text) * 6.5) + 16
    left = min(max(x - width // 2, 2), _WIDTH - width - 2)
    drawing.box(left, y - 22, width, 28, text, title=False)


def nccl() -> str:
    """Return the handshake of ``SyncMethod.NCCL``."""
    trainer, synchronizer, explorer = "Trainer", "Synchronizer", "Explorer"
    return _sequence(
        "nccl-handshake",
        "NCCL: trainer and explorer both report to the synchronizer that they are ready; then the trainer "
        "sends weights to the explorer directly.",
        [trainer, synchronizer, explorer],
        [
            Message(explorer, synchronizer, "sync_weight() at my step"),
            Message(synchronizer, explorer, "first time: trainer's address", "answer"),
            Message(explorer, trainer, "first time: connects to the trainer"),
            Note(explorer, "waits"),
            Message(trainer, synchronizer, "sync_weight() at my step"),
            Note(trainer, "waits for the explorers that are due"),
            Message(synchronizer, trainer, "these explorers, version 7", "answer"),
            Message(trainer, explorer, "weights", "weights"),
            Message(explorer, trainer, "applied, or the error", "answer"),
            Message(trainer, synchronizer, "version 7 was sent; failures"),
            Message(synchronizer, explorer, "version 7, or the reason", "answer"),
        ],
    )


def memory() -> str:
    """Return the handshake of ``SyncMethod.MEMORY``."""
    trainer, synchronizer, explorer = "Trainer", "Synchronizer", "Explorer"
    return _sequence(
        "memory-handshake",
        "MEMORY: the trainer sends weights to the synchronizer and continues; the synchronizer sends them to "
        "explorers that ask.",
        [trainer, synchronizer, explorer],
        [
            Message(trainer, synchronizer, "sync_weight() at my step"),
            Message(synchronizer, trainer, "number 7", "answer"),
            Message(trainer, synchronizer, "weights", "weights"),
            Message(synchronizer, trainer, "applied", "answer"),
            Message(trainer, synchronizer, "version 7 is published"),
            Note(synchronizer, "keeps version 7"),
            Message(explorer, synchronizer, "sync_weight() at my step"),
            Note(explorer, "waits if 7 is not new enough"),
            Message(synchronizer, explorer, "weights", "weights"),
            Message(explorer, synchronizer, "applied, or the error", "answer"),
            Message(synchronizer, explorer, "version 7, or the reason", "answer"),
        ],
    )


def checkpoint() -> str:
    """Return the handshake of ``SyncMethod.CHECKPOINT``."""
    trainer, directory, synchronizer, explorer = "Trainer", "Directory", "Synchronizer", "Explorer"
    return _sequence(
        "checkpoint-handshake",
        "CHECKPOINT: the trainer writes a file and tells the synchronizer; the synchronizer tells explorers "
        "which version to read.",
        [trainer, directory, synchronizer, explorer],
        [
            Message(trainer, synchronizer, "sync_weight() at my step"),
            Message(synchronizer, trainer, "number 7", "answer"),
            Message(trainer, directory, "file, manifest", "weights"),
            Message(trainer, synchronizer, "version 7 is published"),
            Message(explorer, synchronizer, "sync_weight()"),
            Note(explorer, "waits if 7 is too old"),
            Message(synchronizer, explorer, "read version 7", "answer"),
            Message(directory, explorer, "file", "weights"),
            Message(explorer, synchronizer, "read, or the error"),
            Message(synchronizer, explorer, "7, or the reason", "answer"),
        ],
    )
