"""TorchRL's inference servers as receivers of our schemes."""

import pickle
import threading

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules.inference_server import (
    InferenceServer,
    MPTransport,
    ProcessInferenceServer,
    ThreadingTransport,
)

from weight_update import DistributedWeightSyncScheme, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme


def make_policy(value=0.0):
    policy = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        policy.weight.fill_(value)
    return TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])


def answer(client):
    """Return the version that a server writes into its answer, and the weight that made the answer."""
    found = client(TensorDict({"observation": torch.ones(4)}))
    return int(found["policy_version"]), float(found["action"]) / 4


def update_and_end(scheme, policy, client):
    """Send two updates and end the scheme; the server counts the updates, and goes on."""
    assert answer(client) == (0, 1.0)
    for version in (1, 2):
        with torch.no_grad():
            policy.module.weight.fill_(version + 1.0)
        scheme.send()
        assert answer(client) == (version, version + 1.0)
    scheme.shutdown()
    for _ in range(3):
        assert answer(client) == (2, 3.0)


@pytest.mark.parametrize("early", [True, False], ids=["initialized_by_server", "connected_before"])
@pytest.mark.parametrize("make", [SharedMemWeightSyncScheme, DistributedWeightSyncScheme])
def test_a_server_in_a_thread(make, early):
    scheme, policy, served = make(), make_policy(1.0), make_policy()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=1)
    receiver = pickle.loads(pickle.dumps(scheme))
    joining = threading.Thread(target=scheme.connect)
    joining.start()
    if not early:
        receiver.init_on_receiver(model_id="policy", model=served, worker_idx=0)
        receiver.connect()
    transport = ThreadingTransport()
    with InferenceServer(served, transport, weight_sync=receiver, policy_version=0):
        joining.join()
        update_and_end(scheme, policy, transport.client())
    receiver.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("make", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_a_server_in_a_process(make):
    spawn = torch.multiprocessing.get_context("spawn")
    scheme, policy, transport = make(), make_policy(1.0), MPTransport(ctx=spawn)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=1)
    client, options = transport.client(), {"mp_context": spawn, "policy_version": 0}
    server = ProcessInferenceServer(
        policy_factory=make_policy, transport=transport, weight_sync=scheme, **options
    )
    starting = threading.Thread(target=server.start)
    starting.start()
    try:
        scheme.connect()
        starting.join()
        update_and_end(scheme, policy, client)
    finally:
        server.shutdown()
