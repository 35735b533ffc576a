"""`terrace train` keeps the command's promises: exit codes with a message and the way out, metrics, and the same
losses with and without a session. Runs the program that TERRACE_BIN names."""

import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from tiny_model import ON_NVME, TINY

TERRACE = os.environ.get("TERRACE_BIN", "")
# Where cores are shared, a thread that spins while it waits may hold the core of the one it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
METRICS = [
    "step", "loss", "learning_rate", "gradient_norm", "tokens", "seconds", "tokens_per_second", "stall_seconds",
    "device_bytes", "host_bytes", "nvme_bytes", "bytes_moved",
]
LINKS = ["nvme→host", "host→nvme", "host→device", "device→host"]


class TrainTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="terrace-train-")
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        self.config = self.write("tiny.toml", TINY + "steps = 3\n")
        self.text = self.write("text.txt", "".join(f"line {i} of a text to learn\n" for i in range(1000)))

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def train(self, *arguments, config=None, data=None):
        """Runs `terrace train`. Returns what subprocess.run returns."""
        command = [TERRACE, "train", "--config", config or self.config, "--data", data or self.text, *arguments]
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, encoding="utf-8",
                              errors="replace", cwd=self.folder, timeout=120, check=False)

    def succeeds(self, *arguments, **paths):
        run = self.train(*arguments, **paths)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run

    def fails(self, code, fragments, *arguments, **paths):
        """The run ends with the code, and one message with the fragments and a hint."""
        run = self.train(*arguments, **paths)
        self.assertEqual(run.returncode, code, run.stderr)
        self.assertEqual(run.stdout, "")
        message = run.stderr[run.stderr.rindex("terrace: "):]
        for fragment in [*fragments, "\n  hint: "]:
            self.assertIn(str(fragment), message)
        return message

    def metrics(self, name, *arguments, config=None):
        path = self.folder / name
        self.succeeds("--metrics", path, *arguments, config=config)
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class StandardStreams(TrainTest):
    def command(self, *arguments):
        return [str(word) for word in
                [TERRACE, "train", "--config", self.config, "--data", self.text, *ON_NVME, *arguments]]

    def test_a_report_that_cannot_be_written_is_an_error(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            for command in (self.command("--json"), [TERRACE, "inspect"], [TERRACE, "--help"]):
                run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=self.folder,
                                     timeout=120, check=False)
                self.assertEqual(run.returncode, 4, run.stderr)
                self.assertIn("terrace: not all of the report could be written", run.stderr)

    def test_where_they_are_closed_nothing_else_takes_their_place(self):
        metrics = self.folder / "metrics.jsonl"

        def close_all():
            for descriptor in (0, 1, 2):
                os.close(descriptor)

        # pylint: disable=subprocess-popen-preexec-fn
        with subprocess.Popen(self.command("--set", "train.steps=100000", "--metrics", metrics), cwd=self.folder,
                              preexec_fn=close_all) as run:
            try:
                while not metrics.exists() or not metrics.stat().st_size:
                    self.assertIsNone(run.poll())
                    time.sleep(0.02)
                for descriptor in (0, 1, 2):
                    self.assertEqual(os.readlink(f"/proc/{run.pid}/fd/{descriptor}"), "/dev/null")
            finally:
                run.kill()

    def test_a_limit_on_the_size_of_files_is_an_error_and_not_the_end(self):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        for size in (1 << 20, 64 << 10):
            run = subprocess.run(self.command(), cwd=self.folder, timeout=120, check=False, capture_output=True, text=True,
                                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit)))
            self.assertIn(run.returncode, (3, 4), run.stderr)
            self.assertIn("terrace: ", run.stderr)


class Device(TrainTest):
    def test_without_a_gpu_one_line_says_that_the_device_is_emulated_and_why(self):
        lines = [line for line in self.succeeds().stderr.splitlines() if "device: emulated on the CPU, because" in line]
        self.assertEqual(len(lines), 1)
        asked_for = self.succeeds("--set", "device.kind=emulated")
        self.assertNotIn("device: emulated", asked_for.stderr)

    def test_cuda_without_a_gpu_is_refused_with_the_reason(self):
        self.fails(2, ['device.kind is "cuda", but '], "--set", "device.kind=cuda")

    def test_without_a_session_the_device_is_chosen_in_the_same_way(self):
        self.fails(2, ['device.kind is "cuda", but '], "--set", "device.kind=cuda", "--unmanaged")


class BadUsage(TrainTest):
    def test_a_missing_data_path_is_named(self):
        missing = self.folder / "missing"
        self.fails(2, [missing, "no such file"], data=missing)

    def test_empty_data_is_refused(self):
        empty = self.write("empty.txt", "")
        self.fails(2, [empty, "no text"], data=empty)
        (self.folder / "hollow").mkdir()
        self.fails(2, ["hollow", "no text"], data=self.folder / "hollow")

    def test_data_shorter_than_a_sequence_is_refused(self):
        short = self.write("short.txt", "too short")
        self.fails(2, [short, "9 bytes"], data=short)

    def test_no_data_is_refused(self):
        run = subprocess.run([TERRACE, "train"], capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 2)
        self.assertIn("--data", run.stderr)

    def test_an_unknown_key_is_named_with_its_line_and_the_nearest_key(self):
        config = self.write("typo.toml", "[device]\nmemroy = \"8MiB\"\n")
        self.fails(2, ["typo.toml:2:", "device.memroy", "\"device.memory\""], config=config)

    def test_a_bad_size_is_named_with_its_line(self):
        config = self.write("size.toml", "\n[device]\nmemory = \"8 apples\"\n")
        self.fails(2, ["size.toml:3: device.memory", "8 apples"], config=config)

    def test_setting_an_unknown_key_is_refused(self):
        self.fails(2, ["train.stepz", "\"train.steps\""], "--set", "train.stepz=3")

    def test_a_missing_configuration_is_named(self):
        run = self.train(config=self.folder / "missing.toml")
        self.assertEqual(run.returncode, 2)
        self.assertIn("missing.toml", run.stderr)

    def test_a_configuration_without_an_end_is_refused(self):
        run = self.train(config="/dev/zero")
        self.assertEqual(run.returncode, 2)
        self.assertIn("/dev/zero: it has more than 1MiB", run.stderr)

    def test_an_empty_name_is_refused(self):
        for option in ("--config", "--output", "--metrics", "--timeline", "--save", "--resume"):
            run = subprocess.run([TERRACE, "train", "--data", self.text, option, ""], capture_output=True, text=True,
                                 cwd=self.folder, timeout=120, check=False)
            self.assertEqual(run.returncode, 2, run.stderr)
            self.assertIn(f"{option}: found nothing", run.stderr)

    def test_a_rate_that_an_update_cannot_compute_with_is_refused(self):
        for setting, found in (("learning_rate=1e38", "1e+38"), ("learning_rate=1e39", "1e+39"),
                               ("weight_decay=1e300", "1e+300")):
            run = self.train("--set", f"train.{setting}")
            self.assertEqual(run.returncode, 2, run.stderr)
            self.assertIn(f"found {found}; accepted: a number from 0 to 1e+37", run.stderr)

    def test_heads_must_divide_the_width(self):
        self.fails(2, ["model.width (64)", "model.heads (3)"], "--set", "model.heads=3")

    def test_an_unknown_option_is_refused(self):
        self.fails(2, ["--frobnicate"], "--frobnicate")

    def test_a_count_must_be_a_whole_number(self):
        self.fails(2, ["--stop-after", "found 0", "from 1"], "--stop-after", "0")
        self.fails(2, ["--sample", "found many"], "--sample", "many")
        self.fails(2, ["--evaluate", "found 9223372036854775808", "to 9223372036854775807"], "--evaluate", 1 << 63)
        self.fails(2, ["--stop-after", "found 010"], "--stop-after", "010")

    def test_a_command_is_required(self):
        run = subprocess.run([TERRACE], capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 2)
        self.assertIn("terrace --help", run.stderr)


class Help(TrainTest):
    def test_shows_an_example(self):
        for arguments in [["--help"], ["train", "--help"]]:
            run = subprocess.run([TERRACE, *arguments], capture_output=True, text=True, check=False)
            self.assertEqual(run.returncode, 0)
            self.assertIn("Example", run.stdout)
            self.assertIn("terrace train", run.stdout)


class SmallBudgets(TrainTest):
    def test_a_device_too_small_for_an_operand_is_refused_at_the_start(self):
        message = self.fails(3, ["device"], "--set", "device.memory=16KiB")
        self.assertIn("device.memory", message)

    def test_a_host_too_small_for_the_model_is_refused_at_the_start(self):
        message = self.fails(3, ["host"], "--set", "host.memory=64KiB")
        self.assertIn("host.memory", message)

    def test_more_layers_than_anything_holds_are_refused_at_once(self):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
        for arguments, tier in (([], "device"), ([*ON_NVME, "--set", "placement.activations=recompute"], "device"),
                                (["--unmanaged"], "host")):
            command = [TERRACE, "train", "--config", self.config, "--data", self.text, *arguments,
                       "--set", "model.layers=1000000000"]
            run = subprocess.run(command, cwd=self.folder, timeout=60, check=False, capture_output=True, text=True,
                                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, limit)))
            self.assertEqual(run.returncode, 3, run.stderr)
            self.assertIn(f"terrace: {tier}: ", run.stderr)

    def needed(self, *arguments):
        case = json.loads(self.succeeds("--json", *arguments).stdout)["cases"][0]
        return case["tiers"]["device"]["needed_bytes"]

    def test_a_device_too_small_for_the_activations_is_refused_with_most_of_what_they_take(self):
        metrics = self.folder / "metrics.jsonl"
        batch = ["--set", "train.micro_batch=64", "--set", "placement.activations=keep"]
        message = self.fails(3, ["device"], "--metrics", metrics, "--set", "device.memory=2MiB", *batch)
        self.assertFalse(metrics.exists(), "training had not started")
        number, unit = re.search(r"device.memory to at least (\d+)(\w+)", message).groups()
        least = int(number) * {"B": 1, "KiB": 1024, "MiB": 1024 * 1024}[unit]
        needed = self.needed("--set", "device.memory=64MiB", "--set", "placement.chunk=64KiB", *batch)
        self.assertTrue(least <= needed <= 1.25 * least, f"{least} was told, {needed} is needed")

    def test_the_smallest_device_that_a_run_tells_is_the_smallest(self):
        for settings, activations in itertools.product([["--set", "host.memory=16MiB"], ON_NVME], ["auto", "keep"]):
            run = [*settings, "--set", "placement.chunk=64KiB", "--set", "device.chunks=256KiB",
                   "--set", f"placement.activations={activations}"]
            needed = self.needed(*run)
            self.assertEqual(self.needed(*run, "--set", f"device.memory={needed}B"), needed)
            metrics = self.folder / "metrics.jsonl"
            message = self.fails(3, ["device"], *run, "--metrics", metrics, "--set", f"device.memory={needed - 4096}B")
            self.assertIn("raise device.memory to at least ", message)
            self.assertTrue(metrics.exists(), "training had started")
            if activations == "keep":  # otherwise what was saved in a forward is most in a later one
                self.assertEqual(metrics.read_text(encoding="utf-8"), "")
            metrics.unlink()

    def test_the_smallest_device_is_not_refused_before_training(self):
        for layers, dtype in (3, "float32"), (5, "bfloat16"):
            run = ["--set", f"model.layers={layers}", "--set", f"model.dtype={dtype}", "--set", "model.width=128",
                   "--set", "model.sequence=64", "--set", "train.micro_batch=4", "--set", "placement.chunk=64KiB",
                   "--set", "placement.activations=keep"]
            needed = self.needed(*run, "--set", "device.memory=32MiB")
            self.succeeds(*run, "--set", f"device.memory={needed}B")

    def test_activations_that_are_to_rest_on_the_host_leave_room_for_updates(self):
        self.succeeds(*ON_NVME, "--set", "model.layers=3", "--set", "model.width=128", "--set", "model.sequence=64",
                      "--set", "train.micro_batch=4", "--set", "placement.chunk=128KiB", "--set", "device.memory=24MiB",
                      "--set", "host.memory=4MiB", "--set", "placement.activations=host")

    def test_the_smallest_device_stays_enough_when_blocks_have_been_planned(self):
        run = ["--set", "train.steps=12", "--set", "train.accumulate=1", "--set", "model.sequence=64",
               "--set", "host.memory=24MiB", "--set", "placement.chunk=256KiB", "--set", "placement.activations=auto"]
        needed = self.needed(*run, "--set", "device.memory=4MiB", "--set", "device.chunks=4MiB")
        self.succeeds(*run, "--set", f"device.memory={needed}B", "--set", f"device.chunks={needed}B")

    def follow_hints(self, key, memory, *settings):
        """Runs with what the hint says until it is enough. Returns how often it was not."""
        for refusals in range(20):
            run = self.train(*settings, "--set", f"{key}={memory}")
            if run.returncode == 0:
                return refusals
            self.assertEqual(run.returncode, 3, run.stderr)
            hint = re.search(rf"hint: raise {key} to at least (\w+)", run.stderr)
            self.assertTrue(hint and hint.group(1) != memory, run.stderr)
            memory = hint.group(1)
        self.fail(f"{key}: the hints go on and on, up to {memory}")

    def test_hints_lead_to_a_run_in_a_few_steps(self):
        roomy = ["--set", "placement.chunk=64KiB"]
        nvme = ["--set", "nvme.paths=nvme", "--set", "placement.optimizer={nvme=1.0}"]
        for key, memory, settings in [("device.memory", "64KiB", roomy), ("host.memory", "64KiB", roomy),
                                      ("host.memory", "64KiB", [*roomy, *nvme, "--set", "nvme.memory=64MiB"]),
                                      ("nvme.memory", "128KiB", [*roomy, *nvme])]:
            with self.subTest(key=key, settings=settings):
                self.assertLessEqual(self.follow_hints(key, memory, *settings), 6)


class BadPaths(TrainTest):
    def test_an_nvme_path_that_cannot_be_written_is_named(self):
        below_a_file = self.text / "nvme"
        self.fails(4, [below_a_file], "--set", f'nvme.paths=["{below_a_file}"]', "--set", "nvme.memory=64MiB")

    def test_an_nvme_path_without_any_free_space_is_named(self):
        for path in ("/proc", "/sys"):
            self.fails(4, [f"the file system of {path} has 0B free"], "--set", f"nvme.paths={path}")

    def test_more_nvme_memory_than_the_disk_has_is_refused(self):
        self.fails(4, ["nvme.memory"], "--set", f'nvme.paths=["{self.folder}/nvme"]', "--set", "nvme.memory=900000TiB")

    def test_a_file_that_is_for_something_else_is_not_overwritten(self):
        timeline = self.folder / "t.json"
        texts = self.folder / "texts"
        texts.mkdir()
        (texts / "a.txt").write_text(self.text.read_text(encoding="utf-8"), encoding="utf-8")
        (self.folder / "link.json").symlink_to("t.json")
        output = self.folder / "out"
        for options, named in [(("--metrics", timeline, "--timeline", self.folder / "link.json"), "--timeline"),
                               (("--metrics", "m.json", "--timeline", "./m.json"), "--timeline"),
                               (("--metrics", "out/metrics.jsonl", "--output", output), "--output"),
                               (("--metrics", output / "config.toml", "--output", output), "--output"),
                               (("--metrics", "save/manifest.json", "--save", self.folder / "save"), "--save"),
                               (("--data", texts, "--metrics", texts / "a.txt"), "--data"),
                               (("--metrics", self.config), "--config"), (("--timeline", self.config), "--config"),
                               (("--metrics", self.text), "--data"),
                               (("--metrics", timeline, "--timeline", self.folder / "." / "t.json"), "--timeline"),
                               (("--output", self.folder, "--metrics", self.folder / "report.json"), "--output")]:
            before = self.config.read_bytes() + self.text.read_bytes()
            self.fails(2, ["would overwrite", named], *options)
            self.assertEqual(self.config.read_bytes() + self.text.read_bytes(), before)
        self.assertEqual(list(texts.iterdir()), [texts / "a.txt"])
        self.succeeds("--metrics", "/dev/null", "--timeline", "/dev/null")
        for _ in range(2):
            self.succeeds("--data", texts, "--metrics", texts / "m.jsonl", "--output", texts)
        self.succeeds("--output", texts, config=texts / "config.toml")

    def test_a_file_that_standard_output_goes_to_is_not_overwritten(self):
        command = [TERRACE, "train", "--config", self.config, "--data", self.text, "--metrics"]
        printed = self.write("printed.txt", "")
        for metrics in (printed, "/dev/stdout"):
            with printed.open("w", encoding="utf-8") as stdout:
                run = subprocess.run([*command, metrics], stdout=stdout, stderr=subprocess.PIPE, text=True,
                                     cwd=self.folder, timeout=120, check=False)
            self.assertEqual(run.returncode, 2)
            self.assertIn("would overwrite", run.stderr)
            self.assertIn("standard output", run.stderr)
        lines = self.succeeds("--metrics", "/dev/stdout").stdout.splitlines()
        self.assertEqual(len([line for line in lines if line.startswith("{")]), 3, "a pipe may have both")

    def test_metrics_that_cannot_be_written_are_named_before_the_work(self):
        too_little = "--set", "device.memory=64KiB"
        self.fails(3, ["device"], *too_little)
        self.fails(4, [self.text / "metrics"], "--metrics", self.text / "metrics", *too_little)

    def test_an_output_folder_that_cannot_be_made_is_named(self):
        self.fails(4, [self.text / "output"], "--output", self.text / "output")


class Training(TrainTest):
    three_tiers = [
        "--set", "host.memory=1536KiB", "--set", "nvme.paths=nvme", "--set", "nvme.memory=64MiB",
        "--set", "placement.parameters={nvme=0.5,host=0.5}", "--set", "placement.optimizer={nvme=1.0}",
        "--set", "placement.chunk=64KiB", "--set", "device.chunks=1MiB",
    ]

    def losses_agree(self, *arguments):
        managed = self.metrics("managed.jsonl", *self.three_tiers, *arguments)
        unmanaged = self.metrics("unmanaged.jsonl", "--unmanaged", *arguments)
        self.assertEqual(len(managed), 3)
        for field in ["step", "loss", "learning_rate", "gradient_norm", "tokens"]:
            self.assertEqual([step[field] for step in managed], [step[field] for step in unmanaged], field)
        return managed, unmanaged

    def test_losses_equal_those_of_an_unmanaged_run_to_the_last_digit(self):
        managed, _ = self.losses_agree()
        self.assertEqual(len({step["loss"] for step in managed}), 3)
        # The states are all zero before the first update: there is nothing to read.
        self.assertTrue(all(step["bytes_moved"][link] > 0 for step in managed[1:] for link in LINKS), managed)

    def test_losses_agree_in_bfloat16(self):
        self.losses_agree("--set", "model.dtype=bfloat16")

    def test_every_step_has_every_metric(self):
        managed, unmanaged = self.losses_agree()
        for run in [managed, unmanaged]:
            self.assertEqual([step["step"] for step in run], [1, 2, 3])
            for step in run:
                self.assertEqual(list(step), METRICS)
                self.assertEqual(list(step["bytes_moved"]), LINKS)
                self.assertEqual(step["tokens"], 2 * 2 * 32)
        for step in managed:
            self.assertTrue(0 < step["device_bytes"] <= 8 << 20)
            self.assertTrue(0 < step["host_bytes"] <= 3 << 19)
            self.assertTrue(0 < step["nvme_bytes"] <= 64 << 20)
        for step in unmanaged:
            self.assertEqual([step[tier + "_bytes"] for tier in ["device", "host", "nvme"]], [0, 0, 0])
            self.assertEqual(set(step["bytes_moved"].values()), {0})

    def test_a_run_that_fails_leaves_a_line_of_every_step_that_was_done(self):
        path = self.folder / "failed.jsonl"
        wild = ["--set", "train.learning_rate=1e30", "--set", "optimizer.non_finite=error"]
        for update in ["deferred", "immediate"]:
            message = self.fails(1, ["is not finite"], "--metrics", path, "--set", f"optimizer.update={update}", *wild)
            refused = int(re.search(r"step (\d+) was not taken", message)[1])
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            done = refused if update == "deferred" else refused - 1
            self.assertEqual([line["step"] for line in lines], list(range(1, done + 1)))
            self.assertEqual([line["gradient_norm"] is None for line in lines],
                             [step == refused for step in range(1, done + 1)])

    def test_the_gradient_norm_is_null_without_clipping(self):
        run = self.metrics("metrics.jsonl", "--set", "train.max_gradient_norm=0")
        self.assertEqual([step["gradient_norm"] for step in run], [None] * 3)

    def test_stopping_early_keeps_the_learning_rates(self):
        whole = self.metrics("whole.jsonl", "--unmanaged")
        begun = self.metrics("begun.jsonl", "--unmanaged", "--stop-after", "2")
        for field in ["loss", "learning_rate"]:
            self.assertEqual([step[field] for step in begun], [step[field] for step in whole[:2]])

    def test_json_is_one_object_with_cases(self):
        run = self.succeeds("--json", "--evaluate", "3", "--sample", "20", *self.three_tiers)
        report = json.loads(run.stdout)
        self.assertEqual(list(report), ["version", "machine", "cases"])
        case = report["cases"][0]
        self.assertEqual(case["name"], "train")
        self.assertEqual(case["steps"], 3)
        self.assertEqual(case["state_bytes"], 16 * case["parameters"])
        self.assertGreater(case["held_out"]["loss"], 0)
        self.assertGreater(case["held_out"]["byte_entropy"], 0)
        for tier in case["tiers"].values():
            self.assertTrue(0 < tier["peak_bytes"] <= tier["budget_bytes"])

    def test_the_table_shows_each_tier_against_its_budget(self):
        run = self.succeeds(*self.three_tiers, "--evaluate", "3", "--sample", "20", "--prompt", "line")
        for expected in ["nvme", "budget", " 8MiB", " 1.50MiB", "held-out loss", "unigram entropy", "\nline", *LINKS]:
            self.assertIn(expected, run.stdout)
        self.assertIn("step 3/3", run.stderr)

    def test_the_output_folder_repeats_the_run(self):
        first = self.folder / "first"
        self.succeeds("--output", first, "--sample", "20")
        self.assertEqual({path.name for path in first.iterdir()},
                         {"config.toml", "metrics.jsonl", "report.json", "sample.txt"})
        again = self.metrics("again.jsonl", config=first / "config.toml")
        losses = [json.loads(line)["loss"] for line in (first / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual([step["loss"] for step in again], losses)

    def test_an_interrupt_ends_the_run_after_the_step(self):
        command = [TERRACE, "train", "--config", self.config, "--data", self.text, "--set", "train.steps=1000000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            for line in run.stderr:
                if line.startswith("step "):
                    break
            run.send_signal(signal.SIGINT)
            output, errors = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130, errors)
        self.assertIn("interrupted after", output)
        self.assertIn("nothing was saved", errors)


if __name__ == "__main__":
    if not TERRACE:
        sys.exit("set TERRACE_BIN to the terrace program")
    unittest.main()
