"""`terrace bench step` keeps the command's promises: exit codes with a message and the way out, and every field of its
JSON. Figures are not checked: speed belongs in benchmarks. Runs the program that TERRACE_BIN names."""

import json
import os
import signal
import subprocess
import tempfile
import time
import unittest

TERRACE = os.environ.get("TERRACE_BIN", "")
FIELDS = [
    "name", "seconds", "floor_seconds", "ratio", "bound_by", "terms", "as_defined", "bytes_moved", "necessary_bytes",
    "bytes_moved_by_kind", "bytes_ratio", "setting", "stall_seconds", "demand_fetches", "stolen_share", "pairs", "target",
    "verdict", "also_judged",
]
LINKS = ["nvme→host", "host→nvme", "host→device", "device→host"]


def bench(*arguments, what="step"):
    return subprocess.run([TERRACE, "bench", what, *arguments], capture_output=True, text=True, timeout=600)


class BenchTest(unittest.TestCase):
    def test_help_shows_an_example(self):
        result = bench("--help")
        self.assertEqual(result.returncode, 0)
        self.assertIn("terrace bench step --nvme", result.stdout)
        self.assertIn("link-bound", result.stdout)

    def test_a_command_that_is_not_known_is_named_with_the_nearest_one(self):
        for arguments, unknown, nearest in ((["banch", "step"], "banch", "bench"),
                                            (["bench", "nmve", "--path", "x"], "nmve", "nvme")):
            result = subprocess.run([TERRACE, *arguments], capture_output=True, text=True, timeout=60)
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"there is no command '{unknown}'", result.stderr)
            self.assertIn(f"did you mean '{nearest}'", result.stderr)

    def test_an_option_without_a_command_is_not_taken_for_one(self):
        for arguments in (["--verison"], ["bench", "--json"]):
            result = subprocess.run([TERRACE, *arguments], capture_output=True, text=True, timeout=60)
            self.assertEqual(result.returncode, 2)
            self.assertNotIn("no command", result.stderr)

    def test_without_a_command_one_is_asked_for(self):
        result = subprocess.run([TERRACE], capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 2)
        self.assertIn("subcommand is required", result.stderr)

    def test_an_unknown_case_is_bad_usage_that_lists_the_cases(self):
        result = bench("--case", "fast")
        self.assertEqual(result.returncode, 2)
        self.assertIn("'fast'", result.stderr)
        cases = [bound + rest for bound in ("compute-bound", "link-bound", "nvme-bound", "balanced")
                 for rest in ("", "-nvme", "-mixed", "-x4", "-clipped")]
        self.assertIn(", ".join(cases + ["real-resident", "real-nvme", "waited-nvme"]), result.stderr)

    def test_a_case_with_states_on_nvme_needs_a_folder(self):
        result = bench("--case", "nvme-bound")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--nvme", result.stderr)

    def test_link_reports_each_direction_and_both(self):
        result = bench("--set", "device.kind=emulated", "--json", what="link")
        self.assertEqual(result.returncode, 0, result.stderr)
        report = json.loads(result.stdout)
        self.assertEqual((report["version"], report["device"]), (1, "emulated"))
        names = [case["name"] for case in report["cases"]]
        self.assertEqual(names[:4], ["host→device, pageable", "host→device", "device→host", "both at once"])
        self.assertTrue(all(case["bytes_per_second"] > 0 for case in report["cases"]))
        paced = {case["name"]: case for case in report["cases"][4:]}
        self.assertEqual(len(paced), 18)
        self.assertEqual(paced["both at once at 250MB/s"]["configured_bytes_per_second"], 250e6)
        for case in paced.values():
            share = case["achieved_over_configured"]
            self.assertTrue(0 < share["low"] <= share["median"] <= share["high"] <= 1.01, case)
            self.assertIn(case["kept"], (True, False))

    def test_nvme_reports_each_side_and_leaves_nothing(self):
        with tempfile.TemporaryDirectory(prefix="terrace-bench-", dir=os.path.dirname(TERRACE)) as folder:
            result = bench("--path", folder, "--block", "64KiB", "--depth", "4", "--bytes", "4MiB", "--rounds", "1",
                           "--json", what="nvme")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(os.listdir(folder), [])
        report = json.loads(result.stdout)
        self.assertEqual([case["name"] for case in report["cases"]],
                         ["read 64KiB x 4", "write 64KiB x 4", "mixed 64KiB x 4"])
        for case in report["cases"]:
            self.assertTrue(case["read_gb_per_second"] + case["write_gb_per_second"] > 0)
            sides = {"service", "engine", "bare", "bare_with_checksums", "bare_beside_checksums"}
            self.assertLessEqual(sides, set(case["gb_per_second"]))
            self.assertEqual(sides, set(case["cpu_seconds_per_gb"]))
            self.assertGreater(case["share_of_bare_beside_checksums"]["median"], 0)
            self.assertTrue(0 < case["depth_share"] <= 1.01, case)
            self.assertEqual(case["bare_with_checksums_threads"], 2 if case["name"].startswith("mixed") else 1)

    def interrupted(self, what, *arguments, until):
        """The report of a bench that Ctrl-C ends once this holds."""
        with subprocess.Popen([TERRACE, "bench", what, "--json", *arguments], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as run:
            try:
                begin = time.monotonic()
                while not until(run.pid):
                    self.assertIsNone(run.poll())
                    self.assertLess(time.monotonic() - begin, 60)
                    time.sleep(0.01)
                run.send_signal(signal.SIGINT)
                output, errors = run.communicate(timeout=120)
            finally:
                run.kill()
        self.assertEqual(run.returncode, 130, errors)
        return json.loads(output)

    def test_an_interrupt_ends_nvme_with_what_was_measured_and_leaves_nothing(self):
        with tempfile.TemporaryDirectory(prefix="terrace-bench-", dir=os.path.dirname(TERRACE)) as folder:
            report = self.interrupted("nvme", "--path", folder, "--bytes", "4MiB", "--rounds", "100000",
                                      until=lambda _: os.listdir(folder))
            self.assertEqual(os.listdir(folder), [])
        self.assertEqual(report["cases"], [])

    def test_an_interrupt_ends_adam_and_link_with_what_was_measured(self):
        def listens(process):
            with open(f"/proc/{process}/status", encoding="utf-8") as status:
                caught = next(line for line in status if line.startswith("SigCgt:"))
            return int(caught.split()[1], 16) & 1 << (signal.SIGINT - 1)

        report = self.interrupted("adam", "--parameters", "64Ki", "--rounds", "100000", until=listens)
        self.assertEqual(report["cases"], [])
        report = self.interrupted("link", "--set", "device.kind=emulated", until=listens)
        self.assertLess(len(report["cases"]), 22)

    def test_adam_reports_each_format_beside_its_roofline(self):
        result = bench("--parameters", "64Ki", "--parameters", "1000", "--rounds", "1", "--json", what="adam")
        self.assertEqual(result.returncode, 0, result.stderr)
        report = json.loads(result.stdout)
        self.assertEqual(report["version"], 1)
        cases = report["cases"]
        moved = {case["name"].rsplit(", ", 2)[0]: case["bytes_per_param"] for case in cases}
        self.assertEqual(moved, {"fp32, states float32": 28, "fp32, states split_bfloat16": 20,
                                 "bf16, states float32": 30, "bf16, states split": 26, "bf16, states split_bfloat16": 18,
                                 "bf16, fp32 gradients, states float32": 32, "bf16, fp32 gradients, states split": 28,
                                 "bf16, fp32 gradients, states split_bfloat16": 20})
        self.assertEqual({case["parameters"] for case in cases}, {65536, 1000})
        self.assertEqual(len({case["name"] for case in cases}), len(cases))
        for case in cases:
            self.assertGreater(case["gparams_per_second"], 0)
            self.assertGreater(case["roofline_gb_per_second"], 0)
            self.assertGreater(case["fraction"]["median"], 0)
            self.assertAlmostEqual(case["gb_per_second"],
                                   case["gparams_per_second"] * case["bytes_per_param"], delta=1e-6)
            self.assertNotIn("target", case)
            self.assertEqual(case["verdict"], "none")

    def test_adam_has_a_target_where_memory_sets_the_pace_of_all_threads(self):
        result = bench("--parameters", "48Mi", "--rounds", "1", "--json", what="adam")
        self.assertEqual(result.returncode, 0, result.stderr)
        cases = json.loads(result.stdout)["cases"]
        all_threads = max(case["threads"] for case in cases)
        for case in cases:
            if case["threads"] == all_threads:
                self.assertEqual(case["target"], {"figure": "fraction", "sense": "at least", "value": 0.95})
                met = case["fraction"]["low"] >= 0.93
                self.assertEqual(case["verdict"], "met" if met else "missed")
            else:
                self.assertNotIn("target", case)
                self.assertEqual(case["verdict"], "none")

    def test_adam_refuses_what_is_no_number(self):
        for arguments in [("--parameters", "0"), ("--parameters", "many"), ("--parameters", "9Ti"), ("--rounds", "0")]:
            self.assertEqual(bench(*arguments, what="adam").returncode, 2, arguments)

    def test_nvme_refuses_what_is_no_measurement(self):
        for arguments in ([], ["--path", ".", "--block", "5000B"], ["--path", ".", "--depth", "0"],
                          ["--path", ".", "--bytes", "4KiB"]):
            self.assertEqual(bench(*arguments, what="nvme").returncode, 2, arguments)
        self.assertEqual(bench("--path", "/proc", "--bytes", "1MiB", what="nvme").returncode, 4)

    def test_update_reports_floors_and_what_is_hidden_and_leaves_nothing(self):
        with tempfile.TemporaryDirectory(prefix="terrace-bench-", dir=os.path.dirname(TERRACE)) as folder:
            path = os.path.join(folder, "made")
            result = bench("--path", path, "--layers", "8", "--pairs", "1", "--json", what="update")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(os.listdir(folder), [])
        report = json.loads(result.stdout)
        self.assertEqual(report["version"], 2)
        self.assertIn("cores", report["machine"])
        self.assertEqual([case["name"] for case in report["cases"]], ["fp32-float32", "bf16-split_bfloat16"])
        for case, bytes_of_states in zip(report["cases"], (8, 6)):
            self.assertEqual(case["state_bytes"], bytes_of_states * case["parameters"])
            for link in ("nvme→host", "host→nvme"):
                self.assertTrue(0 < case["bytes_moved"][link] <= case["state_bytes"], case)
            for seconds in ("seconds", "nvme_floor_seconds", "dram_floor_seconds", "together_seconds"):
                self.assertGreater(case[seconds], 0)
            larger = max(case["nvme_floor_seconds"], case["dram_floor_seconds"])
            self.assertAlmostEqual(case["fraction"]["median"], larger / case["seconds"], places=6)
            self.assertAlmostEqual(case["fraction_of_together"]["median"], case["together_seconds"] / case["seconds"],
                                   places=6)
            self.assertEqual(case["target"], {"figure": "fraction", "sense": "at least", "value": 0.9})
            self.assertIn(case["verdict"], ["met", "missed"])
            self.assertEqual(set(case["hidden"]), {"median", "low", "high"})
            self.assertEqual(case["hidden"], case["behind_forward"]["hidden"])
            self.assertIn(case["behind_forward"]["verdict"], ["met", "missed"])
            for behind in (case["behind_forward"], case["behind_step"]):
                self.assertGreater(behind["compute_over_update"], 0)
                self.assertGreater(behind["with_seconds"], 0)
                self.assertGreater(behind["without_seconds"], 0)

    def test_update_refuses_what_is_no_measurement(self):
        for arguments in ([], ["--path", ""], ["--path", ".", "--layers", "1"], ["--path", ".", "--pairs", "0"]):
            self.assertEqual(bench(*arguments, what="update").returncode, 2, arguments)
        unknown = bench("--path", ".", "--case", "fp64", what="update")
        self.assertEqual(unknown.returncode, 2)
        self.assertIn("the cases are fp32-float32, bf16-split_bfloat16", unknown.stderr)
        self.assertEqual(bench("--path", "/proc/states", what="update").returncode, 4)

    def test_update_that_does_not_fit_says_so_before_it_begins(self):
        with tempfile.TemporaryDirectory(prefix="terrace-bench-", dir=os.path.dirname(TERRACE)) as folder:
            result = bench("--path", folder, "--layers", "1000000", what="update")
            self.assertEqual(result.returncode, 3)
            self.assertIn("lower --layers", result.stderr)
            self.assertEqual(os.listdir(folder), [])

    def test_activations_reports_each_way_and_the_plan_and_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            result = bench("--path", folder, "--case", "mixed", "--case", "hidden", "--rounds", "1", "--json",
                           what="activations")
            self.assertEqual(result.returncode, 0, result.stderr)
            mixed, hidden = json.loads(result.stdout)["cases"]
            self.assertEqual(os.listdir(folder), [])
        self.assertEqual((mixed["name"], hidden["name"]), ("mixed", "hidden"))
        self.assertEqual(list(mixed["activations"]), ["auto", "host", "nvme", "recompute"])
        plan = mixed["activations"]["auto"]["plan"]
        self.assertRegex(plan["blocks"], "^[kor]{6}( \\(dropped\\))?$")
        for field in ["predicted_seconds", "predicted_bytes", "measured_bytes", "seconds_before", "bytes_before"]:
            self.assertGreaterEqual(plan[field], 0)
        self.assertEqual(mixed["activations"]["recompute"]["left_device_bytes"], 0)
        self.assertGreater(mixed["activations"]["host"]["left_device_bytes"], 0)
        for other in ["host", "nvme", "recompute"]:
            self.assertEqual(list(mixed["auto over " + other]), ["median", "low", "high"])
        self.assertRegex(mixed["exhaustive_search"]["blocks"], "^[r-]{6}$")
        self.assertIn("r", mixed["exhaustive_search"]["blocks"])
        self.assertIn("-", mixed["exhaustive_search"]["blocks"])
        self.assertIn(mixed["verdict"], ["met", "missed"])
        self.assertEqual(list(hidden["activations"]), ["keep", "host"])
        self.assertEqual(hidden["activations"]["keep"]["left_device_bytes"], 0)

    def test_activations_refuses_what_is_no_measurement(self):
        for arguments, said in ((["--path", "x", "--case", "fastest"], "slow-link, medium-link, fast-link, all-fits, mixed"),
                                ([], "--path"), (["--path", ""], "a folder"),
                                (["--path", "x", "--rounds", "0"], "--rounds")):
            result = bench(*arguments, what="activations")
            self.assertEqual(result.returncode, 2, arguments)
            self.assertIn(said, result.stderr)
        with tempfile.NamedTemporaryFile() as file:
            result = bench("--path", file.name + "/folder", what="activations")
            self.assertEqual(result.returncode, 4)
            self.assertIn(file.name, result.stderr)

    def test_link_on_cuda_without_a_gpu_is_bad_usage_that_says_why(self):
        result = bench("--set", "device.kind=cuda", what="link")
        self.assertEqual(result.returncode, 2)
        self.assertIn("device.kind", result.stderr)
        self.assertIn("hint: ", result.stderr)

    def test_no_pairs_are_bad_usage(self):
        self.assertEqual(bench("--case", "real-resident", "--pairs", "0").returncode, 2)

    def test_json_has_every_field_and_the_store_is_gone_afterwards(self):
        # Beside the build, which lies on a drive: temporary folders may be in memory, without O_DIRECT.
        with tempfile.TemporaryDirectory(prefix="terrace-bench-", dir=os.path.dirname(TERRACE)) as folder:
            result = bench("--case", "link-bound", "--pairs", "1", "--json", "--nvme", folder)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(os.listdir(folder), [])
        report = json.loads(result.stdout)
        self.assertEqual(report["version"], 1)
        self.assertIn("cores", report["machine"])
        (case,) = report["cases"]
        for field in FIELDS:
            self.assertIn(field, case)
        self.assertEqual(case["name"], "link-bound")
        self.assertEqual(set(case["ratio"]), {"median", "low", "high"})
        self.assertAlmostEqual(case["ratio"]["median"], case["seconds"] / case["floor_seconds"], places=3)
        self.assertAlmostEqual(case["floor_seconds"], max(case["terms"].values()), places=6)
        for link in LINKS:
            self.assertGreater(case["bytes_moved"][link], 0)
        self.assertGreaterEqual(case["phased_floor_seconds"], case["floor_seconds"])
        self.assertIn(case["verdict"], ["met", "missed"])
        (bytes_moved,) = case["also_judged"]
        self.assertEqual(bytes_moved["target"], {"figure": "bytes", "sense": "at most", "value": 1.05})
        self.assertEqual(bytes_moved["value"]["median"], case["bytes_ratio"])
        self.assertAlmostEqual(
            case["bytes_ratio"], sum(case["bytes_moved"].values()) / sum(case["necessary_bytes"].values()), places=6
        )
        self.assertEqual(report["median_ratio"], case["ratio"]["median"])


if __name__ == "__main__":
    unittest.main()
