"""The adapters for SGLang, without SGLang; test/engines has tests with the real package.

The stand-ins have the methods and routes of SGLang 0.5.23 that the adapters use, with the same arguments and
answers. They load by the real function of ours, into a model that fuses weights as SGLang's models do.
"""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import pickle
import sys
import threading
import types
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import connect_pair
from torch import nn

from weight_update import (
    BucketEncoding,
    LifecycleError,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    UnreachableMemoryError,
    WeightChange,
    WeightStrategy,
)
from weight_update.engines import SGLangEngine, SGLangServer
from weight_update.engines.exclusive import batches
from weight_update.engines.sglang import load
from weight_update.testing import EngineContract
from weight_update.testing.processes import eventually

WAIT = 20.0
LOADER = "weight_update.engines.sglang.load"


class Model(nn.Module):
    """One of two tensor-parallel ranks, with a pipeline stage of two layers.

    It stores q and k as one parameter, out as it is, a half of the rows of split and of the columns of cut,
    and turned in another form.
    """

    def __init__(self, rank: int = 0, stage: int = 0) -> None:
        super().__init__()
        self.rank, self.stage = rank, stage
        self.layers = nn.ModuleList([nn.Module() for _ in range(2)])
        for layer in self.layers:
            layer.qk = nn.Parameter(torch.zeros(12, 6))
            layer.out = nn.Parameter(torch.zeros(6, 6))
            layer.split = nn.Parameter(torch.zeros(4, 6))
            layer.cut = nn.Parameter(torch.zeros(6, 4))
            layer.turned = nn.Parameter(torch.zeros(6, 4))
        self.loads: list[str] = []

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.loads.append(name)
            number, kind = int(name.split(".")[1]) - 2 * self.stage, name.split(".")[2]
            if number not in (0, 1):
                continue
            layer = self.layers[number]
            if kind in "qk":
                rows = slice(0, 8) if kind == "q" else slice(8, 12)
                layer.qk.data[rows].copy_(weight)
            elif kind == "split":
                layer.split.data.copy_(weight.narrow(0, 4 * self.rank, 4))
            elif kind == "cut":
                layer.cut.data.copy_(weight.narrow(1, 4 * self.rank, 4))
            elif kind == "turned":
                layer.turned.data.copy_(weight.t())
            else:
                layer.out.data.copy_(weight)


class Computing(Model):
    """Computes from its weights when they are loaded, as SGLang's models with latent attention do."""

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.compute()

    def compute(self) -> None:
        self.derived = self.layers[0].out.detach() * 2


class Deriving(Computing):
    """Does so in a method that SGLang calls, too."""

    def post_load_weights(self) -> None:
        self.compute()


class Latent(nn.Module):
    """Makes one parameter of two weights that come with one call, as SGLang's models of DeepSeek do."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(6, 4))
        self.norm = nn.Parameter(torch.zeros(5))
        self.loads: list[str] = []

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        waiting = {}
        for name, weight in weights:
            self.loads.append(name)
            if "norm" in name:
                self.norm.data.copy_(weight)
            elif "attention" in name:
                waiting[name] = weight
        if len(waiting) == 2:
            self.fused.data.copy_(torch.cat([*waiting.values()]))

    def post_load_weights(self) -> None:
        """Compute nothing."""


def latent_source() -> nn.Module:
    """Return weights for ``Latent``, of which ``kv`` never changes."""
    parts = {"q": nn.Linear(4, 4, bias=False), "norm": nn.LayerNorm(5, bias=False)}
    layer = nn.ModuleDict({**parts, "kv": nn.Linear(4, 2, bias=False)})
    return nn.ModuleDict({"attention": layer, "head": nn.Linear(8, 8, bias=False)})


class Source(nn.Module):
    """The trainer's weights, each by itself."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(1)
        shapes = {"q": (8, 6), "k": (4, 6), "out": (6, 6), "split": (8, 6), "cut": (6, 8), "turned": (4, 6)}
        self.layers = nn.ModuleList(
            nn.ParameterDict({kind: nn.Parameter(torch.randn(shape)) for kind, shape in shapes.items()})
            for _ in range(layers)
        )

    def change(self) -> None:
        """Change two elements of each weight, one in each half."""
        with torch.no_grad():
            for weight in self.parameters():
                weight.view(-1)[torch.randint(weight.numel() // 2, ())] += 1.0
                weight.view(-1)[-1] += 1.0


class StandInScheduler:
    """An SGLang scheduler, in one process."""

    def __init__(self) -> None:
        self.model, self.calls, self.session = Model(), [], False
        self.weight_version, self.fails, self.transforms = "default", "", False
        self.others: list[Model] = []  # of other tensor-parallel ranks
        self.late: list[Model] = []  # of a second pipeline stage, which loads after the answer of the first
        self.info = {"version": "0.5.23", "tp_size": 1, "custom_weight_loader": [LOADER]}

    def call(self, name: str, **body: Any) -> tuple[bool, str]:
        self.calls.append(name)
        if name == self.fails:
            return False, f"{name} does not work today"
        if name == "begin_weight_update":
            if self.session:
                return False, "a weight-update session is already open; call end_weight_update() first"
            self.session = True
        elif name == "end_weight_update":
            if not self.session:
                return False, "no weight-update session is open; call begin_weight_update() first"
            self.session = False
            if self.transforms:
                self.model.layers[0].out.data.copy_(self.model.layers[0].out.data.flip(0))
        elif name == "update_weights_from_tensor":
            assert self.session
            assert body["load_format"] == LOADER
            assert not body["flush_cache"]
            self.load(body["named_tensors"])
        elif name == "update_weight_version":
            assert body["abort_all_requests"] is False
            self.weight_version = body["new_version"]
        return True, "Success"

    def load(self, named: Any) -> None:
        for model in (self.model, *self.others):
            load(model, named)
        for model in self.late:
            threading.Timer(0.05, load, (model, named)).start()


class StandInEngine(StandInScheduler):
    """``sglang.Engine``."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), self

    def get_server_info(self) -> dict[str, Any]:
        return self.info

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        return self.call("begin_weight_update")

    def end_weight_update(self) -> tuple[bool, str]:
        return self.call("end_weight_update")

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        named = pickle.loads(pickle.dumps(named_tensors))
        return self.call(
            "update_weights_from_tensor",
            named_tensors=named,
            load_format=load_format,
            flush_cache=flush_cache,
        )

    def flush_cache(self) -> SimpleNamespace:
        success, _ = self.call("flush_cache")
        return SimpleNamespace(success=success, message="")

    async def update_weight_version(self, request: Any) -> None:
        self.call("update_weight_version", **vars(request))

    def generate(self, prompt: Any) -> dict[str, str]:
        return {"text": prompt}


def answer_of(route: str, success: bool, message: str) -> tuple[int, Any]:
    """Return status and content of SGLang's answer; that of ``/flush_cache`` is no JSON."""
    if success and route == "flush_cache":
        return 200, "Cache flushed.\n"
    return 200 if success else 400, {"success": success, "message": message}


class StandInServer(StandInScheduler):
    """SGLang's HTTP server with an API key for updates."""

    def __init__(self) -> None:
        super().__init__()
        self.paused, self.mode, self.held = False, None, threading.Event()
        scheduler = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                """Say nothing."""

            def reply(self, status: int, content: Any) -> None:
                text = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                self.reply(200, scheduler.info) if self.path == "/server_info" else self.reply(
                    404, "Not Found"
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers.get("Authorization") != "Bearer secret":
                    return self.reply(401, {"error": "Unauthorized"})
                route = self.path.lstrip("/").partition("?")[0]
                # With a timeout, SGLang waits for all requests, in vain for those that were retracted.
                scheduler.mode = body.get("mode", scheduler.mode)
                assert ("timeout=" in self.path) is (route == "flush_cache" and scheduler.mode == "abort")
                if route == "flush_cache" and scheduler.fails == "hangs":
                    scheduler.held.wait(WAIT)
                if route in ("pause_generation", "continue_generation"):
                    scheduler.paused = route == "pause_generation"
                    scheduler.calls.append(route)
                    if (route, scheduler.fails) == ("pause_generation", "pause hangs"):
                        scheduler.held.wait(WAIT)
                    return self.reply(200, {"status": "ok"})
                if "serialized_named_tensors" in body:
                    one, *_ = body.pop("serialized_named_tensors")
                    body["named_tensors"] = pickle.loads(base64.b64decode(one, validate=True))
                assert scheduler.paused
                return self.reply(*answer_of(route, *scheduler.call(route, **body)))

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        # shutdown() waits for an interval.
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.held.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    io_struct = types.ModuleType("sglang.srt.managers.io_struct")
    io_struct.UpdateWeightVersionReqInput = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    made = StandInEngine() if request.param == "engine" else StandInServer()
    yield made
    made.loop.close() if request.param == "engine" else made.close()


def adapter(stand_in: Any, **options: Any) -> Any:
    if isinstance(stand_in, StandInServer):
        return SGLangServer(stand_in.url, **{"admin_api_key": "secret", "timeout": WAIT, **options})
    return SGLangEngine(stand_in, **options)


@pytest.fixture
def connected() -> Iterator[Any]:
    schemes = []

    def connect(source: Any, engine: Any, encoding: Any, **options: Any) -> Any:
        scheme = MemoryWeightSyncScheme(
            WeightStrategy("state_dict", encoding=encoding, **options), timeout=WAIT
        )
        schemes.append(scheme)
        schemes.append(connect_pair(scheme, source, engine))
        return scheme

    yield connect
    for scheme in reversed(schemes):
        scheme.shutdown()


def assert_loaded(model: Model, source: Source) -> None:
    expected = Model(model.rank, model.stage)
    expected.load_weights(list(source.state_dict().items()))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected.state_dict()[name]), name


both = pytest.mark.parametrize("stand_in", ["engine", "server"], indirect=True)


@both
@pytest.mark.parametrize("batch_bytes", [1, 300, 1 << 20])
def test_patches_are_written_in_place(stand_in: Any, connected: Any, batch_bytes: int) -> None:
    source, engine = Source(), adapter(stand_in, batch_bytes=batch_bytes)
    scheme = connected(source, engine, PatchEncoding())
    assert_loaded(stand_in.model, source)
    for version in range(1, 4):
        stand_in.model.loads.clear()
        source.change()
        assert scheme.send().encoding == "patch"
        assert_loaded(stand_in.model, source)
        assert engine.last_patch == {name: not name.endswith("turned") for name in source.state_dict()}
        assert stand_in.model.loads == ["layers.0.turned", "layers.1.turned"]
        assert (engine.version, stand_in.weight_version) == (version, str(version))


@both
def test_each_process_writes_its_part(stand_in: Any, connected: Any) -> None:
    """Two tensor-parallel ranks have halves of a weight, and of two pipeline stages only one has a part."""
    stand_in.others, stand_in.late = [Model(rank=1)], [Model(0, stage=1), Model(1, stage=1)]
    stand_in.info.update(tp_size=2, pp_size=2)
    source, engine = Source(layers=4), adapter(stand_in, batch_bytes=300)
    scheme = connected(source, engine, PatchEncoding())
    for _ in range(2):
        for model in (stand_in.model, *stand_in.others, *stand_in.late):
            assert_loaded(model, source)
            model.loads.clear()
        source.change()
        scheme.send()
        assert engine.last_patch == {name: not name.endswith("turned") for name in source.state_dict()}
    for model in (stand_in.model, *stand_in.others, *stand_in.late):
        assert_loaded(model, source)
        assert model.loads == [f"layers.{number}.turned" for number in range(4)]


@both
def test_a_weight_that_no_process_has(stand_in: Any, connected: Any) -> None:
    """It is not counted as written in place."""
    source, engine = Source(layers=3), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    source.change()
    scheme.send()
    assert engine.last_patch["layers.1.out"]
    assert not engine.last_patch["layers.2.out"]


@both
def test_a_trainer_with_another_dtype(stand_in: Any, connected: Any) -> None:
    """Its elements are cast to SGLang's dtype, as a load does it."""
    connected(Source(), adapter(stand_in), PatchEncoding())
    source = Source().bfloat16()
    engine = adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    source.change()
    assert scheme.send().encoding == "patch"
    assert engine.last_patch["layers.0.cut"]
    assert_loaded(stand_in.model, source)


@both
def test_a_pipeline_stage_that_loads_later(stand_in: Any, connected: Any) -> None:
    """Its memory is not written until it has read it."""
    stand_in.late, stand_in.info["pp_size"] = [Model()], 2
    source, engine = Source(), adapter(stand_in, batch_bytes=300)
    scheme = connected(source, engine, PatchEncoding())
    for _ in range(2):
        source.change()
        scheme.send()
        for model in (stand_in.model, *stand_in.late):
            assert_loaded(model, source)


@both
def test_without_loads_changes_each_update_loads_all_weights(stand_in: Any, connected: Any) -> None:
    stand_in.transforms = True
    source, engine = Source(), adapter(stand_in, loads_changes=False)
    scheme = connected(source, engine, PatchEncoding())
    stand_in.model.loads.clear()
    source.change()
    assert scheme.send().encoding == "patch"
    assert stand_in.model.loads == list(source.state_dict())
    assert engine.last_patch == {}


@both
@pytest.mark.parametrize("in_chunks", [False, True], ids=["staged", "in chunks"])
def test_the_calls_of_an_update(stand_in: Any, connected: Any, in_chunks: bool) -> None:
    source, engine = Source(), adapter(stand_in, loads_in_chunks=in_chunks)
    scheme = connected(source, engine, BucketEncoding(64), max_in_flight=2 if in_chunks else None)
    stand_in.calls.clear()
    source.change()
    scheme.send()
    assert_loaded(stand_in.model, source)
    calls = [call for call in stand_in.calls if call != "update_weights_from_tensor"]
    expected = ["begin_weight_update", "end_weight_update", "flush_cache", "update_weight_version"]
    if isinstance(stand_in, StandInServer):
        expected = ["pause_generation", *expected, "continue_generation"]
    assert calls == expected


def test_small_weights_travel_together() -> None:
    sizes = {"a": 40, "b": 60, "c": 1, "d": 200, "e": 0, "f": 100}
    weights = [(name, torch.empty(size, dtype=torch.uint8)) for name, size in sizes.items()]
    found = ["".join(name for name, _ in batch) for batch in batches(([weight] for weight in weights), 100)]
    assert found == ["ab", "c", "d", "ef"]


@pytest.mark.parametrize("stand_in", ["server"], indirect=True)
def test_an_answer_that_is_lost_when_an_update_begins(stand_in: Any, connected: Any) -> None:
    """The server generates with an open session no more than with half an update."""
    engine = adapter(stand_in)
    scheme = connected(Source(), engine, PatchEncoding())
    begin = engine._calls.begin

    def lose_the_answer() -> None:
        begin()
        raise TransportError("the connection was cut")

    engine._calls.begin = lose_the_answer
    with pytest.raises(SyncFailedError, match="the connection was cut"):
        scheme.send()
    assert not stand_in.session
    assert not stand_in.paused
    engine._calls.begin = begin
    scheme.send()


@both
def test_a_load_that_fails(stand_in: Any, connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())

    def broken(weights: Any) -> None:
        raise ZeroDivisionError("no such layer")

    with monkeypatch.context() as patched:
        patched.setattr(stand_in.model, "load_weights", broken)
        source.change()
        with pytest.raises(SyncFailedError, match="ZeroDivisionError: no such layer"):
            scheme.send()
    assert engine.version is None
    assert not stand_in.session
    if isinstance(stand_in, StandInServer):
        assert stand_in.paused, "a mixture of weights is not used"
    else:
        with pytest.raises(LifecycleError, match="no complete version"):
            engine.generate("hello")
    scheme.send()
    assert_loaded(stand_in.model, source)
    assert engine.version == 2
    if isinstance(stand_in, StandInEngine):
        assert engine.generate("hello") == {"text": "hello"}
    else:
        assert not stand_in.paused


@both
def test_an_update_that_does_not_begin(stand_in: Any, connected: Any) -> None:
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    stand_in.fails = "begin_weight_update"
    with pytest.raises(SyncFailedError, match="begin_weight_update does not work today"):
        scheme.send()
    assert engine.version == 0, "the version before stays in force"
    stand_in.fails = ""
    source.change()
    scheme.send()
    assert_loaded(stand_in.model, source)


@pytest.mark.parametrize(
    ("stand_in", "route"),
    [("engine", "flush_cache"), ("server", "flush_cache"), ("server", "update_weight_version")],
    indirect=["stand_in"],
)
def test_a_failure_after_the_end_of_the_session(
    stand_in: Any, connected: Any, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The session is closed by then, which is no failure of ``abort_update``."""
    scheme = connected(Source(), adapter(stand_in), PatchEncoding())
    stand_in.fails = route
    with pytest.raises(SyncFailedError, match=route):
        scheme.send()
    assert "abort_update" not in caplog.text
    assert not stand_in.session


@both
def test_a_session_that_another_receiver_left_open(stand_in: Any, connected: Any) -> None:
    source = Source()
    stand_in.session = True
    connected(source, adapter(stand_in), PatchEncoding())
    assert_loaded(stand_in.model, source)


@both
def test_weights_that_sglang_transforms(stand_in: Any, connected: Any) -> None:
    """Each update loads all weights of the module, and those stored in another form; others are patched."""
    stand_in.transforms = True
    stand_in.others, stand_in.info["tp_size"] = [Model(rank=1)], 2
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    transformed = [name for name in source.state_dict() if name.startswith("layers.0")] + ["layers.1.turned"]
    for number in range(3):
        stand_in.model.loads.clear()
        with torch.no_grad():
            source.layers[1]["out"].add_(1.0)
            source.layers[1]["out"][0, 0] -= number  # a patch of single elements, and one of all
            source.layers[0]["q"][1, 1] += number
        assert scheme.send().encoding == "patch"
        assert sorted(stand_in.model.loads) == sorted(transformed)
        assert engine.last_patch == {**dict.fromkeys(transformed, False), "layers.1.out": True}
        assert torch.equal(stand_in.model.layers[0].out, source.layers[0]["out"].flip(0))
        for model in (stand_in.model, *stand_in.others):
            assert torch.equal(model.layers[0].qk[:8], source.layers[0]["q"])
            assert torch.equal(model.layers[1].out, source.layers[1]["out"])


@both
def test_parameters_that_sglang_adds_and_removes(stand_in: Any, connected: Any) -> None:
    """It stores a weight as a packed parameter, and loads it from there again."""
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    layer = stand_in.model.layers[1]
    layer.packed, layer.cut = nn.Parameter(layer.cut.detach().clone()), nn.Parameter(layer.cut.detach()[:0])
    del layer._parameters["split"]
    layer.split = layer.packed.new_empty(4, 6)
    with torch.no_grad():
        source.layers[0]["out"][0, 0] = 7.0
    layer.cut = nn.Parameter(torch.zeros(6, 4))  # as SGLang's begin_weight_update does
    scheme.send()
    assert torch.equal(layer.cut, source.layers[1]["cut"][:, :4])
    assert engine.last_patch["layers.0.out"]
    assert not engine.last_patch["layers.1.out"]


@both
def test_a_patch_without_weights_that_sglang_transforms(stand_in: Any, connected: Any) -> None:
    stand_in.transforms = True
    engine = adapter(stand_in)
    connected(Source(), engine, PatchEncoding())
    weight = torch.ones(6, 6)
    engine.begin_update(1)
    with pytest.raises(RuntimeError, match=r"transforms these .*needs them: layers\.0\.cut, layers\.0\.k,"):
        engine.load_changes(iter([WeightChange("layers.0.out", None, weight, weight)]), 0)
    engine.abort_update(1)


@both
@pytest.mark.parametrize("kind", [Computing, Deriving])
def test_models_that_compute_from_their_weights(stand_in: Any, connected: Any, kind: Any) -> None:
    """SGLang computes again only in load_weights(), so nothing is written past it."""
    stand_in.model = kind()
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    source.change()
    assert scheme.send().encoding == "patch"
    assert torch.equal(stand_in.model.derived, source.layers[0]["out"] * 2)
    assert not any(engine.last_patch.values())


@both
@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("encoding", "in_chunks"), [(PatchEncoding(), False), (BucketEncoding(bucket_size=64), True)]
)
def test_weights_that_are_fused_if_they_come_together(
    stand_in: Any, connected: Any, batch_bytes: int, encoding: Any, in_chunks: bool
) -> None:
    stand_in.model, source = Latent(), latent_source()
    attention: Any = source["attention"]
    scheme = connected(
        source, adapter(stand_in, batch_bytes=batch_bytes, loads_in_chunks=in_chunks), encoding
    )
    for _ in range(4):
        assert torch.equal(stand_in.model.fused, torch.cat([attention["q"].weight, attention["kv"].weight]))
        assert torch.equal(stand_in.model.norm, attention["norm"].weight)
        with torch.no_grad():
            attention["q"].weight[1, 1] += 1.0
            attention["norm"].weight[2] += 1.0
        scheme.send()
    assert torch.equal(stand_in.model.fused, torch.cat([attention["q"].weight, attention["kv"].weight]))


@both
def test_a_weight_that_one_process_cannot_take_in_parts(stand_in: Any, connected: Any) -> None:
    """It is loaded as a whole, though the other process has written its elements in place."""
    stand_in.others, stand_in.info["tp_size"] = [Computing(rank=1)], 2
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    source.change()
    assert scheme.send().encoding == "patch"
    assert not any(engine.last_patch.values())
    for model in (stand_in.model, *stand_in.others):
        assert_loaded(model, source)


@both
@pytest.mark.parametrize("patches", [0, 1, 2])
@pytest.mark.parametrize("transforms", [False, True])
def test_weights_that_sglang_has_discarded(
    stand_in: Any, connected: Any, patches: int, transforms: bool
) -> None:
    """As after release_memory_occupation; the receiver has SGLang load its copy of all weights."""
    stand_in.transforms = transforms
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    for number in range(patches + 3):
        source.change()
        if number == patches:
            with torch.no_grad():
                for parameter in stand_in.model.parameters():
                    parameter.zero_()
            stand_in.model.loads.clear()
        assert scheme.send().encoding == "patch"
        assert engine.version == number + 1
        if number == patches:
            assert set(stand_in.model.loads) == set(source.state_dict())
        if transforms:
            stand_in.model.layers[0].out.data.copy_(stand_in.model.layers[0].out.data.flip(0))
        assert_loaded(stand_in.model, source)
        if transforms:
            stand_in.model.layers[0].out.data.copy_(stand_in.model.layers[0].out.data.flip(0))
    assert engine.last_patch["layers.1.out"], "written in place again"


@both
@pytest.mark.parametrize("change", ["gone", "another shape"])
def test_a_parameter_that_sglang_has_replaced(stand_in: Any, connected: Any, change: str) -> None:
    """The receiver has SGLang load all weights once, and later patches are written in place again."""
    stand_in.model.scale = nn.Parameter(torch.ones(4))
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    for number in range(5):
        source.change()
        if number == 2:
            stand_in.model.scale = None if change == "gone" else nn.Parameter(torch.ones(2, 2))
        stand_in.model.loads.clear()
        assert scheme.send().encoding == "patch"
        whole = set(source.state_dict()) if number == 2 else {"layers.0.turned", "layers.1.turned"}
        assert set(stand_in.model.loads) == whole
        stored, scale = stand_in.model, stand_in.model.scale
        stored.scale = None
        assert_loaded(stored, source)
        stored.scale = scale


@both
def test_weights_that_sglang_stores_elsewhere(stand_in: Any, connected: Any) -> None:
    """As after the experts of a mixture have changed places."""
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    for number in range(4):
        source.change()
        if number == 1:
            for layer in stand_in.model.layers:
                layer.out.data = torch.zeros(6, 6).t()
        assert scheme.send().encoding == "patch"
        assert_loaded(stand_in.model, source)
    assert engine.last_patch["layers.1.out"], "written in place again"


@both
def test_weights_with_names_that_sglang_does_not_know(
    stand_in: Any, connected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(layers=3)
    scheme = connected(source, adapter(stand_in), PatchEncoding())
    (warning,) = [one.getMessage() for one in caplog.records if "does not use" in one.getMessage()]
    assert "does not use 6 weights: layers.2.cut, layers.2.k, layers.2.out" in warning
    caplog.clear()
    source.change()
    scheme.send()
    assert not [one for one in caplog.records if "does not use" in one.getMessage()]


@both
def test_updates_leave_random_numbers_alone(stand_in: Any, connected: Any) -> None:
    """In SGLang's processes, which sample tokens, and in a program that runs an engine."""
    source, engine = Source(), adapter(stand_in)
    scheme = connected(source, engine, PatchEncoding())
    for _ in range(3):
        source.change()
        before = torch.get_rng_state()
        assert scheme.send().encoding == "patch"
        assert torch.equal(torch.get_rng_state(), before)


@both
def test_a_server_that_was_started_again(stand_in: Any, connected: Any) -> None:
    source = Source()
    scheme = connected(source, adapter(stand_in), PatchEncoding())
    stand_in.model = Model()
    source.change()
    with pytest.raises(SyncFailedError, match="started again"):
        scheme.send()
    scheme.send()
    assert_loaded(stand_in.model, source)


@both
def test_a_server_without_our_loader(stand_in: Any) -> None:
    stand_in.info["custom_weight_loader"] = []
    with pytest.raises(RuntimeError, match=f"--custom-weight-loader {LOADER}"):
        adapter(stand_in)


@both
@pytest.mark.parametrize(
    ("kind", "why"), [("tp", "memory"), ("pp", r"memory, or .* took longer than 0\.1 s")]
)
def test_ranks_that_do_not_answer(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    monkeypatch.setattr("weight_update.engines.sglang.session._STAGE_SECONDS", 0.1)
    stand_in.info[f"{kind}_size"] = 2
    engine = adapter(stand_in)
    engine.begin_update(0)
    with pytest.raises(UnreachableMemoryError, match=rf"1 of SGLang's 2 processes.*{why}: .*same container"):
        engine.load_weights(iter([("layers.0.out", torch.ones(6, 6))]))
    engine.abort_update(0)


@pytest.mark.parametrize("stand_in", ["server"], indirect=True)
def test_errors_of_the_server(stand_in: Any) -> None:
    engine = adapter(stand_in, admin_api_key="wrong")
    with pytest.raises(RuntimeError, match=r"pause_generation answered 401: give .*admin_api_key="):
        engine.begin_update(0)
    with pytest.raises(RuntimeError, match=r"answered 404: .*SGLang 0\.5\.23 or newer"):
        SGLangServer(f"{stand_in.url}/elsewhere")
    with pytest.raises(ValueError, match="pause='in_place'"):
        SGLangServer(stand_in.url, pause="in_place")  # type: ignore[arg-type]
    stand_in.close()
    with pytest.raises(TransportError, match=r"no SGLang server answers at .*refused.*http://host:8000"):
        SGLangServer(stand_in.url)
    with pytest.raises(TransportError, match="give a URL such as http://host:8000"):
        SGLangServer("localhost")


@pytest.mark.parametrize("stand_in", ["server"], indirect=True)
@pytest.mark.parametrize("info", [{}, [], "hello"])
def test_a_server_that_is_not_sglang(stand_in: Any, info: Any) -> None:
    stand_in.info = info
    with pytest.raises(RuntimeError, match=r"http://127.* answered, but is not SGLang"):
        SGLangServer(stand_in.url)


@pytest.mark.parametrize("stand_in", ["server"], indirect=True)
def test_a_server_that_hangs(stand_in: Any) -> None:
    engine = adapter(stand_in, timeout=0.2)
    stand_in.fails = "hangs"
    engine.begin_update(0)
    with pytest.raises(SyncTimeoutError, match=r"flush_cache.* took longer than 0\.2 s \(raise timeout=\)"):
        engine.finish_update(0)


def test_an_order_for_another_file(tmp_path: Any) -> None:
    """The loader opens nothing but our memory, and does not raise: SGLang would end the server."""
    victim = tmp_path / "victim"
    victim.write_text("")
    order = {"kind": "remember", "schema": {}, "data": str(victim), "answers": str(victim)}
    load(Model(), [(json.dumps(order), torch.empty(0))])
    assert victim.read_text() == ""


@both
def test_patches_of_whole_weights(stand_in: Any, connected: Any) -> None:
    """A patch that replaces all elements of a weight, and one of a single element after it."""
    engine = adapter(stand_in)
    connected(Source(), engine, PatchEncoding())
    name, weight = "layers.0.out", torch.ones(6, 6)
    engine.begin_update(1)
    engine.load_changes(iter([WeightChange(name, None, weight, weight)]), 0)
    engine.finish_update(1)
    assert engine.last_patch == {name: False}
    weight[2, 3] = 7.0
    engine.begin_update(2)
    engine.load_changes(iter([WeightChange(name, torch.tensor([15]), torch.tensor([7.0]), weight)]), 1)
    engine.finish_update(2)
    assert torch.equal(stand_in.model.layers[0].out, weight)


@pytest.mark.parametrize("stand_in", ["server"], indirect=True)
def test_a_pause_that_takes_too_long(stand_in: Any) -> None:
    """The server may pause after the timeout; it continues with the version before."""
    engine = adapter(stand_in)
    engine.begin_update(0)
    engine.finish_update(0)
    stand_in.fails, engine._calls._timeout = "pause hangs", 0.2
    with pytest.raises(SyncTimeoutError, match="pause_generation took longer"):
        engine.begin_update(1)
    both = ["continue_generation", "pause_generation"]  # its threads may note them in any order
    assert eventually(lambda: sorted(stand_in.calls[-2:]) == both)
    assert engine.version == 0


@pytest.mark.parametrize("stand_in", ["server"], indirect=True)
def test_a_proxy_for_the_web_is_not_used(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)  # it would keep the proxies of an earlier test
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert adapter(stand_in).version is None


@both
class TestContract(EngineContract):
    """The contract of engines, with a model that fuses weights."""

    @pytest.fixture(autouse=True)
    def _stand_in(self, stand_in: Any) -> None:
        self.stand_in = stand_in

    def make_engine(self) -> Any:
        return adapter(self.stand_in)

    def make_source(self) -> Source:
        """Return weights of which one process has all of each."""
        source = Source()
        for layer in source.layers:
            del layer["split"], layer["cut"]
        return source

    def read_weights(self, engine: Any) -> dict[str, torch.Tensor]:
        found = {}
        for number, layer in enumerate(self.stand_in.model.layers):
            parts = {"q": layer.qk[:8], "k": layer.qk[8:], "out": layer.out, "turned": layer.turned.t()}
            found |= {f"layers.{number}.{name}": weight for name, weight in parts.items()}
        return found
