"""A trainer whose model is spread over several ranks: all of them call, one of them sends."""

from weight_update.sharded.follower import Follower
from weight_update.sharded.gathering import Gathering
from weight_update.sharded.leader import Leader
from weight_update.sharded.ranks import Alone, Ranks

__all__ = ["Alone", "Follower", "Gathering", "Leader", "Ranks"]
