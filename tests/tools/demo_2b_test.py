"""tools/demo_2b, with a hundredth of its parameters: it checks what it says, and leaves nothing behind."""

import os
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "demo_2b"


def start(*arguments):
    return subprocess.Popen([SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            encoding="utf-8", start_new_session=True)


class Demo2b(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="terrace-demo-2b-")
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def run_with(self, *options):
        process = start("20M", self.folder, *options)
        output, errors = process.communicate()
        self.assertEqual(list(self.folder.iterdir()), [], "something is left on the drive")
        return process.returncode, output, errors

    def test_trains_within_its_budgets_to_the_bits_of_plain_libtorch(self):
        code, output, errors = self.run_with()
        self.assertEqual(code, 0, output + errors)
        self.assertEqual(output.count("\nok     "), 8, output)
        self.assertIn("the steps' time", output)

    def test_fails_where_a_check_does(self):
        code, output, _ = self.run_with("--set", "host.memory=45MiB")
        self.assertEqual(code, 1, output)
        self.assertIn("\nFAILED device.memory and host.memory are at most 61.4 MiB together\n", output)
        self.assertEqual(output.count("\nok     "), 7, output)

    def test_says_before_training_that_the_drive_has_no_room(self):
        code, output, errors = self.run_with("--set", "nvme.memory=8TiB")
        self.assertEqual((code, output), (4, ""), errors)
        self.assertIn("nvme.memory (8TiB) needs", errors)

    def test_ends_and_tidies_up_at_an_interrupt(self):
        process = start("20M", self.folder, "--set", "train.steps=100000")
        while not any(self.folder.glob("*/managed/metrics.jsonl")) and process.poll() is None:
            time.sleep(0.01)  # until the first step begins
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate()
        self.assertEqual(process.returncode, 130, errors)
        self.assertIn("terrace: interrupted after step", errors)
        self.assertEqual(list(self.folder.iterdir()), [], "something is left on the drive")

    def test_tells_its_usage(self):
        process = start("3B")
        _, errors = process.communicate()
        self.assertEqual((process.returncode, errors), (2, "usage: tools/demo_2b [2B|200M|20M] [FOLDER] [OPTION...]\n"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
