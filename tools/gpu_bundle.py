"""Makes the archives that carry vLLM and kvbaton's packages to a machine with a Hopper GPU, torch and no network.

    python3 tools/gpu_bundle.py WORK OUT

WORK is for downloads (2 GB); the archives go to OUT: packages (`p_site`), vLLM's CUDA libraries with the code of one GPU type
(`p_cuda`), NIXL (`p_nixl`), and what kvbaton's commands and tests need (`p_kvb`); 48 MB together, five minutes. The machine
needs Python 3.12 on x86-64, torch 2.11 for CUDA 13, Triton, transformers, tokenizers and safetensors. Needs pip, tar, xz,
readelf and c++filt here; x86_64-linux-gnu-strip makes the archives smaller.

vLLM's libraries are built against torch's stable interface, so a torch that is older than the one it pins loads them. What a
Hopper GPU does not run is blanked in their fat binaries: zeros compress away, and offsets stay.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

VLLM, NIXL = "0.32.0", "1.5.1"
PYTHON, ARCHITECTURE, FAT_BINARY = "3.12", 90, 0xBA55ED50
HERE = Path(__file__).resolve().parent
COMMANDS = ("cyclopts", "rich_rst", "docutils", "orjson", "gguf")
TESTS = ("pytest", "pluggy", "iniconfig", "pytest-timeout", "hypothesis", "sortedcontainers")
LIBRARIES = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so", "vllm_flash_attn/_vllm_fa3_C.abi3.so")
KEPT_LIBRARIES = {"spinloop.abi3.so", "cumem_allocator.abi3.so", "fs_io_C.abi3.so"}
LEFT_OUT = {"vllm-rs", "RECORD", "deep_gemm", "fmha_sm100", "tml_fa4", "cute", "static"}
UNNEEDED = ("PIL/_avif*.so", "pillow.libs/libavif*", "tvm_ffi/include", "tvm_ffi/3rdparty", "*/tests", "bin", "*.data")
UNNEEDED_FILES = {".pyi", ".h", ".hpp", ".a", ".pxd", ".c"}
MLA = {("64", "512", "bfloat16_t", "false"), ("192", "128", "bfloat16_t", "false")}
ATTENTION = MLA | {(size, size, dtype, "false") for size in ("64", "128") for dtype in ("bfloat16_t", "half_t")}
"""Channels of a head, of its value, type, whether there is a soft cap."""
NUMBA = '''"""Decorators that return the function: only n-gram speculation would compile anything."""


def _plain(*arguments, **options):
    return arguments[0] if arguments and callable(arguments[0]) else lambda function: function


jit = njit = vectorize = guvectorize = _plain
prange = range


def get_num_threads():
    return 1


def set_num_threads(count):
    del count
'''


def download(directory: Path, *packages: str) -> None:
    """Wheels for the machine, without what they depend on: the pins name all of it."""
    versions = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
    tags = [f"manylinux_2_{version}_x86_64" for version in versions] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    platforms = [part for tag in tags for part in ("--platform", tag)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
    subprocess.run([*pip, "--implementation", "cp", *platforms, "-d", str(directory), *packages], check=True)


def unpack(wheels: Sequence[Path], directory: Path) -> None:
    """The content of wheels."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as content:
            content.extractall(directory)


def gpu_code(library: bytes) -> Iterator[tuple[int, int, bool]]:
    """Each piece of GPU code in an ELF library: where it begins, its bytes, and whether the GPU runs it."""
    table = struct.unpack_from("<Q", library, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", library, table + index * size) for index in range(count)]
    for row in rows:
        name_at = rows[names][4] + row[0]
        if library[name_at : library.index(b"\0", name_at)] != b".nv_fatbin":
            continue
        at, end = row[4], row[4] + row[5]
        while at + 16 <= end:
            magic, _, head, fat = struct.unpack_from("<IHHQ", library, at)
            if magic != FAT_BINARY:
                at += 8
                continue
            entry, at = at + head, at + head + fat
            while entry < at:
                kind, _, head_bytes, code_bytes = struct.unpack_from("<HHIQ", library, entry)
                architecture = struct.unpack_from("<I", library, entry + 0x1C)[0]
                yield entry + head_bytes, code_bytes, kind == 2 and architecture == ARCHITECTURE
                entry += head_bytes + code_bytes


def trim(source: Path, target: Path, is_needed: Callable[[bytes], bool]) -> None:
    """Copy a library, with zeros in the place of the GPU code that is not needed."""
    library = source.read_bytes()
    kept = bytearray(library)
    for at, count, runs in gpu_code(library):
        if not (runs and is_needed(library[at : at + count])):
            kept[at : at + count] = bytes(count)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(kept)


def is_attention_needed(code: bytes) -> bool:
    """Of FlashAttention 3: bf16 and fp16, heads of 64 and 128 channels, those of MLA, no soft cap; and what combines."""
    names = sorted(set(re.findall(rb"_ZN7cutlass13device_kernel[0-9A-Za-z_]+", code)))
    if not names:
        return True
    shown = subprocess.run(["c++filt"], input=b"\n".join(names), capture_output=True, check=True).stdout.decode()
    shape = re.compile(
        r"CollectiveMainloopFwdSm90<\D*\d+, cute::tuple<.*?>, cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(\d+)> ?>, "
        r"(\d+), cutlass::(\w+), float, cutlass::arch::Sm90, \w+, \w+, (\w+)"
    )
    for line in shown.splitlines():
        found = shape.search(line)
        if "Combine" in line or (found and found.groups() in ATTENTION):
            return True
    return False


def make_site(wheels: Path, work: Path) -> None:
    """vLLM's Python and its packages, without what is never imported."""
    site = work / "site"
    unpack([each for each in wheels.glob("*.whl") if not each.name.startswith(("vllm-", "nixl"))], site)

    def left_out(_: str, names: list[str]) -> list[str]:
        libraries = {name for name in names if name.endswith(".so") and name not in KEPT_LIBRARIES}
        return [name for name in names if name in libraries | LEFT_OUT or name.endswith(".jpg")]

    shutil.copytree(work / "vllm", site, dirs_exist_ok=True, ignore=left_out)
    for folder in ("model_executor", "kernels"):
        for path in (site / "vllm" / folder).rglob("*.json"):
            if "configs" in str(path):
                path.unlink()
    for pattern in UNNEEDED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in [each for each in site.rglob("*") if each.suffix in UNNEEDED_FILES and each.is_file()]:
        path.unlink()
    if shutil.which("x86_64-linux-gnu-strip"):
        for path in site.rglob("*.so"):
            if ".libs" not in str(path.parent) and "/vllm" not in str(path.parent):
                subprocess.run(["x86_64-linux-gnu-strip", "--strip-debug", str(path)], check=False, stderr=subprocess.DEVNULL)
    (site / "numba").mkdir(exist_ok=True)
    (site / "numba" / "__init__.py").write_text(NUMBA)


def make_nixl(wheels: Path, work: Path) -> Path:
    """NIXL's bindings, its UCX plugin, and the libraries that these need."""
    source, target = work / "nixl", work / "nixl-kept"
    unpack(list(wheels.glob("nixl*.whl")), source)
    libraries = {path.name: path for folder in (".nixl*", "nixl_cu13.libs") for path in source.glob(f"{folder}/*.so*")}
    ucx = [path for path in source.glob("nixl_cu13.libs/ucx/*.so*") if not re.search("perftest|gdp", path.name)]
    left = [*source.glob("nixl_cu13/*.so"), source / ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so", *ucx]
    needed: set[Path] = set()
    while left:
        path = left.pop()
        if path not in needed:
            needed.add(path)
            shown = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
            left += [libraries[name] for name in re.findall(r"NEEDED.*\[(.*?)\]", shown) if name in libraries]
    needed |= {each for each in source.rglob("*") if each.name.endswith((".py", "METADATA")) and "nixl_ep" not in str(each)}
    for path in needed:
        kept = target / path.relative_to(source)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, kept)
    return target


def pack(directory: Path, what: str, archive: Path) -> None:
    """One archive, the same for the same content."""
    tar = ["tar", "c", "--owner=0", "--group=0", "--sort=name", "--exclude=__pycache__", "-C", str(directory), what]
    with archive.open("wb") as target:
        made = subprocess.Popen(tar, stdout=subprocess.PIPE)
        subprocess.run(["xz", "-T1", "--x86", "--lzma2=preset=7"], stdin=made.stdout, stdout=target, check=True)
        if made.wait():
            raise SystemExit(f"tar of {directory} failed")
    sys.stdout.write(f"{archive.name}: {archive.stat().st_size:,} bytes\n")


def main() -> None:
    """Fetch, trim and pack."""
    work, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    wheels, own = work / "wheels", work / "own-wheels"
    for directory in (wheels, own, out):
        directory.mkdir(parents=True, exist_ok=True)
    for name in ("site", "cuda", "vllm", "nixl", "nixl-kept", "own"):
        shutil.rmtree(work / name, ignore_errors=True)
    download(wheels, "-r", str(HERE / "gpu_bundle.txt"))
    download(wheels, f"vllm=={VLLM}", f"nixl-cu13=={NIXL}", f"nixl=={NIXL}")
    download(own, *COMMANDS, *TESTS)
    unpack(list(wheels.glob(f"vllm-{VLLM}*.whl")), work / "vllm")
    make_site(wheels, work)
    for name in LIBRARIES:
        keep = is_attention_needed if "fa3" in name else lambda _: True
        trim(work / "vllm" / "vllm" / name, work / "cuda" / "vllm" / name, keep)
    unpack(list(own.glob("*.whl")), work / "own" / "site")
    pack(work, "site", out / "p_site.tar.xz")
    pack(work / "cuda", ".", out / "p_cuda.tar.xz")
    pack(make_nixl(wheels, work), ".", out / "p_nixl.tar.xz")
    pack(work / "own", "site", out / "p_kvb.tar.xz")


if __name__ == "__main__":
    main()
