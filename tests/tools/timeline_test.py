"""`terrace train --timeline` writes a trace that agrees with the metrics of the same run: bytes by link, stalls by cause,
and no tier above its budget at any moment. Runs the program that TERRACE_BIN names, and where a drive fails mid-run that
of TERRACE_WITH_FAULTS. Perfetto's trace processor loads the trace too, where it is on the PATH."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import unittest
from pathlib import Path

TERRACE = os.environ.get("TERRACE_BIN", "")
WITH_FAULTS = os.environ.get("TERRACE_WITH_FAULTS", "")
# Where cores are shared, a thread that spins while it waits may hold the core of the one it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# As in tools/demo.toml, of a smaller model: everything on three tiers, most of it not on the device.
SMALL = """
[device]
memory = "6MiB"
chunks = "1MiB"
[host]
memory = "8MiB"
[nvme]
paths = ["nvme"]
memory = "32MiB"
[placement]
parameters = { host = 0.7, nvme = 0.3 }
gradients = { host = 0.4, nvme = 0.6 }
optimizer = { nvme = 1.0 }
activations = "recompute"
chunk = "64KiB"
[timeline]
memory = "4MiB"
[model]
layers = 3
heads = 4
width = 128
sequence = 32
[train]
steps = 8
micro_batch = 2
"""
CAUSES = {"nvme→host", "host→device", "device→host", "room on device", "room on host", "room on nvme", "update"}
LINKS = ["nvme→host", "host→nvme", "host→device", "device→host"]
PROGRAM, LINK_GROUP = 1, 2


class Trace:
    """What a file says, by track. Times are whole nanoseconds."""

    def __init__(self, path):
        self.json = json.loads(path.read_text(encoding="utf-8"))
        self.other = self.json["otherData"]
        self.events = self.json["traceEvents"]
        self.complete_since = self.ns(self.other["complete_since_us"])
        self.slices = [event for event in self.events if event["ph"] == "X"]
        for event in self.slices:
            event["begin"] = self.ns(event["ts"])
            event["end"] = event["begin"] + self.ns(event["dur"])
        self.steps = {event["args"]["number"]: event for event in self.of("step")}

    @staticmethod
    def ns(microseconds):
        return round(microseconds * 1000)

    def of(self, category):
        return [event for event in self.slices if event["cat"] == category]

    def complete_steps(self):
        """The numbers of those of which nothing is missing."""
        return [number for number, step in self.steps.items() if step["begin"] >= self.complete_since]

    def within(self, events, step):
        """Those that ended in the step."""
        return [event for event in events if self.steps[step]["begin"] < event["end"] <= self.steps[step]["end"]]


class TimelineTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="terrace-timeline-")
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        self.file = self.folder / "timeline.json"
        (self.folder / "small.toml").write_text(SMALL, encoding="utf-8")
        (self.folder / "text.txt").write_text("".join(f"line {i} of a text to learn\n" for i in range(1000)))

    def command(self, *arguments, program=(TERRACE,)):
        defaults = [] if "--config" in arguments else ["--config", "small.toml", "--data", "text.txt"]
        words = [*program, "train", *defaults, "--timeline", self.file, *arguments]
        return [str(word) for word in words]

    def run_command(self, *arguments, **options):
        return subprocess.run(self.command(*arguments, **options), capture_output=True, text=True, encoding="utf-8",
                              cwd=self.folder, timeout=300, check=False)

    def train(self, *arguments):
        """Returns the trace, the metrics and the report."""
        run = self.run_command("--metrics", "metrics.jsonl", "--json", *arguments)
        self.assertEqual(run.returncode, 0, run.stderr)
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        metrics = {step["step"]: step for step in map(json.loads, lines)}
        return Trace(self.file), metrics, json.loads(run.stdout)["cases"][0]

    # ---- What must hold of any trace

    def check(self, trace):
        self.assertEqual(trace.other["version"], 1)
        self.check_tracks(trace)
        self.check_budgets(trace)
        numbers = list(trace.steps)
        self.assertEqual(numbers, list(range(numbers[0], numbers[0] + len(numbers))), "steps are in order")
        for number in numbers[1:]:
            self.assertEqual(trace.steps[number]["begin"], trace.steps[number - 1]["end"])
        for event in trace.of("transfer"):
            self.assertGreater(event["args"]["bytes"], 0)
            self.assertIn(event["args"]["link"], LINKS)
            self.assertRegex(event["name"], r"^(parameter|gradient|momentum|variance|activation) \d+$")
        for event in trace.of("stall"):
            self.assertIn(event["name"], CAUSES)

    def check_tracks(self, trace):
        """Slices of a track follow one another, and every track has a name."""
        named = {(event["pid"], event["tid"]) for event in trace.events if event["name"] == "thread_name"}
        tracks = {}
        for event in trace.slices:
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
        self.assertLessEqual(set(tracks), named)
        for events in tracks.values():
            events.sort(key=lambda event: (event["begin"], event["end"]))
            for before, after in zip(events, events[1:]):
                self.assertLessEqual(before["end"], after["begin"], (before, after))

    def check_budgets(self, trace):
        counted = set()
        for event in trace.events:
            if event["ph"] != "C":
                continue
            tier, what = event["name"].split(" ")
            counted.add((tier, what))
            self.assertLessEqual(sum(event["args"].values()), trace.other["budget_bytes"][tier], event)
            self.assertGreaterEqual(min(event["args"].values(), default=0), 0, event)
        for tier in ["device", "host", "nvme"]:
            self.assertLessEqual({(tier, what) for what in ["bytes", "total", "peak", "budget"]}, counted)

    def check_against_metrics(self, trace, metrics, steps):
        """Over those steps, which are complete, the trace's slices say what the metrics say."""
        stalls = [event["end"] - event["begin"] for step in steps for event in trace.within(trace.of("stall"), step)]
        said = sum(metrics[step]["stall_seconds"] for step in steps)
        self.assertAlmostEqual(sum(stalls) * 1e-9, said, delta=0.01 * said)
        transfers = [event for step in steps for event in trace.within(trace.of("transfer"), step)]
        for link in LINKS:
            moved = sum(event["args"]["bytes"] for event in transfers
                        if event["args"]["link"] == link and not event["args"]["failed"])
            self.assertEqual(moved, sum(metrics[step]["bytes_moved"][link] for step in steps), link)

    def check_step_totals(self, trace, metrics):
        """What steps say of all that was before goes with the metrics, however much of the trace is missing."""
        for before, step in zip(trace.steps, list(trace.steps)[1:]):
            first, then = trace.steps[before]["args"], trace.steps[step]["args"]
            stalled = (then["stall_us_so_far"] - first["stall_us_so_far"]) * 1e-6
            self.assertAlmostEqual(stalled, metrics[step]["stall_seconds"], delta=1e-6)
            for link in LINKS:
                moved = then["bytes_moved_so_far"][link] - first["bytes_moved_so_far"][link]
                self.assertEqual(moved, metrics[step]["bytes_moved"][link], link)

    # ---- Runs

    def test_it_says_what_the_metrics_say(self):
        trace, metrics, report = self.train()
        self.check(trace)
        self.assertEqual(trace.other["dropped_events"], 0)
        self.assertEqual(list(trace.steps), list(metrics))
        # What was under way when the model was there is the first step's by the metrics.
        self.check_against_metrics(trace, metrics, list(metrics)[1:])
        self.check_step_totals(trace, metrics)
        self.assertAlmostEqual(sum(report["stall_seconds_by_cause"].values()), report["stall_seconds"], delta=1e-6)
        self.assertEqual(set(report["stall_seconds_by_cause"]), CAUSES)
        self.assertTrue(all(step["bytes_moved"][link] > 0 for step in list(metrics.values())[2:] for link in LINKS))
        self.assertTrue(trace.of("update"))
        self.assertTrue(trace.of("begun"))

    def test_that_of_the_demo_does_too(self):
        """tools/demo.toml as it is, but for where its files are and how many steps are made."""
        demo = Path(__file__).resolve().parents[2] / "tools" / "demo.toml"
        trace, metrics, _ = self.train("--config", demo, "--data", sysconfig.get_paths()["stdlib"],
                                       "--set", f"nvme.paths={self.folder}/nvme", "--stop-after", "6")
        self.check(trace)
        self.assertEqual(trace.other["dropped_events"], 0)
        self.check_against_metrics(trace, metrics, list(metrics)[1:])
        self.check_step_totals(trace, metrics)
        self.assertTrue(trace.of("stall"))

    def test_a_stall_names_the_op_and_the_chunk(self):
        trace, _, _ = self.train("--set", "io.prefetch=0")
        ops = {event["args"].get("op", "") for event in trace.of("stall")}
        self.assertTrue(any(op.startswith("aten::") for op in ops), ops)
        self.assertIn("Session::manage", ops)
        self.assertLess(len([event for event in trace.of("stall") if "op" not in event["args"]]), len(trace.of("stall")))
        self.assertTrue(any(event["args"].get("chunk", "").startswith("parameter ") for event in trace.of("stall")))

    def test_a_timeline_too_small_for_the_run_says_so_and_holds_for_the_rest(self):
        trace, metrics, _ = self.train("--set", "timeline.memory=256KiB", "--set", "train.steps=16")
        self.check(trace)
        self.assertGreater(trace.other["dropped_events"], 0)
        self.assertGreater(trace.complete_since, 0)
        complete = trace.complete_steps()
        self.assertTrue(0 < len(complete) < 16, complete)
        self.check_against_metrics(trace, metrics, complete)
        self.check_step_totals(trace, metrics)

    def test_without_a_size_of_its_own_it_takes_little_of_the_host_s_budget(self):
        (self.folder / "small.toml").write_text(SMALL.replace('[timeline]\nmemory = "4MiB"\n', ""))
        trace, _, _ = self.train("--set", "train.steps=2", "--output", "out")
        self.check(trace)
        self.assertIn('[timeline]\nmemory = "512KiB"\n', (self.folder / "out" / "config.toml").read_text())

    def test_an_interrupted_run_writes_it(self):
        command = self.command("--set", "train.steps=1000000")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder) as run:
            for line in run.stderr:
                if line.startswith("step "):
                    break
            run.send_signal(signal.SIGINT)
            _, errors = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130, errors)
        self.check(Trace(self.file))

    def test_a_run_that_fails_writes_it_as_far_as_that_goes(self):
        run = self.run_command("--set", "io.prefetch=0", program=(WITH_FAULTS, "lasting-EIO", "read", 200))
        self.assertEqual(run.returncode, 4, run.stderr)
        trace = Trace(self.file)
        self.check(trace)
        self.assertTrue(any(event["args"]["failed"] for event in trace.of("transfer")))

    # ---- Bad usage

    def fails(self, code, fragments, *arguments):
        run = self.run_command(*arguments)
        self.assertEqual(run.returncode, code, run.stderr)
        for fragment in [*fragments, "\n  hint: "]:
            self.assertIn(str(fragment), run.stderr)

    def test_a_run_without_a_session_has_none(self):
        self.fails(2, ["--timeline", "--unmanaged"], "--unmanaged")

    def test_a_path_that_cannot_be_written_is_told_before_training(self):
        self.file = self.folder / "text.txt" / "timeline.json"
        self.fails(4, [self.file])

    def test_one_that_is_to_keep_nothing_is_refused(self):
        self.fails(2, ["timeline.memory"], "--set", "timeline.memory=0B")

    # ---- Perfetto

    def test_perfetto_loads_it(self):
        processor = shutil.which("trace_processor_shell")
        if processor is None:
            self.skipTest("there is no trace_processor_shell on the PATH")
        trace, _, _ = self.train()
        query = self.folder / "query.sql"
        query.write_text("select count(*) as slices from slice;")
        run = subprocess.run([processor, "-q", query, self.file], capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn(str(len(trace.slices)), run.stdout)


if __name__ == "__main__":
    if not TERRACE or not WITH_FAULTS:
        sys.exit("set TERRACE_BIN and TERRACE_WITH_FAULTS to the programs")
    unittest.main()
