"""Trainers whose model is sharded over several ranks: all ranks make the same calls, one of them sends."""

from weight_update.sharded.follower import Follower
from weight_update.sharded.gathering import Gathering
from weight_update.sharded.leader import Leader
from weight_update.sharded.ranks import Ranks

__all__ = ["Follower", "Gathering", "Leader", "Ranks"]
