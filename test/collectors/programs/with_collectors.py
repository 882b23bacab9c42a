"""The collector program of TorchRL's documentation on weight synchronization; only its imports differ."""

import torch.nn as nn
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv

from collectors import MultiCollector
from weight_update import SharedMemWeightSyncScheme


def main():
    env = GymEnv("CartPole-v1")
    policy = TensorDictModule(
        nn.Linear(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]),
        in_keys=["observation"],
        out_keys=["action"],
    )

    scheme = SharedMemWeightSyncScheme(strategy="tensordict")

    collector = MultiCollector(
        sync=True,
        create_env_fn=[lambda: GymEnv("CartPole-v1")] * 3,
        policy=policy,
        frames_per_batch=192,
        total_frames=10000,
        weight_sync_schemes={"policy": scheme},
    )

    for i, data in enumerate(collector):
        print("frames", data.numel(), "version", data["policy_version"].max().item())
        if i % 10 == 0:
            collector.update_policy_weights_()
            collector.update_policy_weights_(policy)

    collector.shutdown()


if __name__ == "__main__":
    main()
