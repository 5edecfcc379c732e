"""Runs kvbaton with vLLM on a machine that has an NVIDIA GPU, torch and no network, from archives that were carried there.

    python3 tools/gpu_there.py --archives DIR --work DIR --out DIR STEP…

`tools/gpu_bundle.py` makes the archives. They are unpacked into `--work` the first time; models with random weights are written
there too. Every step leaves what it printed, and its JSON, in `--out`. See docs/gpu.md for the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "src"

SIZES = "--cudagraph-capture-sizes 1 2 4 8 16"
SHARED = "--worker-cls shared_gpu_worker.SharedGpuWorker --distributed-executor-backend mp --disable-custom-all-reduce"
FULL_GRAPHS = f"--no-enforce-eager -cc.mode=none -cc.cudagraph_mode=FULL {SIZES}"
COMPILED = f"--no-enforce-eager {SIZES}"


@dataclass(frozen=True)
class Step:
    """One command: arguments of `kvbaton`, or with `script` of Python; `fails` marks a control that must exit with 1."""

    command: str
    seconds: int
    fails: bool = False
    script: bool = False
    alone: bool = True
    """Whether it needs most of the memory of the GPU, or measures times."""


def verify(more: str, *, requests: int = 12, fails: bool = False) -> Step:
    """A verification with the large model; the seed draws prompts of 19 to 8,042 tokens."""
    common = f"verify --engine vllm --device cuda --model {{models}}/m8b --requests {requests} --json"
    lengths = "--shortest-prompt 16 --longest-prompt 8192 --max-tokens 16 --seed 30"
    return Step(f"{common} {lengths} {more}", 300, fails)


def small(more: str, *, model: str = "{models}/tiny", fails: bool = False, engine: str = "") -> Step:
    """A verification with a small model; several share the GPU."""
    arguments = shlex.quote(f"--gpu-memory-utilization 0.04 {engine}".strip())
    common = f"verify --engine vllm --device cuda --model {model} --requests {8 if fails else 16} --shortest-prompt 2 --json"
    return Step(f"{common} --engine-arguments={arguments} {more}", 300, fails, alone=False)


def rounded(model: str, more: str, *, fails: bool = False, engine: str = "") -> Step:
    """A verification in 8 or 16 bits: the last token of a prompt is computed alone on both sides, see `--whole-blocks`."""
    common = f"--transport cuda --whole-blocks 64 --concurrency 1 --longest-prompt 1500 {more}"
    return small(common, model=model, engine=f"--enable-prefix-caching {engine}".strip(), fails=fails)


def cut(prefill: str, decode: str, more: str = "", *, fails: bool = False) -> Step:
    """Several ranks, all on the one GPU."""
    shapes = f"--transport cuda --prefill-shape {prefill} --decode-shape {decode} --concurrency 2 {more}"
    return small(shapes, model="small-llama", engine=SHARED, fails=fails)


def kind(model: str, more: str = "", *, fails: bool = False) -> Step:
    """A small model of another kind of cache."""
    return small(f"--transport cuda {more}", model=f"small-{model}", fails=fails)


def bench(more: str) -> Step:
    """What a hand-off costs, with the types and kernels that are used in earnest."""
    common = "bench serve --engine vllm --device cuda --model {models}/m8b --transport cuda --cache-dtype bfloat16"
    return Step(f"{common} --lengths 512,4096,8192 --rounds 5 --json {more}", 420)


STEPS: dict[str, Step] = {
    "tiny-push": small("--transport cuda --mode push --concurrency 8"),
    "tiny-pull": small("--transport cuda --mode pull --concurrency 8"),
    "tiny-tcp": small("--transport tcp --mode push --concurrency 4"),
    "tiny-tcp-written": small("--transport tcp --fenced-writes --mode push --concurrency 4"),
    "tiny-tcp-written-drop": small("--transport tcp --fenced-writes --mode push --drop-writes", fails=True),
    "tiny-nixl": small("--transport nixl --mode pull --concurrency 4"),
    "tiny-virtual": small("--transport cuda --mode push --concurrency 4", engine="--enable-cumem-allocator"),
    "tiny-block-64": small("--transport cuda --mode push --concurrency 4", engine="--block-size 64"),
    "tiny-block-256": small("--transport cuda --mode pull --concurrency 4", engine="--block-size 256"),
    "tiny-fp8": rounded("{models}/tiny", "--mode push", engine="--kv-cache-dtype fp8"),
    "tiny-fp16": rounded("{models}/tiny", "--mode pull --cache-dtype float16"),
    "tiny-bf16": rounded("{models}/tiny", "--mode push --cache-dtype bfloat16"),
    "tiny-bf16-drop": rounded("{models}/tiny", "--mode push --cache-dtype bfloat16 --drop-writes", fails=True),
    "tiny-drop": small("--transport cuda --mode push --drop-writes", fails=True),
    "tp1-tp2": cut("tp1", "tp2", "--mode push"),
    "tp2-tp1": cut("tp2", "tp1", "--mode push"),
    "tp2-tp2": cut("tp2", "tp2", "--mode pull"),
    "pp2-tp1": cut("pp2", "tp1", "--mode push"),
    "tp1-pp2": cut("tp1", "pp2", "--mode pull"),
    "pp2-tp2": cut("pp2", "tp2", "--mode push"),
    "tp2-tp1-drop": cut("tp2", "tp1", "--mode push --drop heads", fails=True),
    "pp2-tp1-drop": cut("pp2", "tp1", "--mode push --drop layers", fails=True),
    "mistral": kind("mistral", "--mode push"),
    "mistral-pull": kind("mistral", "--mode pull"),
    "gemma3-pull": kind("gemma3", "--mode pull"),
    "gemma3": kind("gemma3", "--mode push"),
    "gptoss": kind("gptoss", "--mode pull"),
    "granite4": kind("granite4", "--mode push"),
    "granite4-drop": kind("granite4", "--mode push --drop state", fails=True),
    "falcon-h1": kind("falcon-h1", "--mode pull"),
    "nemotron-h": kind("nemotron-h", "--mode push"),
    "mamba2": kind("mamba2", "--mode push"),
    "llama4": kind("llama4", "--mode push"),
    "mla": rounded("small-mla", "--mode push --cache-dtype bfloat16"),
    "mla-pull": rounded("small-mla", "--mode pull --cache-dtype bfloat16 --integrity full"),
    "mla-triton": rounded("small-mla-128", "--mode push --cache-dtype bfloat16", engine="--attention-backend TRITON_MLA"),
    "mla-drop": rounded("small-mla", "--mode push --cache-dtype bfloat16 --drop layers", fails=True),
    "mtp": rounded("small-mtp", "--mode push --cache-dtype bfloat16"),
    "eagle": kind("eagle", "--mode push"),
    "draft": kind("draft-8h", "--mode push"),
    "push-eager": verify("--transport cuda --mode push --concurrency 1"),
    "pull-eager": verify("--transport cuda --mode pull --concurrency 1"),
    "push-graphs": verify(f"--transport cuda --mode push --concurrency 1 --engine-arguments={shlex.quote(FULL_GRAPHS)}"),
    "pull-graphs": verify(f"--transport auto --mode pull --concurrency 1 --engine-arguments={shlex.quote(FULL_GRAPHS)}"),
    "push-compiled": verify(f"--transport cuda --mode push --concurrency 1 --engine-arguments={shlex.quote(COMPILED)}"),
    "push-bf16": verify(
        "--transport cuda --mode push --concurrency 1 --cache-dtype bfloat16 --integrity full --whole-blocks 16"
        f" --engine-arguments={shlex.quote(FULL_GRAPHS + ' --enable-prefix-caching')}"
    ),
    "drop-writes": verify("--transport cuda --mode push --drop-writes", requests=4, fails=True),
    "storm-push": Step(f"{HERE}/gpu_storm.py {{models}}/tiny --mode push", 560, script=True, alone=False),
    "storm-pull": Step(f"{HERE}/gpu_storm.py {{models}}/tiny --mode pull --no-kills", 300, script=True, alone=False),
    "storm-8b": Step(f"{HERE}/gpu_storm.py {{models}}/m8b --mode push --no-kills --engine-arguments=", 400, script=True),
    "bench-push": bench("--mode push --peer nixl"),
    "bench-pull": bench("--mode pull --peer nixl"),
    "bench-graphs": bench(f"--mode push --peer nixl --engine-arguments={shlex.quote(FULL_GRAPHS)}"),
    "first-token": Step(
        f"{HERE}/gpu_first_token.py {{models}}/m8b --engine-arguments={shlex.quote(FULL_GRAPHS)}", 300, script=True
    ),
    "wire": Step("bench wire --transport cuda --rounds 20 --json", 200),
    "stages": Step(f"{HERE}/gpu_stages.py {{out}}/stages-rounds.json", 120, script=True),
    "device": Step(f"-m pytest -p no:cacheprovider -q {HERE.parent}/tests/contract/test_device_contract.py", 120, script=True),
    "contract": Step(
        f"-m pytest -p no:cacheprovider -q {HERE.parent}/tests/contract -k 'cuda or GPU'", 520, script=True, alone=False
    ),
    "mori": Step(
        f"-m pytest -p no:cacheprovider -q -rs {HERE.parent}/tests/compat/mori/test_mori_io.py"
        f" {HERE.parent}/tests/contract/test_exchange_gpu.py -k 'GPU or cuda'",
        300,
        script=True,
    ),
}


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def environment(work: Path) -> dict[str, str]:
    """What every command gets: the carried packages before the machine's own, this very kvbaton, and no hub."""
    own = {
        "PYTHONPATH": os.pathsep.join((str(work / "site"), str(SOURCES), str(HERE))),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | own


def unpack(archives: Path, work: Path) -> None:
    """Unpack every archive once, side by side, and compile what was unpacked."""
    done = work / "unpacked"
    if done.exists():
        return
    site = work / "site"
    site.mkdir(parents=True, exist_ok=True)

    def one(archive: Path) -> None:
        target = work if archive.name.startswith(("p_site", "p_kvb")) else site
        if subprocess.run(["tar", "xJf", str(archive), "-C", str(target)], check=False).returncode:
            with tarfile.open(archive) as content:
                content.extractall(target, filter="fully_trusted")  # noqa: S202 - made by tools/gpu_bundle.py

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, sorted(archives.glob("p_*.tar.xz"))))
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "16", str(site)], check=False, stdout=subprocess.DEVNULL)
    done.touch()


def run_step(name: str, step: Step, work: Path, out: Path) -> bool:
    """Run one step; returns whether it ended as it should."""
    command = shlex.split(step.command.replace("{models}", str(work / "models")).replace("{out}", str(out)))
    start = [sys.executable] if step.script else [sys.executable, "-m", "kvbaton.cli.main"]
    began = time.monotonic()
    logs = work / "logs" / name
    logs.mkdir(parents=True, exist_ok=True)
    variables = environment(work) | {"KVBATON_KEPT_LOGS": str(logs)}
    with (out / f"{name}.json").open("wb") as answer, (logs / "command.log").open("wb") as log:
        process = subprocess.Popen(
            [*start, *command], stdout=answer, stderr=log, env=variables, cwd=work, start_new_session=True
        )
        try:
            code = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait(30)
    ok = code == (1 if step.fails else 0)
    say(f"{name}: exit code {code} after {time.monotonic() - began:.0f} s; {'as it should be' if ok else 'WRONG'}")
    summarise(out / f"{name}.json")
    if not ok:
        say("\n".join((logs / "command.log").read_text(errors="replace").splitlines()[-8:]))
        for path in sorted(logs.rglob("*.log")):
            wrong = [line for line in path.read_text(errors="replace").splitlines() if "Error" in line or "kvbaton" in line]
            say("\n".join(f"{path.name}: {line[:300]}" for line in wrong[-12:]))
    return ok


def summarise(path: Path) -> None:
    """Print the numbers of a report, without its rows."""
    try:
        report = json.loads(path.read_text())
    except ValueError:
        return
    if isinstance(report, dict):
        kept = {key: value for key, value in report.items() if key not in ("rows", "rounds", "settings", "hardware")}
        say(f"    {json.dumps(kept)[:1500]}")


def main() -> int:
    """Do the steps in order, and exit with 1 when one of them did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archives", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stop", action="store_true", help="stop at the first step that does not end as it should")
    parser.add_argument("--lanes", type=int, default=1, help="so many steps at a time, where they leave each other room")
    parser.add_argument("--command", help="run this instead of steps, with the same environment")
    parser.add_argument("steps", nargs="*", metavar="STEP")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}; known are {', '.join(STEPS)}")
    work, out = options.work.resolve(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    unpack(options.archives.resolve(), work)
    say(f"unpacked after {time.monotonic() - began:.0f} s")
    if options.command:
        return subprocess.run(["bash", "-c", options.command], env=environment(work), cwd=work, check=False).returncode
    wanted = {model for name in options.steps for model in ("tiny", "m8b") if f"models}}/{model} " in STEPS[name].command}
    for model in sorted(wanted):
        command = [sys.executable, str(HERE / "gpu_model.py"), str(work / "models" / model)]
        subprocess.run(command, check=True, env=environment(work))
    results: list[bool] = []
    alone = [name for name in options.steps if STEPS[name].alone]
    together = [name for name in options.steps if not STEPS[name].alone]
    with ThreadPoolExecutor(max(options.lanes, 1)) as lanes:
        beside = [lanes.submit(run_step, name, STEPS[name], work, out) for name in together]
        if options.lanes == 1:
            results += [each.result() for each in beside]
        for name in alone:
            results.append(run_step(name, STEPS[name], work, out))
            if options.stop and not results[-1]:
                break
        if options.lanes > 1:
            results += [each.result() for each in beside]
    subprocess.run(["tar", "czf", str(out / "logs.tgz"), "-C", str(work), "logs"], check=False)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
