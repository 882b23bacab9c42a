"""Each kind of collector, checkpoints and a shared replay buffer, with whatever TorchRL is installed."""

from importlib.metadata import version

from collector_parts import OPTIONS, Env, fill, make_policy, require_exact, use_forkserver
from torchrl.data import LazyMemmapStorage, ReplayBuffer

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from weight_update import MemoryWeightSyncScheme


def follow_updates(cls, create_env_fn, **options):
    policy = make_policy()
    collector = cls(create_env_fn, policy, frames_per_batch=8, total_frames=-1, **options, **OPTIONS)
    try:
        frames = iter(collector)
        require_exact(next(frames))
        for value in (1, 2):
            assert collector.update_policy_weights_(fill(policy, value)).version == value
            data = next(frames)
            while data["policy_version"].min() < value:  # batches that were made before
                data = next(frames)
            require_exact(data)
        saved = collector.state_dict()
        collector.load_state_dict(saved)
        assert collector.update_policy_weights_(fill(policy, 3)).version == 3
    finally:
        collector.shutdown()


def fill_a_buffer():
    buffer = ReplayBuffer(storage=LazyMemmapStorage(64), batch_size=8)
    options = {"replay_buffer": buffer, "frames_per_batch": 8, "total_frames": 64, **OPTIONS}
    collector = MultiAsyncCollector([Env] * 2, make_policy(), **options)
    try:
        for _ in collector:
            pass
        assert len(buffer) == 64
        data = buffer[:]
        assert (data["policy_version"] == 0).all()
        assert (data["next", "policy_version"] == 0).all()
    finally:
        collector.shutdown()


def main():
    use_forkserver()
    follow_updates(Collector, Env, weight_sync_schemes={"policy": MemoryWeightSyncScheme()})
    follow_updates(MultiSyncCollector, [Env] * 2)
    follow_updates(MultiAsyncCollector, [Env] * 2)
    fill_a_buffer()
    print("torchrl", version("torchrl"), "works")


if __name__ == "__main__":
    main()
