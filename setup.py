"""Build the optional CPU kernel, a shared library that gadam.optim.cpu loads with ctypes.

The kernel includes no headers of torch or Python and links to neither, so one wheel per platform
serves every version of both. Without a suitable compiler, the package installs without the kernel.
Set GADAM_REQUIRE_KERNEL=1 to fail instead, as a build of wheels to publish should.
"""

import os
import platform
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildKernel(build_ext):
    """Build a plain shared library instead of a Python module."""

    def build_extension(self, ext: Extension) -> None:
        """Compile the extension.

        Args:
            ext: The extension.
        """
        # Allow fused multiply-adds and drop errno, but keep IEEE 754 infinities and NaN. Integers
        # wrap, because the kernel also does integer arithmetic on the bits of such numbers.
        flags = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
        flags += ["-fwrapv", "-fopenmp-simd", "-g0", "-fno-asynchronous-unwind-tables"]
        if platform.machine().lower() in ("x86_64", "amd64"):
            # GCC may move numbers through MMX registers. They belong to the x87 unit, which is
            # unusable afterwards: every `long double` of the process would be NaN.
            flags += ["-mno-mmx"]
        ext.extra_compile_args = flags
        ext.extra_link_args = ["-s"] if sys.platform == "linux" else []
        super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of the library: its name does not contain a version of Python.

        Args:
            fullname: The extension's dotted name.
        """
        suffix = ".dll" if os.name == "nt" else ".so"
        return os.path.join(*fullname.split(".")) + suffix

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Return the exported symbols without PyInit: this is a plain library.

        Args:
            ext: The extension.
        """
        return ext.export_symbols


class BuildWheel(bdist_wheel):
    """Build one wheel per platform, for every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the wheel: Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "gadam._kernel",
            sources=["csrc/step.c"],
            depends=["csrc/element.h"],
            libraries=[] if os.name == "nt" else ["m"],
            export_symbols=[
                "gadam_open",
                "gadam_step",
                "gadam_job_size",
                "gadam_power_f32",
                "gadam_power_f64",
            ],
            optional=not os.environ.get("GADAM_REQUIRE_KERNEL"),
        )
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": BuildWheel},
)
