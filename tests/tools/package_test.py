"""What `cmake --install` puts down is a package of its own: programs in other folders build against it and run.

TERRACE_BUILD names the build folder, TERRACE_COMPILER the compiler that it was built with."""

import math
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

BUILD = os.environ.get("TERRACE_BUILD", "")
COMPILER = os.environ.get("TERRACE_COMPILER", "c++")
PROGRAMS = Path(__file__).resolve().parents[1] / "package"


def run(*command):
    """What the command prints. Fails with that where the command does."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))} failed with {done.returncode}:\n{done.stdout}")
    return done.stdout


class PackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = Path(tempfile.mkdtemp(prefix="terrace-package-"))
        cls.addClassCleanup(shutil.rmtree, cls.scratch, ignore_errors=True)
        cls.prefix = cls.scratch / "prefix"
        run("cmake", "--install", BUILD, "--prefix", cls.prefix)

    def output_of(self, source):
        """Builds the program from a copy elsewhere, so that nothing beside it is found, and runs it."""
        copy = Path(tempfile.mkdtemp(dir=self.scratch))
        for file in ("CMakeLists.txt", "main.cpp"):
            shutil.copy(source / file, copy)
        build = copy / "build"
        run("cmake", "-S", copy, "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DCMAKE_CXX_COMPILER={COMPILER}")
        run("cmake", "--build", build)
        return run(build / "program")

    def test_the_program_of_the_readme_trains(self):
        losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", self.output_of(PROGRAMS))]
        self.assertEqual(len(losses), 20)
        self.assertTrue(all(math.isfinite(loss) for loss in losses), losses)
        self.assertLess(losses[-1], losses[0] / 2)

    def test_a_floor_below_libtorch_is_used_without_it(self):
        self.assertEqual(self.output_of(PROGRAMS / "memory"), "chunks 1, second at element 128\n")

    def test_a_missing_dependency_leaves_the_program_s_module_path_as_it_was(self):
        source = Path(tempfile.mkdtemp(dir=self.scratch))
        (source / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(program LANGUAGES C CXX)\n"
            "set(CMAKE_MODULE_PATH mine)\nfind_package(terrace QUIET)\n"
            'message("found ${terrace_FOUND}, path ${CMAKE_MODULE_PATH}")\n', encoding="utf-8")
        for disabled, found in (("hwy", "(FALSE|0)"), ("none", "(TRUE|1)")):
            output = run("cmake", "-S", source, "-B", source / disabled, f"-DCMAKE_PREFIX_PATH={self.prefix}",
                         f"-DCMAKE_CXX_COMPILER={COMPILER}", f"-DCMAKE_DISABLE_FIND_PACKAGE_{disabled}=ON")
            self.assertRegex(output, rf"(?i)found {found}, path mine\n")

    def test_the_command_runs_where_it_was_installed(self):
        self.assertIn("train", run(self.prefix / "bin" / "terrace", "--help"))


if __name__ == "__main__":
    unittest.main()
