"""``check``, ``models``, ``drafters``, help texts and real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

import draftwood
from draftwood import check as check_module
from draftwood.bench import split_methods
from draftwood.bench.records import parse_methods
from draftwood.check import TIE_TOLERANCE
from draftwood.config import DEFAULT_DRAFTER
from draftwood.drafters import drafter_classes
from draftwood.llm import LLM
from draftwood.targets.native.cpu import CpuDecoder
from tests.tools.cli import SHORT, Command, Terminal, _plain_environment, draftwood_command, prompt_file  # noqa: F401 - fixtures

# -- check -----------------------------------------------------------------------------------------------------------


def test_check_finds_identical_outputs(draftwood_command: Command, prompt_file: Path) -> None:
    result = draftwood_command("check", "--prompts", str(prompt_file), *SHORT)
    assert result.code == 0
    assert result.out.startswith("2 prompts, 24 positions in float32 · 2 identical · 0 numeric ties · 0 errors · tau ")


def test_check_limit_and_json(draftwood_command: Command, prompt_file: Path) -> None:
    argv = ("check", "--prompts", str(prompt_file), "--limit", "1", "--json", "--raw", *SHORT)
    content = json.loads(draftwood_command(*argv).out)
    assert content["summary"]["prompts"] == content["summary"]["identical"] == 1
    assert [record["verdict"] for record in content["records"]] == ["identical"]
    assert content["dtype"] == "float32"


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_check_refuses_a_limit_below_one(limit: str, draftwood_command: Command, prompt_file: Path) -> None:
    result = draftwood_command("check", "--prompts", str(prompt_file), "--limit", limit, *SHORT)
    assert result.code == 2
    assert "limit" in result.err
    assert "1 or more" in result.err
    assert "has no prompts" not in result.err


def test_check_reads_every_kind_of_jsonl(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "one"}, {"turns": ["two", "more"]}, {"messages": [{"role": "user", "content": "three"}]}]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert "3 identical" in draftwood_command("check", "--prompts", str(path), *SHORT).out


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the fourth token of speculative runs wrong."""
    generate = LLM.generate

    def wrong(self: LLM, *args: object, drafter: str | None = None) -> list[draftwood.Completion]:
        completions = generate(self, *args, drafter=drafter)  # type: ignore[arg-type]
        if drafter is None:
            for completion in completions:
                completion.token_ids[3] = (completion.token_ids[3] + 1) % 256
        return completions

    monkeypatch.setattr(LLM, "generate", wrong)


@pytest.mark.usefixtures("lying")
def test_check_reports_position_of_mismatch(draftwood_command: Command, prompt_file: Path) -> None:
    result = draftwood_command("check", "--prompts", str(prompt_file), *SHORT)
    assert result.code == 1
    lines = result.out.strip().split("\n")
    assert lines[0].startswith("prompt 1, token 3: ")
    assert "ERROR (gap " in lines[0]
    assert "2 errors" in lines[-1]
    content = json.loads(draftwood_command("check", "--prompts", str(prompt_file), "--json", *SHORT).out)
    difference = content["records"][0]["difference"]
    assert difference["position"] == 3
    assert difference["speculative_id"] == (difference["plain_id"] + 1) % 256
    assert difference["gap"] > difference["tolerance"]
    assert difference["tolerance"] == (0.0 if CpuDecoder.why_unavailable() == "" else TIE_TOLERANCE["float32"])


@pytest.mark.usefixtures("lying")
def test_check_recognizes_numeric_tie(
    draftwood_command: Command, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check_module.TIE_TOLERANCE, "float32", 1000.0)
    if CpuDecoder.why_unavailable() == "":  # an exact target has no ties
        assert draftwood_command("check", "--prompts", str(prompt_file), *SHORT).code == 1
    monkeypatch.setattr(CpuDecoder, "is_exact", False)
    result = draftwood_command("check", "--prompts", str(prompt_file), *SHORT)
    assert result.code == 0
    assert "numeric tie (gap " in result.out
    assert "2 numeric ties" in result.out


def test_an_output_that_ends_early_is_an_error(
    draftwood_command: Command, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = LLM.generate

    def short(self: LLM, *args: object, drafter: str | None = None) -> list[draftwood.Completion]:
        completions = generate(self, *args, drafter=drafter)  # type: ignore[arg-type]
        if drafter is None:
            completions[0].token_ids.pop()
        return completions

    monkeypatch.setattr(LLM, "generate", short)
    result = draftwood_command("check", "--prompts", str(prompt_file), *SHORT)
    assert result.code == 1
    assert "end of output instead of" in result.out


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "p.txt", "has no prompts"),
        ("\n \n", "p.txt", "has no prompts"),
        ('{"prompt": "x"', "p.jsonl", "line 1 is not valid JSON"),
        ('{"prompt": "x"}\n{"text": "x"}', "p.jsonl", "line 2 has no prompt"),
        ('{"turns": []}', "p.jsonl", "has no prompt"),
        ('{"messages": [{"role": "user"}]}', "p.jsonl", "has no prompt"),
        ('{"prompt": ""}', "p.jsonl", "The prompt is empty"),
    ],
)
def test_check_refuses_files_without_prompts(
    content: str, name: str, message: str, draftwood_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    result = draftwood_command("check", "--prompts", str(path), *SHORT)
    assert result.code == 2
    assert message in result.err


def test_check_requires_greedy_decoding(draftwood_command: Command, prompt_file: Path) -> None:
    for option in (("--temperature", "1"), ("--repetition-penalty", "1.2")):
        result = draftwood_command("check", "--prompts", str(prompt_file), *option, *SHORT)
        assert (result.code, "greedy" in result.err) == (2, True)


# -- models, drafters, the rest --------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one small folder that looks like a model."""
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))
    folder = tmp_path / "models" / "mini"
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    return tmp_path


def test_models_list_path_show_and_rm(draftwood_command: Command, home: Path) -> None:
    listed = draftwood_command("models", "list").out
    assert "smollm2" in listed
    assert "mini" in listed
    assert draftwood_command("models", "path", "mini").out == f"{home / 'models' / 'mini'}\n"
    assert draftwood_command("models", "get", "mini").out == f"{home / 'models' / 'mini'}\n"
    shown = draftwood_command("models", "show", "mini").out
    for name in ("parameters", "layers", "context", "cache in float32", "cache in bfloat16", "origin"):
        assert name in shown
    assert draftwood_command("models", "rm", "mini").code == 0
    assert "mini" not in draftwood_command("models", "list").out


@pytest.mark.usefixtures("home")
def test_models_json(draftwood_command: Command) -> None:
    listed = json.loads(draftwood_command("models", "list", "--json").out)["models"]
    assert {entry["name"] for entry in listed} == {"smollm2", "mini"}
    shown = json.loads(draftwood_command("models", "show", "mini", "--json").out)
    assert (shown["num_parameters"], shown["num_layers"], shown["context_length"]) == (6, 2, 64)
    assert json.loads(draftwood_command("models", "rm", "mini", "--json").out)["freed_bytes"] > 0


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("action", ["path", "rm", "show", "get"])
def test_unknown_models_are_refused(action: str, draftwood_command: Command) -> None:
    result = draftwood_command("models", action, "minni")
    assert result.code == 2
    assert "mini" in result.err


def test_drafters_are_listed_with_their_options(draftwood_command: Command) -> None:
    out = draftwood_command("drafters").out
    assert f"{DEFAULT_DRAFTER}  (default)" in out
    assert "max_draft" in out
    content = json.loads(draftwood_command("drafters", "--json").out)
    assert content["default"] == DEFAULT_DRAFTER
    options = {"max_ngram": 3, "min_ngram": 1, "max_draft": 20, "earlier_answers": False}
    assert content["drafters"]["pld"]["options"] == options
    assert content["drafters"]["plain"]["options"] == {}


def test_a_drafter_is_explained_option_by_option(draftwood_command: Command) -> None:
    for name, cls in drafter_classes().items():
        result = draftwood_command("drafters", name)
        assert result.code == 0
        lines = result.out.split("\n")
        for option in (field.name for field in fields(cls.Options)):
            (place,) = (number for number, line in enumerate(lines) if line.startswith(f"  {option} ("))
            assert lines[place + 1].startswith("    "), f"{name}: {option} has no explanation"
            assert lines[place + 1].endswith(".")
    assert "It has no options." in draftwood_command("drafters", "plain").out
    content = json.loads(draftwood_command("drafters", "pld", "--json").out)["drafters"]
    assert list(content) == ["pld"]
    assert all(content["pld"]["meanings"].values())
    assert "Did you mean 'goose'?" in draftwood_command("drafters", "gose").err


DRAFTER_FILE = """
from dataclasses import dataclass
from draftwood.drafters import Drafter
from draftwood.tree import DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    token: int = 97  # the token that is always guessed


class Letter(Drafter):
    Options = Options

    def begin(self, request):
        self.last = request.known_text[-1]

    def propose(self, budget):
        return DraftTree.chain([self.last, self.options.token][:budget], "letter")

    def observe(self, verified):
        self.last = verified.emitted[-1]
"""


@pytest.fixture
def drafter_file(tmp_path: Path) -> Path:
    path = tmp_path / "letter.py"
    path.write_text(DRAFTER_FILE)
    return path


def test_a_drafter_comes_from_a_file(draftwood_command: Command, drafter_file: Path) -> None:
    plain = draftwood_command("generate", "abab", *SHORT, "--drafter", "plain")
    for name in (f"{drafter_file}:Letter", str(drafter_file)):
        result = draftwood_command("generate", "abab", *SHORT, "--drafter", name, "--json")
        content = json.loads(result.out)
        assert content["text"] + "\n" == plain.out
        assert content["drafter"] == "Letter"
        assert content["stats"]["drafted_by_source"] == {"letter": 11}
    assert "The token that is always guessed." in draftwood_command("drafters", f"{drafter_file}:Letter").out
    option = ("--drafter", str(drafter_file), "--drafter-option", "token=98", "--json")
    assert json.loads(draftwood_command("generate", "abab", *SHORT, *option).out)["stats"]["drafted_nodes"] == 11


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (DRAFTER_FILE, "letter.py:Leter", "Did you mean 'Letter'?"),
        (DRAFTER_FILE, "other.py:Letter", "There is no such file"),
        ("x = 1", "letter.py", "has 0 drafters"),
        ("x = 1", "letter.py:x", "has no drafter 'x'"),
        ("1 / 0", "letter.py:Letter", "ZeroDivisionError: division by zero"),
        ("def", "letter.py:Letter", "SyntaxError"),
    ],
)
def test_files_without_the_drafter_are_refused(
    content: str, name: str, message: str, draftwood_command: Command, tmp_path: Path
) -> None:
    (tmp_path / "letter.py").write_text(content)
    result = draftwood_command("generate", "abab", *SHORT, "--drafter", str(tmp_path / name))
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_benchmark_takes_a_drafter_from_a_file(drafter_file: Path) -> None:
    texts = split_methods(
        f"plain,{drafter_file}:Letter,{drafter_file}:Letter:token=98,{drafter_file}:token=99,budget=4"
    )
    methods = parse_methods(texts, "prompt", [8])
    assert [method.options for method in methods] == [{}, {}, {"token": 98}, {"token": 99}]
    assert [method.drafter for method in methods[1:]] == [*[f"{drafter_file}:Letter"] * 2, str(drafter_file)]
    assert methods[-1].budget == 4


COMMANDS = [
    ("generate",), ("chat",), ("inspect", "tree"), ("check",), ("drafters",), ("tune",),
    ("inspect", "theory"), ("inspect", "calibration"), ("datastore", "build"), ("datastore", "show"),
    *(("models", action) for action in ("list", "get", "path", "rm", "show", "add")), ("train", "config"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...], draftwood_command: Command) -> None:
    result = draftwood_command(*command, "--help")
    assert result.code == 0
    examples = result.out.split("examples:\n")[1]
    assert 2 <= examples.count("draftwood ") <= 3


def test_version_and_no_command(draftwood_command: Command) -> None:
    assert draftwood_command("--version").out == f"draftwood {draftwood.__version__}\n"
    bare = draftwood_command()
    assert (bare.code, bare.err) == (0, "")
    assert bare.out == draftwood_command("--help").out
    assert draftwood_command("dance").code == 2


# -- real processes --------------------------------------------------------------------------------------------------


def start(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "draftwood", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom draftwood.cli.main import build_parser\nbuild_parser().format_help()\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n"


def test_process_reads_and_writes_pipes() -> None:
    run = start("generate", "--json", *SHORT, input="abab\n")
    assert run.returncode == 0
    assert len(json.loads(run.stdout)["token_ids"]) == 12
    assert run.stderr == "" or not CpuDecoder.is_available()


def test_closed_output_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m draftwood generate abab --stream {' '.join(SHORT)} | true"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in run.stderr
    assert "BrokenPipe" not in run.stderr


def run_python(code: str, **environment: str) -> str:
    removed = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=True).stdout


def test_starting_imports_no_draft_heads() -> None:
    shown = run_python("import sys, draftwood.llm; print([m for m in sys.modules if 'neural' in m or 'heads' in m])")
    assert [name for name in eval(shown) if name.startswith("draftwood.")] == []


def test_threads_do_not_wait_busily_for_long() -> None:
    """With busy waiting, eager decoding beside another process is ten times slower."""
    code = "import os, draftwood; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('KMP_BLOCKTIME'))"
    assert run_python(code) == "10000 0\n"
    assert run_python(code, OMP_WAIT_POLICY="ACTIVE") == "None None\n"
    assert run_python(code, GOMP_SPINCOUNT="7") == "7 0\n"


def test_a_slow_start_is_told_on_a_terminal(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import draftwood.cli.main as main_module

    load = main_module.load_function

    def slowly(name: str) -> object:
        while "starting" not in screen.getvalue():
            time.sleep(0.001)
        return load(name)

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(main_module, "STARTING_SECONDS", 0.0)
    monkeypatch.setattr(main_module, "load_function", slowly)
    assert draftwood_command("drafters", "plain").code == 0
    assert screen.getvalue() == "starting ...\r\x1b[K"
