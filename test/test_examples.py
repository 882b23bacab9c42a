"""The examples run as a reader would run them, and say what the text around them promises."""

import re
import subprocess
import textwrap
from pathlib import Path

import pytest
from interpreters import run_python
from marks import slow

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, *args: str, timeout: float = 110.0, **how: bool) -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own."""
    return run_python(ROOT / "examples" / name, *args, timeout=timeout, **how)


def succeed(name: str, *args: str, timeout: float = 110.0, **how: bool) -> str:
    """Return the output of an example; fail if it fails or writes to stderr."""
    done = run(name, *args, timeout=timeout, **how)
    assert done.returncode == 0, done.stderr
    complaints = [
        line for line in re.split(r"[\r\n]", done.stderr) if line.strip() and "frames/s" not in line
    ]
    assert complaints in ([], ["0 frames [00:00, ? frames/s]"]), done.stderr
    return done.stdout


def is_plot(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


SPAWN = pytest.mark.parametrize("quick_spawn", [True, slow(False)], ids=["from a forkserver", "by spawn"])


@SPAWN
def test_cartpole_gets_through(quick_spawn: bool, tmp_path: Path) -> None:
    args = ["--smoke", "--workers", "2", "--out", str(tmp_path)]
    printed = succeed("train_cartpole.py", *args, quick_spawn=quick_spawn)
    assert re.search(r"updates +6\n", printed)
    assert re.search(r"stale frames +0 of 3,072\n", printed)
    for stage in ("extract", "encode", "send", "ack", "an update in all", "stall of a worker"):
        median, worst = map(float, re.search(rf"{stage} +(\S+) +(\S+)\n", printed).groups())
        assert 0.0 <= median <= worst < 30_000.0
    assert is_plot(tmp_path / "train_cartpole.png")


@pytest.mark.slow
def test_the_first_program_of_the_readme(tmp_path: Path) -> None:
    """With workers started by spawn, which import the program."""
    block = re.search(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", (ROOT / "README.rst").read_text())
    assert block is not None
    file = tmp_path / "program.py"
    program = textwrap.dedent(block[1]).replace("60_000", "60").replace("600", "20").replace("* 3", "* 2")
    file.write_text(WITH_SPAWN + program)
    done = run_python(file, quick_spawn=True)
    assert done.returncode == 0, done.stderr  # which has warnings of TorchRL
    assert re.findall(r"version (\d): .* 2 workers", done.stdout) == ["1", "2", "3"]


WITH_SPAWN = f"""
import multiprocessing, sys
sys.path.append({str(ROOT / "test" / "collectors")!r})
from collector_parts import Env as make_env, make_policy

multiprocessing.set_start_method("spawn", force=True)
policy = make_policy()


def train(policy, batch):
    pass


"""


@pytest.mark.slow
@pytest.mark.timeout(30)
def test_cartpole_names_its_choices() -> None:
    done = run("train_cartpole.py", "--scheme", "pigeon")
    assert done.returncode == 2
    assert "'pigeon' (choose from" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("scheme", ["shared_mem", "multiprocess"])
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_cartpole_is_solved(scheme: str, strategy: str, tmp_path: Path) -> None:
    args = ["--scheme", scheme, "--strategy", strategy, "--out", str(tmp_path)]
    printed = succeed("train_cartpole.py", *args, timeout=400.0)
    verdict = re.search(r"CartPole-v1 solved: mean return (\d+\.\d)", printed)
    assert verdict
    assert float(verdict[1]) > 450
    assert is_plot(tmp_path / "train_cartpole.png")


@SPAWN
@pytest.mark.parametrize("scheme", ["shared_mem", slow("multiprocess")])  # the same but for the class
def test_standalone(scheme: str, quick_spawn: bool) -> None:
    printed = succeed("standalone.py", "--scheme", scheme, quick_spawn=quick_spawn)
    lines = printed.splitlines()
    assert lines[-2:] == [
        f"worker {index}: ended with version 5, weights equal to the trainer's" for index in range(2)
    ]
    # not by lines: without a buffer, processes may write between the text of another one and its end of line
    assert sorted(re.findall(r"worker (\d): connected, version \d", printed)) == ["0", "1"]
    rollouts = re.findall(r"worker 1: rollout by versions \[(.*?)\]", printed)
    assert rollouts, printed
    assert all(len(set(versions.split(", "))) == 1 for versions in rollouts), printed


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "updates"), [("dense", 20), ("patch", 20), ("dense", 0)])
def test_distributed(encoding: str, updates: int) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", str(ROOT / "examples/distributed.py")]
    done = run_python(*command, "--updates", str(updates), "--encoding", encoding)
    assert done.returncode == 0, done.stderr
    assert f"trainer: the workers have {{0: {updates}, 1: {updates}}}" in done.stdout
    assert sorted(re.findall(rf"worker (\d): version {updates} ", done.stdout)) == ["0", "1"]
    assert "Traceback" not in done.stderr
    assert "[W" not in done.stderr, "no warnings from the C++ side at the end"


@pytest.mark.slow  # test_sharded has trainers of several ranks, with FSDP too
@pytest.mark.parametrize("updates", [0, 5])
def test_fsdp_trainer(updates: int) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "4", str(ROOT / "examples/fsdp_trainer.py")]
    done = run_python(*command, "--updates", str(updates), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    have = rf"trainer (\d): the workers have {{0: {updates}, 1: {updates}}}"
    assert sorted(re.findall(have, done.stdout)) == ["0", "1"]
    assert sorted(re.findall(rf"worker (\d): version {updates}", done.stdout)) == ["0", "1"]
    assert f"trainer 0: version {updates}: bucket" in done.stdout
    assert "holds 59,648 of 119,296 weights" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def ray_lines(name: str, *args: str) -> list[str]:
    """Return the output of a Ray example; Ray itself writes to stderr."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
    done = run(name, *args)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("data", ["torch", "object_store"])
def test_ray_rollout(data: str) -> None:
    lines = ray_lines("ray_rollout.py", "--updates", "6", "--kill-at", "3", "--episodes", "1", "--data", data)
    update = re.compile(r"update +(\d+): players \[(.*)\], versions \[(.*)\], return +(\S+), (.*)")
    updates = [found.groups() for line in lines if (found := update.fullmatch(line))]
    assert [int(number) for number, *_ in updates] == [1, 2, 3, 4, 5, 6]
    assert [players for _, players, *_ in updates[:4]] == ["0, 1"] * 3 + ["0"]
    assert all(int(version) == int(number) - 1 for number, _, version, *_ in updates)
    assert updates[0][-1].startswith("synchronized in")
    assert updates[2][-1] == "player 1 is gone, the others have version 3"
    assert "at the end players have {0: 6, 1: 6}" in lines


@pytest.mark.slow  # test_collectors_ray.py has the same in another form
def test_ray_module_transform() -> None:
    lines = ray_lines("ray_module_transform.py")
    assert lines == [
        f"version {version}: the scores are those of the trainer's model: True" for version in range(3)
    ]


@pytest.mark.slow
def test_multiple_models() -> None:
    def state(step: int, version: str = "") -> list[str]:
        return [f"  worker {idx}: actor of step {step}, critic of step {step}{version}" for idx in range(2)]

    refused = ["  refused: 0.weight: float32[64, 4]: shape [64, 5] in the weights given"]
    assert succeed("multiple_models.py").splitlines() == [
        "by hand",
        *state(0),
        *state(1),
        *refused,
        *state(1),
        "through a collector",
        *state(0, ", version 0"),
        *state(1, ", version 1"),
        *refused,
        *state(1, ", version 1"),
    ]


@SPAWN
@pytest.mark.parametrize("transport", ["files", slow("pipes")])
def test_custom_transports(transport: str, quick_spawn: bool) -> None:
    lines = succeed("custom_transport.py", "--transport", transport, quick_spawn=quick_spawn).splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["version 1", "version 2", "version 3"]
    assert lines[3:] == [f"worker {index}: version 3, the trainer's weights" for index in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("patch", "--values", "relative", "--compression", "zstd"),
        ("patch",),
        ("bucket",),
        ("dense",),
    ],
    ids=" ".join,
)
def test_patch_sync(args: tuple[str, ...]) -> None:
    lines = succeed("patch_sync.py", "--steps", "4", "--warmup", "4", "--encoding", *args).splitlines()
    update = re.compile(
        r"version +(\d+)  (\w+) +changed +(\S+)%  sent +(\S+) kB \(dense (\S+)\)  in +\S+ ms  reward 0\.\d+"
    )
    updates = [update.fullmatch(line).groups() for line in lines[:4]]
    assert [int(version) for version, *_ in updates] == [1, 2, 3, 4]
    assert {encoding for _, encoding, *_ in updates} == {args[0]}
    for _, encoding, changed, sent, dense in updates:
        if encoding == "patch":
            assert 0.0 < float(changed) < 20.0
            assert float(sent) < float(dense) / 3
        else:
            assert float(changed) == 100.0
            assert float(sent) >= float(dense)
    assert any(line.startswith("all 4 updates: ") for line in lines)
    assert lines[-2:] == [f"worker {index}: version 4, the trainer's weights in bf16" for index in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "option", "problem"),
    [
        ("patch_sync.py", "--steps=0", "--steps is at least 1, not 0"),
        ("patch_sync.py", "--steps=-3", "--steps is at least 1, not -3"),
        ("trainer_explorer.py", "--steps=0", "--steps is at least 1, not 0"),
        ("train_cartpole.py", "--workers=0", "--workers and --frames are at least 1"),
        ("train_cartpole.py", "--frames=0", "--workers and --frames are at least 1"),
        ("llm_rollout.py", "--updates=0", "--updates is at least 2: the reward"),
    ],
)
def test_numbers_that_are_too_small_are_refused(name: str, option: str, problem: str) -> None:
    done = run(name, option)
    assert done.returncode == 2
    assert f"error: {problem}" in done.stderr


@pytest.mark.slow
def test_llm_rollout() -> None:
    """The program itself fails if tokens are not those of a full reload, or if the reward does not rise."""
    pytest.importorskip(
        "transformers", reason='transformers is not installed: pip install "weight-update[examples]"'
    )
    *lines, last = succeed("llm_rollout.py").splitlines()
    line = re.compile(
        r"version (\d+): reward before 0\.\d+, log probabilities within 0\.0\d+ of the trainer's; "
        r"152 kB in \S+ ms; tokens as after a full reload"
    )
    assert [line.fullmatch(found)[1] for found in lines] == [str(number) for number in range(1, 13)]
    first, after = map(float, re.fullmatch(r"the reward rose from (\S+) to (\S+)", last).groups())
    assert after > first + 0.1


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("style", ["fixed", "all"])
def test_trainer_explorer(style: str, tmp_path: Path) -> None:
    picture = tmp_path / "lines.png"
    lines = succeed(
        "trainer_explorer.py",
        *["--style", style, "--steps", "8", "--picture", str(picture)],
        timeout=250.0,  # all styles need a minute of the processor
        quick_spawn=style == "fixed",
    ).splitlines()
    rows = [line for line in lines if line.startswith(("  explorer", "  trainer"))]
    assert len(rows) == (3 if style == "fixed" else 15)
    assert all("computes" in row for row in rows)
    assert is_plot(picture)
