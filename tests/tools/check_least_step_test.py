"""tools/least_step finds the shortest step where a closed form is known, and lets more room shorten it."""

import json
import subprocess
import tempfile
import unittest
from pathlib import Path

LEAST_STEP = Path(__file__).resolve().parent.parent.parent / "tools" / "least_step"
MIB = 2**20


def case_of(name, parameters_mib, compute, link, drive, update=1e-3):
    """Bytes and seconds as a report has them, of terms that are given as seconds for all parameters."""
    micro_batches = 4 if name.endswith("x4") else 1
    to_host = parameters_mib * MIB * micro_batches
    return {"name": name, "ratio": {"median": 2.0}, "floor_seconds": 1.0,
            "terms": {"compute": compute, "host→device": 2 * link, "device→host": micro_batches * link, "nvme": 2 * drive,
                      "update": update},
            "necessary_bytes": {"host→device": 2 * parameters_mib * MIB, "device→host": to_host,
                                "nvme→host": parameters_mib * MIB, "host→nvme": parameters_mib * MIB}}


class LeastStep(unittest.TestCase):
    def run_on(self, text, *options):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "steps.json"
            report.write_text(text, encoding="utf-8")
            return subprocess.run([LEAST_STEP, report, *options], capture_output=True, text=True)

    def least(self, *cases, parts=8):
        run = self.run_on(json.dumps({"cases": cases}), "--parts", str(parts))
        self.assertEqual(run.returncode, 0, run.stderr)
        return [float(line.split()[-1]) for line in run.stdout.splitlines()[1:]]

    def test_a_step_takes_as_long_as_its_computation_where_the_rest_is_fast(self):
        for name in "compute-bound", "compute-bound-nvme", "compute-bound-mixed", "compute-bound-x4":
            with self.subTest(name):
                self.assertEqual(self.least(case_of(name, 288, 1.0, 0.01, 0.01)), [1.0])

    def test_a_step_takes_as_long_as_its_phases_where_there_is_little_room(self):
        # Forward brings all parameters, or brings and updates all gradients; backward computes.
        link_bound = case_of("balanced", 2**20, 0.9, 0.5, 0.1)
        drive_bound = case_of("balanced", 2**20, 0.9, 0.1, 0.45)
        self.assertEqual(self.least(link_bound, drive_bound), [0.5 + 0.6, 0.45 + 0.6])

    def test_parameters_on_nvme_pass_the_drive_for_the_update_and_for_backward(self):
        # The update reads gradients and parameters, and writes these; backward reads parameters and writes gradients.
        [least] = self.least(case_of("nvme-bound-nvme", 2**20, 0.01, 0.01, 0.2))
        self.assertAlmostEqual(least, 5 * 0.2, places=3)

    def test_room_spares_the_drive_one_read_between_forward_and_backward_and_twice_as_much_between_steps(self):
        # Of 40 MiB on the device and 32 on the host: parameters that backward uses again; gradients, or parameters that
        # the next update changes, which else are written and read.
        [least] = self.least(case_of("nvme-bound-nvme", 288, 0.01, 0.01, 0.2))
        self.assertAlmostEqual(least, (5 * 288 - 3 * 72) / 288 * 0.2, places=3)

    def test_nothing_passes_the_drive_where_there_is_room_for_all(self):
        [least] = self.least(case_of("nvme-bound-nvme", 12, 0.3, 0.1, 0.5))
        self.assertAlmostEqual(least, 0.1 + 0.2, places=3)

    def test_a_step_waits_for_its_update_before_anything_comes_that_it_changes(self):
        self.assertEqual(self.least(case_of("balanced", 2**20, 0.9, 0.01, 0.01, update=0.7)), [1.3])

    def test_room_shortens_a_step(self):
        most, less = self.least(case_of("nvme-bound", 2**20, 0.1, 0.1, 0.5), case_of("nvme-bound", 288, 0.1, 0.1, 0.5))
        self.assertEqual(most, 1.0)
        self.assertLess(less, 0.9)

    def test_further_micro_batches_bring_what_they_add_to(self):
        # A forward and a backward of each: all parameters twice, and from the second on all gradients.
        [least] = self.least(case_of("link-bound-x4", 2**20, 0.1, 0.1, 0.001))
        self.assertAlmostEqual(least, 4 * 0.2 + 3 * 0.1, places=3)

    def test_leaves_out_what_is_no_stand_in(self):
        real = case_of("real-nvme", 288, 1.0, 0.1, 0.1)
        self.assertEqual(self.least(real), [])

    def test_says_what_is_wrong_with_a_report(self):
        for text in "", "{}", '{"cases": [{"name": "balanced"}]}':
            with self.subTest(text):
                run = self.run_on(text)
                self.assertEqual(run.returncode, 2)
                self.assertIn("steps.json: no report of `terrace bench step --json`", run.stderr)
                self.assertNotIn("Traceback", run.stderr)


if __name__ == "__main__":
    unittest.main()
