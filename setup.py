"""Build the optional CPU kernel, a shared library that gadam.optim.cpu loads with ctypes.

The kernel includes no headers of torch or Python, so one build works with every version of both.
Without a suitable compiler, the package installs without the kernel.
"""

import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernel(build_ext):
    """Build with OpenMP if the compiler supports it, otherwise without."""

    def build_extension(self, ext: Extension) -> None:
        """Compile the extension.

        Args:
            ext: The extension.
        """
        if self.compiler.compiler_type == "msvc":
            ext.extra_compile_args = ["/O2", "/openmp:experimental"]
            super().build_extension(ext)
            return
        # Allow fused multiply-adds and drop errno, but keep IEEE 754 infinities and NaN. Integers
        # wrap, because the kernel also does integer arithmetic on the bits of such numbers.
        flags = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
        flags += ["-fwrapv"]
        if platform.machine().lower() in ("x86_64", "amd64"):
            # GCC may move numbers through MMX registers. They belong to the x87 unit, which is
            # unusable afterwards: every `long double` of the process would be NaN.
            flags += ["-mno-mmx"]
        attempts = [["-fopenmp"], ["-Xpreprocessor", "-fopenmp"], []]
        for openmp in attempts:
            ext.extra_compile_args = flags + openmp
            ext.extra_link_args = ["-fopenmp"] if openmp == ["-fopenmp"] else []
            try:
                super().build_extension(ext)
                return
            except Exception:
                if openmp is attempts[-1]:
                    raise

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Return the exported symbols without PyInit: this is a plain library.

        Args:
            ext: The extension.
        """
        return ext.export_symbols


setup(
    ext_modules=[
        Extension(
            "gadam._kernel",
            sources=["csrc/step.c"],
            depends=["csrc/element.h"],
            export_symbols=[
                "gadam_open",
                "gadam_step",
                "gadam_job_size",
                "gadam_has_openmp",
                "gadam_power_f32",
                "gadam_power_f64",
            ],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel},
)
