"""All ways to call ``update_policy_weights_``."""

import pytest
from collector_parts import fill, make_policy, weights_of
from tensordict import TensorDict

from weight_update import SchemaMismatchError, SyncReport, UnknownWorkerError, UnsupportedSourceError

# The ways of calling that TorchRL documents, each given the value that the weights should get.
CALLS = {
    "module": lambda c, v: c.update_policy_weights_(make_policy(v)),
    "tensordict": lambda c, v: c.update_policy_weights_(weights_of(v)),
    "policy=": lambda c, v: c.update_policy_weights_(policy=make_policy(v)),
    "weights=": lambda c, v: c.update_policy_weights_(weights=weights_of(v), model_id="policy"),
    "policy_or_weights=": lambda c, v: c.update_policy_weights_(policy_or_weights=weights_of(v)),
    "state_dict": lambda c, v: c.update_policy_weights_(make_policy(v).state_dict()),
    "nested dict": lambda c, v: c.update_policy_weights_(weights_of(v).to_dict()),
    "params": lambda c, v: c.update_policy_weights_(TensorDict.from_module(make_policy(v), as_module=True)),
    "weights_dict": lambda c, v: c.update_policy_weights_(weights_dict={"policy": weights_of(v)})["policy"],
}


def require_every_call(collector, used_now, policy):
    start = collector.policy_version
    for number, (name, call) in enumerate(CALLS.items(), start=1):
        report = call(collector, float(number))
        assert isinstance(report, SyncReport), name
        assert report.version - start == number == collector.policy_version - start, name
        assert set(used_now()) == {float(number)}, name
    fill(policy, 50.0)
    assert collector.update_policy_weights_().version - start == number + 1
    assert set(used_now()) == {50.0}
    with pytest.warns(DeprecationWarning, match="renamed"):
        collector.update_policy_weights_(policy_weights=weights_of(51.0))
    assert set(used_now()) == {51.0}


def require_refusals(collector, used_now):
    before, version = used_now(), collector.policy_version
    with pytest.raises(ValueError, match=r"only one of weights, policy"):
        collector.update_policy_weights_(weights=weights_of(1.0), policy=make_policy())
    with pytest.raises(ValueError, match="only one of policy_or_weights, weights_dict"):
        collector.update_policy_weights_(weights_of(1.0), weights_dict={"policy": weights_of(1.0)})
    with pytest.raises(ValueError, match="model_id and weights_dict"):
        collector.update_policy_weights_(model_id="policy", weights_dict={"policy": weights_of(1.0)})
    with pytest.raises(ValueError, match="empty"):
        collector.update_policy_weights_(weights_dict={})
    with pytest.raises(UnknownWorkerError):
        collector.update_policy_weights_(weights_of(1.0), worker_ids=9)
    with pytest.raises(SchemaMismatchError, match=r"module\.layers\.0"):
        collector.update_policy_weights_(weights_of(1.0).exclude(("module", "layers", "0")))
    with pytest.raises(UnsupportedSourceError, match="int"):
        collector.update_policy_weights_(5)
    assert (used_now(), collector.policy_version) == (before, version)
