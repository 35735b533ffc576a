"""tools/gpu_check and tools/compare_gpu say what they lack, and find what is wrong; the GPU, and a build for it, are
stand-ins."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"

# `terrace train` writes steps of the loss that LOSS names for its settings, and 1 else; LOST ends it with 3.
TERRACE = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
if words[0] == "bench":
    print(json.dumps({{"cases": [{{"name": "host→device", "bytes_per_second": 5e10}}]}}))
    sys.exit()
if os.environ.get("LOST"):
    print("terrace: device.memory is too small", file=sys.stderr)
    sys.exit(3)
loss = next((2 for word in words if os.environ.get("LOSS") and os.environ["LOSS"] in word), 1)
step = {{"loss": loss, "gradient_norm": 1, "tokens": 8, "seconds": 0.5, "stall_seconds": 0.1, "device_bytes": 2**30,
        "host_bytes": 2**31, "bytes_moved": {{"host→device": 7}}}}
with open(words[words.index("--metrics") + 1], "w") as file:
    file.write((json.dumps(step) + "\\n") * 9)
print("steps\\n\\nthe steps' time  share")
"""
# In place of PyTorch: the side ends as it is asked for, with figures among what it prints.
TORCH = """
print("a warning")
print('compare_gpu: {"seconds": 0.25, "device_bytes": 1073741824}')
raise SystemExit(0)
"""
CTEST = """#!/bin/sh
echo "1/2 Test #1: one ...   Passed    0.1 sec"
echo "2/2 Test #2: two ...   $SECOND    0.1 sec"
"""


class GpuScriptsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for name, text in (("terrace", TERRACE), ("ctest", CTEST)):
            (self.folder / name).write_text(text, encoding="utf-8")
            (self.folder / name).chmod(0o755)

    def run_tool(self, tool, *arguments, **environment):
        environment = {**os.environ, "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}", "SECOND": "Passed",
                       "PYTHONUTF8": "1", "PYTHONPATH": "", **environment}
        # -S and no PYTHONPATH: without what happens to be installed.
        return subprocess.run([sys.executable, "-S", "-B", TOOLS / tool, *arguments], capture_output=True, text=True,
                              timeout=100, encoding="utf-8", check=False, env=environment)

    def test_without_a_build_they_say_how_to_make_one(self):
        for tool, code in (("gpu_check", 2), ("compare_gpu", 1)):
            done = self.run_tool(tool, "/nonexistent")
            self.assertEqual(done.returncode, code)
            self.assertIn("cmake --preset cuda", done.stderr)

    def test_gpu_check_tells_how_many_tests_passed_and_writes_its_figures(self):
        figures = self.folder / "figures.json"
        done = self.run_tool("gpu_check", self.folder, "--output", figures)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        cases = {case["name"]: case for case in json.loads(figures.read_text(encoding="utf-8"))["cases"]}
        self.assertEqual((cases["tests on the GPU"]["tests"], cases["tests on the GPU"]["passed"]), (2, True))
        self.assertEqual((cases["link"]["host→device"], cases["overlap"]["ratio"]), (5e10, 1))
        self.assertIn("tests 2", done.stdout)

    def test_gpu_check_fails_where_a_test_was_skipped(self):
        done = self.run_tool("gpu_check", self.folder, SECOND="***Skipped")
        self.assertEqual(done.returncode, 1)
        self.assertIn("1 tests passed and 1 were skipped", done.stderr)

    def test_gpu_check_fails_where_a_loss_is_not_that_without_terrace(self):
        done = self.run_tool("gpu_check", self.folder, LOSS="nvme.paths")
        self.assertEqual(done.returncode, 1)
        self.assertIn("nvme: loss is [2", done.stderr)

    def test_compare_gpu_writes_what_a_step_of_terrace_takes(self):
        figures = self.folder / "figures.json"
        done = self.run_tool("compare_gpu", self.folder, "--sides", "terrace", "--output", figures)
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads(figures.read_text(encoding="utf-8"))
        self.assertEqual((report["version"], report["tokens"], report["parameters"]), (1, 8192, 1211224064))
        case, = report["cases"]
        self.assertEqual((case["name"], case["seconds"], case["host_bytes"]), ("terrace", 0.5, 2**31))
        self.assertGreater(case["process_bytes"], 0)
        self.assertIn("terrace  0.500 s a step, 16384 tokens/s", done.stdout)

    def test_compare_gpu_tells_why_a_side_failed_and_goes_on_with_the_others(self):
        (self.folder / "torch.py").write_text("raise ImportError('there is none')\n", encoding="utf-8")
        figures = self.folder / "figures.json"
        done = self.run_tool("compare_gpu", self.folder, "--sides", "torch,terrace", "--output", figures,
                             PYTHONPATH=str(self.folder))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"torch    failed: (.|\n)*there is none(.|\n)*terrace  0\.500 s a step")
        cases = json.loads(figures.read_text(encoding="utf-8"))["cases"]
        self.assertEqual([(case["name"], case["passed"]) for case in cases], [("torch", False), ("terrace", True)])
        self.assertIn("there is none", cases[0]["reason"])
        done = self.run_tool("compare_gpu", self.folder, "--sides", "terrace", LOST="1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("device.memory is too small", done.stdout)

    def test_compare_gpu_finds_the_figures_of_another_side_in_what_it_prints(self):
        (self.folder / "torch.py").write_text(TORCH, encoding="utf-8")
        done = self.run_tool("compare_gpu", self.folder, "--sides", "torch,terrace", PYTHONPATH=str(self.folder))
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("torch    0.250 s a step", done.stdout)
        self.assertIn("torch takes 0.50 times as long as Terrace", done.stdout)

    def test_compare_gpu_refuses_sides_and_counts_that_make_no_sense(self):
        for word, value, code, reason in (("--sides", "zero4", 2, "zero4 is none of"), ("--steps", "3", 2, "not timed"),
                                          ("--sides", "zero2", 1, "pip install deepspeed")):
            done = self.run_tool("compare_gpu", self.folder, word, value)
            self.assertEqual(done.returncode, code)
            self.assertIn(reason, done.stderr)


if __name__ == "__main__":
    unittest.main()
