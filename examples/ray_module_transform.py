"""A reward model that lives in a Ray actor, inside an environment's transform, and follows its trainer.

    pip install "weight-update[ray,collectors]"
    python examples/ray_module_transform.py

The environment asks the actor at every step. The trainer changes its own copy of the model and sends it; the
transform's module has the new weights when ``send()`` returns.
"""

from __future__ import annotations

import ray
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import GymEnv, TransformedEnv
from torchrl.envs.transforms.module import RayModuleTransform

from weight_update import RayModuleTransformScheme


def make_model() -> TensorDictModule:
    """Return a model that scores an observation."""
    return TensorDictModule(nn.Linear(4, 1), in_keys=["observation"], out_keys=["score"])


def with_score(spec: Composite) -> Composite:
    """Add the score to the observations of the environment."""
    spec["score"] = Unbounded(1)
    return spec


def main() -> None:
    """Send three versions and look at the scores."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    model = make_model()
    with RayModuleTransformScheme(model=model) as scheme:
        transform = RayModuleTransform(
            module_factory=make_model, observation_spec_transform=with_score, weight_sync_scheme=scheme
        )  # makes the actor and connects: its module now has the weights of ``model``
        env = TransformedEnv(GymEnv("CartPole-v1"), transform)
        for _ in range(3):
            steps = env.rollout(5)
            expected = model(steps["next"].select("observation"))["score"]
            same = torch.allclose(steps["next", "score"], expected)
            print(f"version {scheme.version}: the scores are those of the trainer's model: {same}")
            with torch.no_grad():
                model.module.weight.add_(1.0)  # training
            scheme.send()
        env.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
