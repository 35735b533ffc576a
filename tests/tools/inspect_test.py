"""`terrace inspect` keeps the command's promises: it tells what a run would use and what falls back, with exit codes and
the way out, leaves nothing behind, and keeps measured rates. Figures are not checked. Runs the program that TERRACE_BIN
names."""

import ctypes
import errno
import fcntl
import json
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

TERRACE = os.environ.get("TERRACE_BIN", "")
MIB = 1 << 20
NOT_MEASURED = "not measured (terrace inspect --probe)"
CALLS = {
    "x86_64": {"io_uring_setup": 425, "fallocate": 285, "fcntl": 72},
    "aarch64": {"io_uring_setup": 425, "fallocate": 47, "fcntl": 25},
}.get(platform.machine())


def refuse(call, error_number, second=None):
    """A function that makes one system call fail from then on, in this process and those that it becomes; or that call
    with this second argument."""
    def instruction(code, jump_true, jump_false, value):
        return struct.pack("HBBI", code, jump_true, jump_false, value)

    load, jump_if_equal, answer, number_of_call, second_argument = 0x20, 0x15, 0x06, 0, 24
    fail, allow = 0x00050000 | error_number, 0x7FFF0000
    narrower = [] if second is None else [instruction(load, 0, 0, second_argument),
                                          instruction(jump_if_equal, 0, 1, second)]
    program = [instruction(load, 0, 0, number_of_call), instruction(jump_if_equal, 0, len(narrower) + 1, CALLS[call]),
               *narrower, instruction(answer, 0, 0, fail), instruction(answer, 0, 0, allow)]
    buffer = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)

    def apply():
        pr_set_no_new_privs, pr_set_seccomp, filter_mode = 38, 22, 2
        if libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) or libc.prctl(pr_set_seccomp, filter_mode, header):
            raise OSError(ctypes.get_errno(), "seccomp")

    apply.keep = buffer  # as long as the function is there
    return apply


class InspectTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="terrace-inspect-")
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        self.nvme = self.folder / "nvme"
        self.cache = self.folder / "cache"
        self.rates = self.cache / "terrace" / "rates.json"
        self.small = ["--set", "device.memory=8MiB", "--set", "host.memory=16MiB"]
        self.three_tiers = [*self.small, "--set", f"nvme.paths={self.nvme}", "--set", "nvme.memory=64MiB"]

    def environment(self, **changes):
        return {**os.environ, "XDG_CACHE_HOME": str(self.cache), **changes}

    def inspect(self, *arguments, refused=None, **environment):
        command = [TERRACE, "inspect", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=self.folder, timeout=120,
                              check=False, env=self.environment(**environment), preexec_fn=refused)

    def succeeds(self, *arguments, **options):
        run = self.inspect(*arguments, **options)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run

    def report(self, *arguments, **options):
        """The whole of the JSON, and its case."""
        report = json.loads(self.succeeds("--json", *arguments, **options).stdout)
        self.assertEqual(list(report), ["version", "machine", "cases"])
        (case,) = report["cases"]
        self.assertEqual(case["name"], "inspect")
        return report, case

    def fails(self, code, fragments, *arguments, **options):
        run = self.inspect(*arguments, **options)
        self.assertEqual(run.returncode, code, run.stderr)
        self.assertEqual(run.stdout, "")
        message = run.stderr[run.stderr.rindex("terrace: "):]
        for fragment in fragments:
            self.assertIn(str(fragment), message)


class Usage(InspectTest):
    def test_help_shows_an_example(self):
        run = self.succeeds("--help")
        self.assertIn("Example", run.stdout)
        self.assertIn("terrace inspect --config", run.stdout)
        self.assertIn("Exit codes", run.stdout)

    def test_bad_usage_is_refused(self):
        self.fails(2, ["--frobnicate", "terrace inspect --help"], "--frobnicate")
        self.fails(2, ["device.memroy", "device.memory"], "--set", "device.memroy=1MiB")
        self.fails(2, ["missing.toml"], "--config", "missing.toml")
        self.fails(2, ["--config", "found nothing"], "--config", "")
        self.fails(2, ["/dev/zero", "more than 1MiB"], "--config", "/dev/zero")

    def test_budgets_that_are_too_small_are_refused(self):
        self.fails(3, ["host.memory", "hint"], "--set", "host.memory=16KiB")
        self.fails(3, ["nvme.memory", "hint"], *self.three_tiers, "--set", "nvme.memory=1KiB")

    def test_bad_paths_are_named(self):
        (self.folder / "file").write_text("text")
        below = self.folder / "file" / "nvme"
        self.fails(4, [below, "hint"], *self.small, "--set", f"nvme.paths={below}", "--set", "nvme.memory=64MiB")
        self.fails(4, ["nvme.memory", "free"], *self.three_tiers, "--set", "nvme.memory=900000TiB")
        self.assertFalse(self.nvme.exists(), "a failure leaves no folder")
        for path in ("/proc", "/sys"):
            self.fails(4, [f"the file system of {path} has 0B free", "hint"], *self.small, "--set", f"nvme.paths={path}")


class Report(InspectTest):
    def test_the_table_shows_every_part(self):
        text = self.succeeds(*self.three_tiers).stdout
        for part in ["build\n", "machine\n", "tiers\n", "device\n", f"nvme {self.nvme}\n", "work\n", "fallbacks",
                     "LibTorch", "processor", "8MiB (device.memory)", "16MiB (host.memory)", "(nvme.memory)",
                     "emulated", "file system", "O_DIRECT", "I/O engine", "hwloc", "liburing", "Linux"]:
            self.assertIn(part, text)
        self.assertEqual(text.count(NOT_MEASURED), 3, text)

    def test_auto_is_told_with_what_it_stood_for(self):
        text = self.succeeds().stdout
        self.assertIn("(auto: half of the available memory)", text)
        self.assertIn("(auto: a quarter of the available memory)", text)
        self.assertIn("none (nvme.paths is empty)", text)

    def test_json_has_every_part(self):
        report, case = self.report(*self.three_tiers)
        self.assertEqual(report["version"], 1)
        machine = report["machine"]
        self.assertGreater(machine["available_bytes"], 0)
        self.assertGreaterEqual(machine["topology"]["threads"], machine["topology"]["usable_threads"])
        self.assertIsNone(machine["rates"])
        self.assertEqual({tier: each["budget_bytes"] for tier, each in case["tiers"].items()},
                         {"device": 8 * MIB, "host": 16 * MIB, "nvme": case["tiers"]["nvme"]["budget_bytes"]})
        self.assertLessEqual(case["tiers"]["nvme"]["budget_bytes"], 64 * MIB)
        self.assertEqual(case["chunk_bytes"] % case["granule_bytes"], 0)
        self.assertEqual(case["device"]["kind"], "emulated")
        self.assertIsNone(case["device"]["link_bytes_per_second"])
        (path,) = case["nvme"]["paths"]
        self.assertEqual(path["path"], str(self.nvme))
        self.assertGreater(path["free_bytes"], 0)
        self.assertNotEqual(path["file_system"], "")
        self.assertIn(case["nvme"]["engine"], ["io_uring", "threads"])
        self.assertTrue(case["update"]["instruction_set"])
        self.assertEqual(case["build"]["libtorch"].split(".")[0], "2")

    def test_there_is_no_nvme_without_paths(self):
        _, case = self.report(*self.small)
        self.assertIsNone(case["nvme"])

    def test_a_configuration_is_read_and_overridden(self):
        (self.folder / "some.toml").write_text('[device]\nmemory = "8MiB"\nlink = "500MB/s"\n[host]\nmemory = "16MiB"\n')
        _, case = self.report("--config", "some.toml", "--set", "device.memory=4MiB")
        self.assertEqual(case["tiers"]["device"]["budget_bytes"], 4 * MIB)
        self.assertEqual(case["device"]["link_bytes_per_second"], 500_000_000)

    def test_who_updates_is_told(self):
        cores = len(os.sched_getaffinity(0))
        _, case = self.report(*self.small, OMP_NUM_THREADS=str(cores))
        self.assertFalse(case["update"]["in_background"])
        self.assertEqual(case["update"]["threads"], cores)
        if cores > 1:
            _, case = self.report(*self.small, OMP_NUM_THREADS="1")
            self.assertTrue(case["update"]["in_background"])
            self.assertEqual(case["compute"]["threads"], 1)
            self.assertEqual(case["update"]["threads"], cores - 1)

    def test_nobody_owns_hardware_threads_where_compute_leaves_none(self):
        cores = str(len(os.sched_getaffinity(0)))
        _, case = self.report(*self.small, OMP_NUM_THREADS=cores)
        for part in ("compute", "update", "transfers"):
            self.assertIsNone(case[part]["hardware_threads"])
            self.assertIsNone(case[part]["numa_nodes"])
        self.assertEqual(self.succeeds(*self.small, OMP_NUM_THREADS=cores).stdout.count(", on any hardware thread\n"), 3)

    def test_who_owns_which_hardware_threads_is_told(self):
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            self.skipTest("this process may run on one hardware thread only")
        two = usable[-2:]
        here = {"refused": lambda: os.sched_setaffinity(0, two), "OMP_NUM_THREADS": "1"}
        _, case = self.report(*self.small, **here)
        self.assertEqual([case[part]["hardware_threads"] for part in ("compute", "update", "transfers")],
                         [str(two[0]), str(two[1]), None])
        text = self.succeeds(*self.small, **here).stdout
        self.assertIn(f"1 thread, to which updates leave hardware thread {two[0]}", text)
        self.assertIn(f"1 thread, beside computation, on hardware thread {two[1]}", text)
        self.assertIn("2 threads, one a link, on any hardware thread", text)

    def test_owners_are_told_as_ranges_with_their_numa_nodes(self):
        there = {"HWLOC_SYNTHETIC": "package:2 [numanode] core:4 pu:1", "OMP_NUM_THREADS": "2"}
        _, case = self.report(*self.small, **there)
        self.assertEqual([(case[part]["hardware_threads"], case[part]["numa_nodes"])
                          for part in ("compute", "update", "transfers")],
                         [("0-1", [0]), ("2-7", [0, 1]), ("2-7", [0, 1])])
        self.assertEqual(case["update"]["threads"], 6)
        text = self.succeeds(*self.small, **there).stdout
        self.assertIn("2 threads, to which updates leave hardware threads 0-1 near NUMA node 0\n", text)
        self.assertIn("6 threads, beside computation, on hardware threads 2-7 near NUMA nodes 0 and 1\n", text)

    def test_transfers_have_a_thread_a_link(self):
        self.assertEqual(self.report(*self.small)[1]["transfers"]["threads"], 2)
        self.assertEqual(self.report(*self.three_tiers)[1]["transfers"]["threads"], 4)

    def test_what_others_left_is_left(self):
        self.nvme.mkdir()
        header = struct.pack("<8sII", b"TERRACE", 1, 4096).ljust(4096, b"\0")
        (self.nvme / "terrace-1-2.extents").write_bytes(header)  # of a process that is gone; a run removes it
        self.succeeds(*self.three_tiers)
        self.assertEqual([path.name for path in self.nvme.iterdir()], ["terrace-1-2.extents"])

    def test_nothing_is_left_of_what_was_made(self):
        self.succeeds(*self.three_tiers, "--set", f'nvme.paths=["{self.nvme}/a/b", "{self.nvme}/a/c"]')
        self.assertEqual(list(self.folder.iterdir()), [])
        self.nvme.mkdir()
        self.succeeds(*self.three_tiers)
        self.assertEqual(list(self.nvme.iterdir()), [])


@unittest.skipUnless(CALLS, "no numbers of system calls for this processor")
class Fallbacks(InspectTest):
    def fallback(self, words, *arguments, refused):
        """The reason of the fallback with these words, of the JSON; the table and the log show it too."""
        _, case = self.report(*self.three_tiers, *arguments, refused=refused)
        (found,) = [each for each in case["fallbacks"] if words in each["what"]]
        run = self.succeeds(*self.three_tiers, *arguments, refused=refused)
        self.assertIn(f"{found['what']},\n    because {found['reason']}\n", run.stdout)
        self.assertIn(f"{found['what']}, because {found['reason']}\n", run.stderr)
        return found["reason"], case

    def test_threads_instead_of_io_uring(self):
        reason, case = self.fallback("threads read and write", refused=refuse("io_uring_setup", errno.EPERM))
        self.assertIn("Operation not permitted", reason)
        self.assertEqual(case["nvme"]["engine"], "threads")

    def test_io_uring_by_name_is_refused_where_it_is_not_to_be_had(self):
        self.fails(2, ["io_uring is not available"], *self.three_tiers, "--set", "io.engine=io_uring",
                   refused=refuse("io_uring_setup", errno.EPERM))

    def test_the_page_cache_instead_of_direct_transfers(self):
        reason, case = self.fallback(f"transfers in {self.nvme} go through the page cache",
                                     refused=refuse("fcntl", errno.EINVAL, fcntl.F_SETFL))
        self.assertIn("O_DIRECT", reason)
        self.assertFalse(case["nvme"]["paths"][0]["direct"])

    def test_space_that_is_not_set_aside(self):
        reason, case = self.fallback(f"a full disk shows only when {self.nvme} is written",
                                     refused=refuse("fallocate", errno.EOPNOTSUPP))
        self.assertIn("cannot set space aside", reason)
        self.assertFalse(case["nvme"]["paths"][0]["space_is_guaranteed"])


class Rates(InspectTest):
    def test_are_measured_kept_and_shown_again_with_their_date(self):
        run = self.succeeds(*self.three_tiers, "--probe")
        self.assertNotIn(NOT_MEASURED, run.stdout)
        self.assertFalse(self.nvme.exists(), "nothing is left of what was written")
        kept = json.loads(self.rates.read_text(encoding="utf-8"))
        self.assertEqual(list(kept), ["version", "machine", "memory", "paths", "links"])
        report, case = self.report(*self.three_tiers)
        self.assertEqual(report["machine"]["rates"], kept["memory"])
        self.assertEqual(case["nvme"]["paths"][0]["rates"], kept["paths"][str(self.nvme.resolve())])
        self.assertEqual([case["device"]["rates"]], list(kept["links"].values()))
        text = self.succeeds(*self.three_tiers).stdout
        self.assertEqual(text.count(kept["memory"]["measured_at"][:10]), 3, text)
        # What it did best with is what a run uses now.
        best = kept["paths"][str(self.nvme.resolve())]
        self.assertEqual(case["nvme"]["depth"],
                         max(8, min(256, best["depth"] * best["block_bytes"] // case["nvme"]["block_bytes"])))
        # Of another path and of another link nothing is known.
        other = self.succeeds(*self.small, "--set", "device.link=100MB/s", "--set", f"nvme.paths={self.folder}/other",
                              "--set", "nvme.memory=64MiB").stdout
        self.assertEqual(other.count(NOT_MEASURED), 2, other)

    def test_of_a_broken_file_are_ignored_with_a_line_and_replaced(self):
        self.rates.parent.mkdir(parents=True)
        self.rates.write_text('{"version": 1')
        run = self.succeeds(*self.small)
        self.assertIn("rates.json are ignored: it is broken", run.stderr)
        self.assertIn(NOT_MEASURED, run.stdout)
        self.assertEqual(self.rates.read_text(), '{"version": 1', "only a probe replaces it")
        self.succeeds(*self.small, "--probe")
        self.assertNotIn("ignored", self.succeeds(*self.small).stderr)

    def test_that_cannot_be_kept_are_a_warning(self):
        self.cache.write_text("a file where a folder is wanted")
        run = self.succeeds(*self.small, "--probe")
        self.assertIn("warning: the rates are not kept", run.stderr)
        self.assertNotIn(NOT_MEASURED, run.stdout)

    def test_an_interrupt_leaves_nothing(self):
        command = [TERRACE, "inspect", *self.three_tiers, "--probe"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
                              env=self.environment()) as run:
            for line in run.stderr:
                if line.startswith(f"measuring {self.nvme}"):
                    break
            while not list(self.nvme.glob("*")):
                time.sleep(0.01)
            run.send_signal(signal.SIGINT)
            output, errors = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130, errors)
        self.assertEqual(output, "")
        self.assertIn("interrupted", errors)
        self.assertEqual(list(self.folder.iterdir()), [])


if __name__ == "__main__":
    if not TERRACE:
        sys.exit("set TERRACE_BIN to the terrace program")
    unittest.main()
