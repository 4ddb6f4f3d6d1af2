"""Builds the smart-meter forecast as a web page: the engine as WebAssembly beside the model it fetches.

    python examples/web/web.py [--dtype int8] [--output build/web] [--serve] [--port 8000]

Needs clang and lld; the folder then works on any web server.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import http.server
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from colibri.build import targets, toolchain
from colibri.runtime import engine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "smart_meter"))
import data  # noqa: E402
import trained  # noqa: E402
from trained import fnv1a  # noqa: E402

PAGE = ("index.html", "style.css", "forecast.js", "colibri.js")
BASELINES = (data.seasonal_naive, data.last_weeks_change)
FIRST_DAY = "2000-08-14"  # of data.TEST: ten weeks after Monday 5 June

TARGET = targets.find("wasm32")
TOOLS = (TARGET.compiler, "wasm-ld-19")
# Bulk memory and vectors are in every browser since 2023. The stack, which the engine bounds, lies first, so that an
# overflow would trap instead of overwriting data.
FLAGS = (
    "-std=c11", "-O2", "-flto", "-Wall", "-Wextra",
    "-Wl,--no-entry,--strip-all,--stack-first,-z,stack-size=16384",
)  # fmt: skip
EXPORTS = (
    "__heap_base", "colibri_check", "colibri_diagnose", "colibri_error_name", "colibri_error_text", "colibri_forward",
    "colibri_get_num_experts", "colibri_init", "colibri_model_size", "colibri_selftest", "colibri_version",
)  # fmt: skip


def compile_engine(output: Path) -> None:
    """The engine as one WebAssembly module that imports nothing but the route hook; raises SystemExit."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is not installed: on Debian, apt-get install {TARGET.packages}")
    source = toolchain.engine_directory()
    files = [HERE / "glue.c", source / "freestanding/memory.c", *sorted((source / "src").rglob("*.c"))]
    command = [TARGET.compiler, *TARGET.flags, *FLAGS, *toolchain.source_flags(), f"-I{source / 'freestanding'}",
               *(f"-Wl,--export={name}" for name in EXPORTS), *map(str, files), "-o", str(output)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)


def write_model(image: bytes, folder: Path) -> None:
    """model.bin, and in expected.json what this machine's engine computes with it. A new model needs no more."""
    outputs = engine.load(image)(data.split(data.load(), data.TEST).features)
    expected = {"model": fnv1a(image), "outputs": fnv1a(np.ascontiguousarray(outputs, "<f4").tobytes())}
    (folder / "model.bin").write_bytes(image)
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")


def build(dtype: str, folder: Path) -> None:
    """Everything the page needs, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        shutil.copyfile(HERE / name, folder / name)
    compile_engine(folder / "engine.wasm")
    demand = data.load()
    test = data.split(demand, data.TEST)
    test.features.astype("<f4").tofile(folder / "rows.f32")
    series = {
        "first_day": FIRST_DAY,
        "demand": test.demand.tolist(),  # MW
        "now": test.now.tolist(),  # MW; the forecast is now + change_scale · output
        "change_scale": data.CHANGE_SCALE,
        "mape": {f.__name__: data.mape(f(demand, data.TEST), test.demand) for f in BASELINES},
    }
    (folder / "series.json").write_text(json.dumps(series) + "\n", encoding="utf-8")
    write_model(trained.export(dtype).image, folder)


class _Handler(http.server.SimpleHTTPRequestHandler):
    def guess_type(self, path: str | os.PathLike[str]) -> str:
        # Python asks the system, which may not know these; browsers run a module only as JavaScript.
        known = {".js": "text/javascript", ".wasm": "application/wasm"}
        return known.get(Path(path).suffix) or super().guess_type(path)

    def log_message(self, *args: object) -> None:
        pass


def server(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server of `folder` on this machine alone; port 0 takes a free one."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_Handler, directory=str(folder)))


def main() -> None:
    """Build the folder, print its sizes, and serve it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="int8", choices=["fp32", "fp16", "int8", "int4"])
    parser.add_argument("--output", type=Path, default=Path("build/web"))
    parser.add_argument("--serve", action="store_true", help="serve the page on this machine until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    build(options.dtype, options.output)
    console = Console()
    table = Table("file", "bytes", "gzip", box=None)
    for path in sorted(options.output.iterdir()):
        content = path.read_bytes()
        table.add_row(path.name, f"{len(content):,}", f"{len(gzip.compress(content)):,}")
    console.print(table)
    if options.serve:
        with server(options.output, options.port) as serving:
            console.print(f"http://127.0.0.1:{serving.server_port}/ (Ctrl-C ends)")
            try:
                serving.serve_forever()
            except KeyboardInterrupt:
                return


if __name__ == "__main__":
    main()
