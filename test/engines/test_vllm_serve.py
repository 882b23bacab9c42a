"""vLLM's own server and engine on the CPU: their processes, scheduler, cache and pauses.

The compiled operations of vLLM's CPU backend are replaced; see ``vllm_on_cpu``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

import torch
from torch import nn
from vllm_parts import PATCH, TINY, train, trainer_model

from weight_update import (
    DistributedWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    TransportError,
)
from weight_update.serving.vllm import LocalLLM, VLLMServer, connect_servers, init_info
from weight_update.serving.vllm.joining import connect_with
from weight_update.testing.processes import wait_until

pytestmark = pytest.mark.timeout(400)
START = 200.0  # seconds
SIZES = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 512}
PROMPT = [token % 90 for token in range(1, 65)]  # longer than a block of the cache
OPTIONS = {
    "--load-format": "dummy",
    "--dtype": "float32",
    "--max-model-len": "512",
    "--block-size": "32",
    "--compilation-config": '{"custom_ops": ["none"]}',
    "--weight-transfer-config": '{"backend": "weight_update"}',
}
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parent / "vllm_on_cpu"),
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}


class Server(VLLMServer):
    """A running ``vllm serve``."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        super().__init__(url, timeout=60.0)
        self.process = process

    def complete(self, prompt: list[int], count: int = 16) -> dict[str, Any]:
        """Return vLLM's answer: ``count`` tokens of greedy decoding."""
        body = {
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": count,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            "return_weight_versions": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120.0) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def tokens(self, prompt: list[int] = PROMPT) -> list[int]:
        return list(self.complete(prompt)["choices"][0]["token_ids"])

    def cached(self) -> int:
        """Return how many tokens of PROMPT come from the cache of prefixes."""
        details = self.complete(PROMPT, 1)["usage"]["prompt_tokens_details"]
        return 0 if details is None else int(details["cached_tokens"])

    def running(self) -> int:
        """Return the number of requests that generate tokens now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20.0) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        return round(sum(float(line.rpartition(" ")[2]) for line in found))


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--enforce-eager", *options]
    for name, value in OPTIONS.items():
        given += [name, value]
    log = folder / f"log-{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *given],
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        until = time.monotonic() + START
        while True:
            try:
                server.weight_version()
                break
            except TransportError:
                alive = process.poll() is None and time.monotonic() < until
                assert alive, log.read_text()[-5000:]
                time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps({**TINY, **SIZES, "dtype": "float32"}))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--enable-prompt-tokens-details") as started:
        yield started


@pytest.fixture
def policy() -> Any:
    return trainer_model(**SIZES)


def answer(policy: Any, prompt: list[int] = PROMPT) -> list[int]:
    """Return the tokens that Hugging Face's generation gives."""
    found = policy.generate(
        torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None
    )
    return list(found[0, len(prompt) :].tolist())


@pytest.mark.parametrize("kind", [DistributedWeightSyncScheme, SharedMemWeightSyncScheme])
def test_tokens_are_those_of_the_trainer(server: Server, policy: Any, kind: Any) -> None:
    with kind(strategy=PATCH) as scheme:
        scheme.init_on_sender(model=policy, num_workers=server.world_size())
        connect_servers(scheme, server)
        seen = []
        for version in range(4):
            if version:
                train(policy, 0.05)
                assert scheme.send().encoding == "patch"
            assert server.weight_version() == str(version)
            assert server.cached() == 0, "an update drops cached prefixes"
            assert server.cached() > 0
            seen.append(server.tokens())
            assert seen[-1] == answer(policy)
        assert len(set(map(tuple, seen))) > 1, "the weights changed"


@pytest.mark.parametrize("pause", ["wait", "keep", "abort"])
def test_a_request_that_runs_during_an_update(server: Server, policy: Any, pause: Any) -> None:
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        scheme.init_on_sender(model=policy, num_workers=server.world_size())
        connect_servers(scheme, server, pause=pause)
        before = server.complete(PROMPT, 440)["choices"][0]["token_ids"]
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(server.complete(PROMPT, 440)["choices"][0]))
        train(policy, 0.5)
        thread.start()
        wait_until(server.running)  # 440 tokens take longer than that
        scheme.send()
        thread.join(60.0)
        (found,) = answers
        if pause == "abort":
            assert found["finish_reason"] == "abort"
            assert len(found["token_ids"]) < 440
        else:
            assert len(found["token_ids"]) == 440
            assert (found["token_ids"] == before) == (pause == "wait")
            versions = [span["version"] for span in found["weight_versions"]]
            assert versions == (["0"] if pause == "wait" else ["0", "1"])
        if pause == "keep":
            server.reset_prefix_cache()
        assert server.tokens() == answer(policy)


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_a_request_that_arrives_during_a_pause(server: Server, pause: Any) -> None:
    server.pause(pause)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        server.tokens()
    server.resume()
    assert len(server.tokens()) == 16


def test_weights_that_the_model_does_not_know(server: Server, policy: Any) -> None:
    """The trainer gets the error of vLLM's loader; the server joins the next sender and generates again."""
    with DistributedWeightSyncScheme(strategy="state_dict") as scheme:
        policy.model.nobody = nn.Parameter(torch.zeros(3))
        scheme.init_on_sender(model=policy, num_workers=server.world_size())
        with pytest.raises((RuntimeError, SyncFailedError), match="nobody"):
            connect_servers(scheme, server)
    del policy.model.nobody
    with DistributedWeightSyncScheme(strategy="state_dict") as scheme:
        scheme.init_on_sender(model=policy, num_workers=server.world_size())
        connect_servers(scheme, server)
        assert server.tokens() == answer(policy)


@pytest.mark.timeout(800)  # it starts two servers
def test_a_second_server_that_is_killed_and_started_again(folder: Path, server: Server, policy: Any) -> None:
    """The second server has two tensor-parallel workers, and then two replicas of one worker each."""
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        scheme.init_on_sender(model=policy, num_workers=3)
        with serving(folder, "--tensor-parallel-size", "2") as second:
            assert (server.world_size(), second.world_size()) == (1, 2)
            connect_servers(scheme, server, second)
            for version in (1, 2):
                train(policy, 0.05)
                scheme.send()
                assert scheme.worker_versions == dict.fromkeys(range(3), version)
                assert server.tokens() == second.tokens() == answer(policy)
            os.killpg(second.process.pid, signal.SIGKILL)
        train(policy, 0.05)
        with pytest.raises(SyncFailedError) as failed:
            scheme.send()
        assert set(failed.value.failures) == {1, 2}
        assert server.tokens() == answer(policy)
        with serving(folder, "--data-parallel-size", "2") as again:
            assert again.world_size() == 2
            connect_servers(scheme, again, first_worker=1)
            assert again.weight_version() == "3"
            assert again.tokens() == answer(policy)
            train(policy, 0.05)
            assert scheme.send().encoding == "patch"
            assert scheme.worker_versions == dict.fromkeys(range(3), 4)
            assert again.weight_version() == server.weight_version() == "4"
            with ThreadPoolExecutor() as clients:  # so that both replicas answer
                answers = list(clients.map(Server.tokens, [server, *[again] * 8]))
            assert answers == [answer(policy)] * 9


def test_an_llm_in_the_program(folder: Path, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM, SamplingParams

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(ENVIRONMENT["PYTHONPATH"])  # vLLM's processes get this process's path
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=512,
        block_size=32,
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},
        weight_transfer_config={"backend": "weight_update"},
    )
    local = LocalLLM(llm)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        scheme.init_on_sender(model=policy, num_workers=1)
        info = init_info(scheme)
        connect_with(scheme, [lambda: local.init_weight_transfer_engine(info)])
        for version in range(3):
            if version:
                train(policy, 0.05)
                handle = scheme.send_async()
                local.update(handle.version)
                handle.wait(60.0)
            (found,) = llm.generate([{"prompt_token_ids": PROMPT}], greedy)
            assert list(found.outputs[0].token_ids) == answer(policy)
            (span,) = found.outputs[0].weight_versions
            assert span.version == (str(version) if version else "default")
    llm.llm_engine.engine_core.shutdown()
