"""The README shows the program that tests/package builds, letter for letter."""

import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class ReadmeTest(unittest.TestCase):
    def shows(self, language, file):
        text = (ROOT / "tests" / "package" / file).read_text(encoding="utf-8")
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        self.assertIn(f"```{language}\n{text}```\n", readme, f"README.md does not show tests/package/{file} as it is")

    def test_the_program_is_the_one_that_is_tested(self):
        self.shows("cpp", "main.cpp")

    def test_and_so_is_its_cmake_file(self):
        self.shows("cmake", "CMakeLists.txt")


if __name__ == "__main__":
    unittest.main()
