"""Builds the engine's Python module from engine/ and carries the engine's sources along, for `colibri build`."""

import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


class WithEngine(build_ext):
    """Compiles the engine's libraries with its own Makefile, where its flags stand, and links them in."""

    def run(self) -> None:
        build = Path(self.build_temp).resolve() / "engine"
        libraries = [f"{build}/{name}" for name in ("libcolibri_host.a", "libcolibri.a")]
        subprocess.run(["make", "-s", "-C", "engine", f"BUILD={build}", *libraries], check=True)
        for extension in self.extensions:
            extension.extra_objects = libraries
        super().run()


class WithEngineSources(build_py):
    """Copies engine/ into the installed package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "colibri" / "engine_source"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("engine", target, ignore=shutil.ignore_patterns("build*", "*.o"))


setup(
    cffi_modules=["src/colibri/_engine_build.py:ffi"],
    cmdclass={"build_ext": WithEngine, "build_py": WithEngineSources},
)
