"""Draw all pictures of the manual: ``python docs/pictures/draw.py``. A test compares the files."""

from __future__ import annotations

import sys
from pathlib import Path

from flow import flow
from handshakes import checkpoint, memory, nccl
from rates import rates
from states import explorer_states, trainer_states

PICTURES = [flow, explorer_states, trainer_states, nccl, memory, checkpoint, rates]

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    for draw in PICTURES:
        (folder / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
