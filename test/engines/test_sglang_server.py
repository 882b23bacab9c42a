"""SGLang's own HTTP server on the CPU is a receiver."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="make test-engines installs SGLang")

from sglang_parts import ENVIRONMENT, OPTIONS, PROMPT, answer_of, change, connected, sampling, trainer

from weight_update.engines import SGLangServer

pytestmark = pytest.mark.timeout(300)
START = 200.0  # seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arguments(folder: Path, port: int, **options: Any) -> list[str]:
    given = ["--model-path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    given += ["--api-key", "user", "--admin-api-key", "admin", "--skip-server-warmup"]
    for name, value in {**OPTIONS, **options}.items():
        given.append("--" + name.replace("_", "-"))
        given += [] if value is True else value if isinstance(value, list) else [str(value)]
    return given


def post(url: str, body: Any = None) -> Any:
    headers = {"Authorization": "Bearer user", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60.0)


def get(url: str, body: Any = None) -> Any:
    with post(url, body) as response:
        return json.loads(response.read() or b"null")


@contextmanager
def serving(folder: Path, architecture: str = "Qwen3ForCausalLM", **options: Any) -> Iterator[Any]:
    """Start a server; yield the trainer's model, and the URL."""
    from sglang.srt.utils import kill_process_tree

    source, port = trainer(folder, architecture), free_port()
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments(folder, port, **options)],
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    until = time.monotonic() + START
    try:
        while True:
            try:
                get(f"{url}/health")
                break
            except (urllib.error.URLError, ConnectionError):
                alive = process.poll() is None and time.monotonic() < until
                assert alive, log.read_text()[-5000:]
                time.sleep(0.5)
        yield source, url
    finally:
        kill_process_tree(process.pid)
        process.wait(30.0)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("model")) as found:
        yield found


def generate(url: str) -> Any:
    return get(f"{url}/generate", {"input_ids": PROMPT, "sampling_params": sampling()})


def test_tokens_after_patches(started: Any) -> None:
    source, url = started
    engine = SGLangServer(url, api_key="user", admin_api_key="admin")
    sender, receiver = connected(source, engine)
    for version in range(3):
        if version:
            change(source, version)
            assert sender.send().encoding == "patch"
            assert engine.last_patch["model.layers.1.self_attn.q_proj.weight"], "a part of qkv_proj, in place"
        for cached in (False, True):
            found = generate(url)
            assert found["output_ids"] == answer_of(source)
            assert found["meta_info"]["weight_version"] == str(version)
            assert (found["meta_info"]["cached_tokens"] > 0) is cached, "an update drops cached prefixes"
    assert get(f"{url}/model_info")["weight_version"] == "2"
    receiver.shutdown()
    sender.shutdown()


@pytest.mark.parametrize("split", ["tp_size", "pp_size"])
def test_two_ranks(tmp_path: Path, split: str) -> None:
    """Each rank writes its part of a weight in place, also if the weight is fused or cut by columns."""
    with serving(tmp_path, **{split: 2}) as (source, url):
        engine = SGLangServer(url, api_key="user", admin_api_key="admin")
        sender, receiver = connected(source, engine)
        assert generate(url)["output_ids"] == answer_of(source)
        for version in range(1, 5):
            change(source, version, share=0.01)
            assert sender.send().encoding == "patch"
            assert generate(url)["output_ids"] == answer_of(source)
            assert not [name for name, in_place in engine.last_patch.items() if not in_place]
            matrices = {name for name in source.state_dict() if "norm" not in name}
            assert engine.last_patch.keys() >= matrices
        receiver.shutdown()
        sender.shutdown()


def test_weights_that_sglang_transforms(tmp_path: Path) -> None:
    """Each update loads all weights of a transformed module, because SGLang transforms it again."""
    with serving(tmp_path, "FlippedQwen3ForCausalLM") as (source, url):
        engine = SGLangServer(url, api_key="user", admin_api_key="admin")
        sender, receiver = connected(source, engine)
        transformed = {
            name for name in source.state_dict() if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        }
        assert generate(url)["output_ids"] == answer_of(source)
        for version in range(1, 4):
            change(source.model.layers[0].mlp if version == 2 else source, version)
            assert sender.send().encoding == "patch"
            assert generate(url)["output_ids"] == answer_of(source)
            assert {name for name, in_place in engine.last_patch.items() if not in_place} == transformed
        receiver.shutdown()
        sender.shutdown()


@pytest.mark.parametrize("pause", ["retract", "abort"])
def test_a_request_that_runs_during_an_update(started: Any, pause: Any) -> None:
    source, url = started
    engine = SGLangServer(url, api_key="user", admin_api_key="admin", pause=pause)
    sender, receiver = connected(source, engine)
    begun, chunks = threading.Event(), []

    def read() -> None:
        body = {"input_ids": PROMPT, "sampling_params": sampling(400), "stream": True}
        with post(f"{url}/generate", body) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    chunks.append(json.loads(line[6:]))
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30.0)
    change(source, 10)
    sender.send()
    thread.join(60.0)
    found = chunks[-1]
    if pause == "retract":
        assert found["meta_info"]["completion_tokens"] == 400
    else:
        assert found["meta_info"]["finish_reason"]["type"] == "abort"
    assert generate(url)["output_ids"] == answer_of(source)
    receiver.shutdown()
    sender.shutdown()


@pytest.mark.parametrize(("user", "admin"), [("wrong", "admin"), ("user", "wrong"), ("user", None)])
def test_a_wrong_key(started: Any, user: str, admin: str | None) -> None:
    _, url = started
    with pytest.raises(RuntimeError, match=r"answered 401: give api_key= and admin_api_key="):
        SGLangServer(url, api_key=user, admin_api_key=admin).begin_update(0)
