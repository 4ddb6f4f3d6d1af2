"""The web page in headless Chromium: this machine's bits and experts, and a named error for every bad model."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.format import spec
from colibri.runtime import engine
from tests.engine.conftest import example

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/web"))

import web

ROWS = web.data.split(web.data.load(), web.data.TEST).features
SECONDS = 60  # a page may take, on a machine that does other things as well


@pytest.fixture(scope="module")
def made() -> exporter.Export:
    return web.trained.export("int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in (*web.TOOLS, "chromium", "chromedriver"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    path: Path = tmp_path_factory.mktemp("web")
    web.build("int8", path)
    return path


@pytest.fixture(scope="module")
def browser(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    flags = "headless no-sandbox disable-gpu disable-quic disable-dev-shm-usage no-first-run disable-sync"
    for flag in (*flags.split(), "disable-background-networking", "disable-component-update", "window-size=1200,1000",
                 f"user-data-dir={tmp_path_factory.mktemp('profile')}"):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # With the driver's path given, selenium looks for none on the network.
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(folder: Path, browser: Any) -> Iterator[Callable[[str], Any]]:
    """Opens the page with a query, and waits until it says that it is done or has failed."""
    with web.server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

        def load(query: str = "") -> Any:
            browser.get(f"http://127.0.0.1:{server.server_port}/{query}")
            return wait(browser)

        yield load
        server.shutdown()


def wait(browser: Any) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, SECONDS, 0.02).until(lambda driver: state(driver) != "loading")
    return browser


def state(browser: Any) -> str:
    return str(browser.execute_script("return document.body.dataset.state"))


def text(browser: Any, name: str) -> str:
    return str(browser.find_element("id", name).text)


def experts_shown(browser: Any) -> list[int]:
    """The expert of each half hour, from the lanes of the chart."""
    script = "return [...document.querySelectorAll('[data-expert]')].map(r => ({...r.dataset}))"
    lanes = sorted(browser.execute_script(script), key=lambda lane: int(lane["first"]))
    return [int(lane["expert"]) for lane in lanes for _ in range(int(lane["count"]))]


def digest(image: bytes) -> str:
    return f"0x{web.fnv1a(engine.load(image)(ROWS).tobytes()):08x}"


def test_the_browser_gives_this_machines_bits_and_experts(made: exporter.Export, folder: Path, page: Any) -> None:
    browser = page()
    assert state(browser) == "done", text(browser, "alert")
    assert text(browser, "certificate") == "passed"
    assert text(browser, "digest") == text(browser, "expected") == digest(made.image)
    assert text(browser, "verdict").startswith("equal")
    model = engine.load(made.image)
    assert experts_shown(browser) == model.routes(ROWS)[0].reshape(-1).tolist()
    script = "return document.querySelector('#chart').outerHTML.split('h0').length - 1"
    assert browser.execute_script(script) == 2 * len(ROWS)  # forecasts and errors
    assert float(text(browser, "latency").removesuffix(" µs")) > 0
    sizes = (folder / "engine.wasm").stat().st_size, len(made.image), model.context_bytes
    shown = [text(browser, f"{name}-bytes") for name in ("engine", "model", "context")]
    assert shown == [f"{size:,} bytes" for size in sizes]
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int4"])
def test_a_new_model_needs_no_new_engine(dtype: str, folder: Path, page: Any) -> None:
    image = web.trained.export(dtype).image
    (folder / f"{dtype}.bin").write_bytes(image)
    browser = page(f"?model={dtype}.bin")
    assert text(browser, "digest") == digest(image) and text(browser, "certificate") == "passed"
    assert text(browser, "expected") == "not known"


def _flipped(image: bytes, at: int) -> bytes:
    return image[:at] + bytes([image[at] ^ 1]) + image[at + 1 :]


DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("TRUNCATED", lambda image: b""),
    "not_a_model": ("MAGIC", lambda image: b"<!doctype html>".ljust(4096)),
    "cut": ("TRUNCATED", lambda image: image[: len(image) // 2]),
    "header": ("HEADER", lambda image: _flipped(image, spec.HEADER.bytes - 8)),
    "weight": ("CHECKSUM", lambda image: _flipped(image, len(image) - 1)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_model_is_refused_by_name(damage: str, made: exporter.Export, folder: Path, page: Any) -> None:
    name, change = DAMAGED[damage]
    (folder / f"{damage}.bin").write_bytes(change(made.image))
    browser = page(f"?model={damage}.bin")
    assert state(browser) == "failed"
    assert text(browser, "alert-name") == f"COLIBRI_ERR_{name}"
    assert text(browser, "alert-text") == dict(spec.ERRORS)[name]
    assert not browser.find_element("id", "result").is_displayed()


def test_what_the_page_cannot_use_is_said(folder: Path, page: Any) -> None:
    assert "404" in text(page("?model=missing.bin"), "alert-text")
    (folder / "other.bin").write_bytes(example("top2_shared", 64).image)
    assert "numbers" in text(page("?model=other.bin"), "alert-text")


def test_a_chosen_file_takes_the_models_place(made: exporter.Export, tmp_path: Path, page: Any) -> None:
    browser = page()
    for name, content, wanted in [("bad", made.image[:-1], "failed"), ("good", made.image, "done")]:
        (tmp_path / f"{name}.bin").write_bytes(content)
        browser.find_element("id", "file").send_keys(str(tmp_path / f"{name}.bin"))
        assert state(wait(browser)) == wanted
        assert browser.find_element("id", "result").is_displayed() == (wanted == "done")
    assert text(browser, "digest") == digest(made.image)


def test_the_digest_is_fnv_1a() -> None:
    assert web.fnv1a(b"") == 0x811C9DC5 and web.fnv1a(b"a") == 0xE40C292C  # of the published test vectors
    assert np.dtype(np.float32).byteorder == "=" and sys.byteorder == "little"  # which digest() above relies on
