"""The states of the members of a Synchronizer (``RunningStatus``), and the events that change them."""

from __future__ import annotations

from drawing import Drawing


def explorer_states() -> str:
    """Return the state diagram of an explorer."""
    drawing = Drawing(
        "explorer-states",
        640,
        440,
        "States of an explorer: STOPPED, RUNNING, and REQUIRE_SYNC, which it has while it announces a "
        "synchronization, while it waits for weights, and while weights are on their way to it.",
    )
    drawing.box(245, 10, 150, 40, "STOPPED")
    drawing.box(245, 120, 150, 52, "RUNNING", "explores", kind="main")
    drawing.box(20, 250, 170, 52, "REQUIRE_SYNC", "announced")
    drawing.box(450, 250, 170, 52, "REQUIRE_SYNC", "waits for weights")
    drawing.box(450, 376, 170, 52, "REQUIRE_SYNC", "weights on their way")

    drawing.arrow((300, 50), (300, 120))
    drawing.label(262, 85, "connects")
    drawing.arrow((340, 120), (340, 50))
    drawing.label(438, 85, "close(), or the process dies", "(from every state)")
    drawing.arrow((245, 140), (70, 140), (70, 250))
    drawing.label(118, 174, 'notify("require_sync")')
    drawing.arrow((130, 250), (130, 214), (265, 214), (265, 172))
    drawing.label(194, 214, 'notify("running"),', "or a new version")
    drawing.arrow((395, 140), (560, 140), (560, 250))
    drawing.label(560, 174, "sync_weight()")
    drawing.arrow((510, 250), (510, 214), (375, 214), (375, 172))
    drawing.label(443, 214, "new enough, timeout,", "or the trainer stopped")
    drawing.arrow((190, 276), (450, 276))
    drawing.label(252, 276, "sync_weight()")
    drawing.arrow((535, 302), (535, 376), kind="weights")
    drawing.label(535, 339, "weights are sent")
    drawing.arrow((450, 402), (320, 402), (320, 172))
    drawing.label(320, 350, "applied,", "or failed: reason")
    return drawing.svg()


def trainer_states() -> str:
    """Return the state diagram of a trainer."""
    drawing = Drawing(
        "trainer-states",
        640,
        316,
        "States of a trainer: STOPPED, RUNNING, and with NCCL also REQUIRE_SYNC, which it has while it waits "
        "for explorers and during a transfer.",
    )
    drawing.box(245, 10, 150, 40, "STOPPED")
    drawing.box(245, 120, 150, 52, "RUNNING", "trains, publishes", kind="main")
    drawing.box(20, 250, 190, 52, "REQUIRE_SYNC", "waits for explorers")
    drawing.box(430, 250, 190, 52, "REQUIRE_SYNC", "transfer under way")

    drawing.arrow((300, 50), (300, 120))
    drawing.label(262, 85, "connects")
    drawing.arrow((340, 120), (340, 50))
    drawing.label(438, 85, "close(), or the process dies", "(from every state)")
    drawing.arrow((245, 140), (70, 140), (70, 250))
    drawing.label(70, 180, "sync_weight()", "with NCCL")
    drawing.arrow((150, 250), (150, 214), (275, 214), (275, 172))
    drawing.label(212, 214, "no explorer", "came: reason")
    drawing.arrow((210, 276), (430, 276), kind="weights")
    drawing.label(320, 276, "explorers are ready")
    drawing.arrow((525, 250), (525, 146), (395, 146))
    drawing.label(510, 196, "the transfer ended")
    return drawing.svg()
