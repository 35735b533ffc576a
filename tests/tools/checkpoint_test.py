"""`terrace train --save` and `--resume`: what is resumed goes on to the same losses as a run that was not interrupted,
whatever ended it; and what cannot be resumed or saved is told with an exit code and the way out. Runs the program that
TERRACE_BIN names."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from pathlib import Path

from tiny_model import ON_NVME, TINY

TERRACE = os.environ.get("TERRACE_BIN", "")
# Where cores are shared, a thread that spins while it waits may hold the core of the one it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
OTHER_BUDGETS = ["--set", "device.memory=6MiB", "--set", "host.memory=12MiB", "--set", "placement.chunk=200KiB"]
# What does not depend on where bytes rest, nor on the time.
FIELDS = ["step", "loss", "learning_rate", "gradient_norm", "tokens"]


class CheckpointTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="terrace-checkpoint-")
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        self.config = self.write("tiny.toml", TINY + "steps = 6\nwarmup = 2\n")
        self.text = self.write("text.txt", "".join(f"line {i} of a text to learn\n" for i in range(1000)))
        self.checkpoint = self.folder / "checkpoint"

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def command(self, *arguments):
        return [str(word) for word in [TERRACE, "train", "--config", self.config, "--data", self.text, *arguments]]

    def train(self, *arguments):
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, encoding="utf-8",
                              errors="replace", cwd=self.folder, timeout=120, check=False)

    def succeeds(self, *arguments):
        run = self.train(*arguments)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run

    def fails(self, code, fragments, *arguments):
        run = self.train(*arguments)
        self.assertEqual(run.returncode, code, run.stderr)
        message = run.stderr[run.stderr.rindex("terrace: "):]
        for fragment in [*fragments, "\n  hint: "]:
            self.assertIn(str(fragment), message)
        return message

    def steps_in(self, path):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [{field: line[field] for field in FIELDS} for line in lines]

    def steps_of(self, *arguments):
        """What each step of a run gave."""
        path = self.folder / "metrics.jsonl"
        path.unlink(missing_ok=True)
        self.succeeds("--metrics", path, *arguments)
        return self.steps_in(path)

    def save_three_of_six(self, *arguments):
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        self.succeeds("--stop-after", 3, "--save", self.checkpoint, *arguments)

    def data_file(self):
        return next(path for path in self.checkpoint.iterdir() if path.name.startswith("data."))


class Resumes(CheckpointTest):
    def test_to_the_losses_of_an_uninterrupted_run(self):
        for dtype in ["float32", "bfloat16"]:
            kind = ["--set", f"model.dtype={dtype}"]
            whole = self.steps_of(*kind)
            for saved_with, resumed_with in [([], []), ([], ON_NVME), (ON_NVME, OTHER_BUDGETS), (OTHER_BUDGETS, [])]:
                with self.subTest(dtype=dtype, saved_with=saved_with, resumed_with=resumed_with):
                    self.save_three_of_six(*kind, *saved_with)
                    self.assertEqual(self.steps_of("--resume", self.checkpoint, *kind, *resumed_with), whole[3:])

    def test_a_finished_run_with_no_step_and_a_report(self):
        whole = self.succeeds("--json", "--save", self.checkpoint, "--evaluate", 2)
        resumed = self.succeeds("--json", "--resume", self.checkpoint, "--evaluate", 2)
        first, second = [json.loads(run.stdout)["cases"][0] for run in [whole, resumed]]
        self.assertEqual([second["steps"], second["resumed_after"], second["tokens"]], [6, 6, 0])
        self.assertEqual([second["loss"], second["held_out"]], [first["loss"], first["held_out"]])
        self.assertNotIn("checkpoint", second)

    def test_a_run_that_has_passed_its_end_and_says_that_nothing_was_left_to_do(self):
        self.save_three_of_six()
        run = self.succeeds("--resume", self.checkpoint, "--stop-after", 2)
        self.assertIn("nothing was left to do: resumed after step 3, and the run ends after step 2", run.stdout)
        self.assertNotIn("trained", run.stdout)
        self.assertNotIn("bound by", run.stdout)

    def test_into_the_same_folder_and_says_where_it_saved(self):
        self.save_three_of_six()
        run = self.succeeds("--resume", self.checkpoint, "--save", self.checkpoint)
        self.assertRegex(run.stdout, r"trained 6 of 6 steps, resumed after step 3: ")
        self.assertRegex(run.stdout, rf"saved to {re.escape(str(self.checkpoint))} after step 6, in [\d.]+s\n")
        self.assertEqual(len(list(self.checkpoint.iterdir())), 3)

    def test_the_metrics_where_the_checkpoint_was_saved(self):
        whole = self.steps_of()
        path = self.folder / "kept.jsonl"
        self.succeeds("--metrics", path, "--stop-after", 5, "--save", self.folder / "later")
        self.save_three_of_six()
        with path.open("a", encoding="utf-8") as file:
            file.write('{"step": 6, "lo')
        self.succeeds("--metrics", path, "--resume", self.checkpoint)
        self.assertEqual(self.steps_in(path), whole)
        self.succeeds("--metrics", path)
        self.assertEqual(self.steps_in(path), whole, "a new run begins a new file")

    def test_with_metrics_that_lack_lines_and_warns(self):
        path = self.folder / "cut.jsonl"
        self.save_three_of_six("--metrics", path)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:2]), encoding="utf-8")
        run = self.succeeds("--metrics", path, "--resume", self.checkpoint)
        self.assertIn("has the lines of the steps up to 2, and the run goes on after step 3", run.stderr)

    def test_with_other_data_and_warns(self):
        self.save_three_of_six()
        self.text.write_text(self.text.read_text() + "and more\n")
        run = self.succeeds("--resume", self.checkpoint)
        self.assertIn("data: they are not those", run.stderr)

    def test_with_other_settings_and_names_them(self):
        self.save_three_of_six()
        run = self.succeeds("--resume", self.checkpoint, "--set", "train.micro_batch=1", "--set", "train.accumulate=1",
                            "--set", "train.seed=7", "--set", "train.learning_rate=0.5", "--set", "train.steps=7",
                            "--set", "train.warmup=1", "--set", "train.weight_decay=0.3",
                            "--set", "train.max_gradient_norm=0.5")
        for change in ["train.micro_batch was 2 and is 1", "train.accumulate was 2 and is 1",
                       "train.seed was 1 and is 7", "train.learning_rate was 0.001 and is 0.5",
                       "train.steps was 6 and is 7", "train.warmup was 2 and is 1",
                       "train.weight_decay was 0.1 and is 0.3", "train.max_gradient_norm was 1 and is 0.5"]:
            self.assertIn(change, run.stderr)
        self.assertNotIn("threads", run.stderr)
        run = self.succeeds("--resume", self.checkpoint)
        self.assertNotIn("warning", run.stderr)

    def test_with_another_number_of_threads_and_warns(self):
        if (os.cpu_count() or 1) == 1:
            self.skipTest("there is one core, and no more threads are made")
        with unittest.mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "2"}):
            self.save_three_of_six()
        with unittest.mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
            self.assertIn("threads was 2 and is 1", self.succeeds("--resume", self.checkpoint).stderr)

    def test_a_run_whose_loss_is_no_number(self):
        wild = ["--set", "train.learning_rate=1e30", "--set", "train.warmup=0", "--set", "train.max_gradient_norm=0"]
        self.save_three_of_six(*wild)
        note = json.loads((self.checkpoint / "manifest.json").read_text(encoding="utf-8"))["notes"]["loss"]
        self.assertRegex(note, "nan|inf")
        self.succeeds("--resume", self.checkpoint, *wild)

    def test_into_another_folder_only_what_it_learned(self):
        self.save_three_of_six()
        other = self.folder / "other"
        self.succeeds("--resume", self.checkpoint, "--save", other, "--stop-after", 3)
        self.assertFalse((other / "manifest.json").exists(), "no step was made")
        self.succeeds("--resume", self.checkpoint, "--save", other, "--stop-after", 4)
        self.assertEqual(self.steps_of("--resume", other), self.steps_of()[4:])

    def test_beside_a_file_of_somebody_else(self):
        self.save_three_of_six()
        notes = self.checkpoint / "notes.txt"
        notes.write_text("precious")
        self.succeeds("--resume", self.checkpoint, "--save", self.checkpoint)
        self.assertEqual(notes.read_text(), "precious")

    def test_without_saving_unless_told(self):
        self.save_three_of_six()
        before = (self.checkpoint / "manifest.json").read_bytes()
        self.succeeds("--resume", self.checkpoint)
        self.assertEqual((self.checkpoint / "manifest.json").read_bytes(), before)


class Ended(CheckpointTest):
    def start(self, *arguments):
        run = subprocess.Popen(self.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               cwd=self.folder)
        self.addCleanup(run.stdout.close)
        self.addCleanup(run.stderr.close)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        return run

    def test_by_an_interrupt_resumes_to_the_same_losses(self):
        self.interrupts_and_resumes(signal.SIGINT)

    def test_by_a_request_to_terminate_resumes_to_the_same_losses(self):
        self.interrupts_and_resumes(signal.SIGTERM)

    def interrupts_and_resumes(self, by):
        path = self.folder / "run.jsonl"
        run = self.start("--set", "train.steps=100000", "--metrics", path, "--save", self.checkpoint)
        for line in run.stderr:
            if line.startswith("step "):
                break
        run.send_signal(by)
        output, errors = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130, errors)
        self.assertIn(f"go on with --resume {self.checkpoint}", errors)
        self.assertIn(f"saved to {self.checkpoint}", output)
        done = len(self.steps_in(path))
        end = ["--set", "train.steps=100000", "--stop-after", done + 3]
        self.succeeds("--metrics", path, "--resume", self.checkpoint, *end)
        self.assertEqual(self.steps_in(path), self.steps_of(*end))

    def test_at_the_end_though_nobody_reads_the_progress_any_more(self):
        run = self.start("--save", self.checkpoint)
        run.stderr.close()
        output = run.stdout.read()
        self.assertEqual(run.wait(timeout=60), 0)
        self.assertIn(f"saved to {self.checkpoint}", output)

    def test_at_the_step_whose_metrics_cannot_be_written(self):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        run = self.start("--set", "train.steps=100000", "--save", self.checkpoint, "--metrics", pipe)
        with pipe.open(encoding="utf-8") as lines:
            lines.readline()
        self.assertIn("metrics: writing to", run.stderr.read())
        self.assertEqual(run.wait(timeout=60), 4)
        self.assertEqual(self.train("--resume", self.checkpoint, "--stop-after", 1).returncode, 0)

    def test_at_the_step_whose_line_is_the_last_or_before_a_checkpoint_and_cannot_be_written(self):
        for options, done in ((["--stop-after", 2], 1), (["--stop-after", 1], 1), (["--save-every", 1], 1)):
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            self.fails(4, ["metrics: writing to /dev/full"], "--save", self.checkpoint, "--metrics", "/dev/full", *options)
            resumed = self.succeeds("--resume", self.checkpoint, "--stop-after", 1)
            self.assertIn("nothing was left to do: resumed after step", resumed.stdout)
            self.assertGreaterEqual(int(re.search(r"resumed after step (\d+)", resumed.stdout)[1]), done)

    def test_by_the_end_of_its_terminal_resumes_to_the_same_losses(self):
        self.interrupts_and_resumes(signal.SIGHUP)

    def test_at_the_end_though_nobody_reads_the_report(self):
        run = self.start("--save", self.checkpoint)
        run.stdout.close()
        self.assertIn("not all of the report", run.stderr.read())
        self.assertEqual(run.wait(timeout=60), 4)
        self.succeeds("--resume", self.checkpoint)

    def test_by_a_second_run_into_the_same_folder_never(self):
        run = self.start("--set", "train.steps=100000", "--save", self.checkpoint)
        for line in run.stderr:
            if line.startswith("step "):
                break
        self.fails(2, ["another process is saving", self.checkpoint], "--save", self.checkpoint)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130, errors)

    def test_by_an_interrupt_without_save_says_how_to(self):
        run = self.start("--set", "train.steps=100000")
        for line in run.stderr:
            if line.startswith("step "):
                break
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130, errors)
        self.assertIn("nothing was saved: with --save FOLDER", errors)

    def test_by_a_kill_at_any_moment_resumes_to_the_same_losses(self):
        seed = random.randrange(1 << 32)
        print("seed", seed, flush=True)
        moments = random.Random(seed)
        steps = ["--set", "train.steps=400"]
        whole = self.steps_of(*steps)
        path = self.folder / "killed.jsonl"
        resume = []
        kills = 0
        for _ in range(8):
            run = self.start(*steps, "--metrics", path, "--save", self.checkpoint, "--save-every", 1, *resume)
            manifest = self.checkpoint / "manifest.json"
            before = manifest.stat().st_mtime_ns if manifest.exists() else 0
            while run.poll() is None and (not manifest.exists() or manifest.stat().st_mtime_ns == before):
                time.sleep(0.005)
            time.sleep(moments.uniform(0, 0.3))
            run.kill()
            run.communicate(timeout=60)
            kills += run.returncode == -signal.SIGKILL
            resume = ["--resume", self.checkpoint]
        self.assertGreater(kills, 4, "it ended before it was killed")
        self.succeeds(*steps, "--metrics", path, *resume)
        self.assertEqual(self.steps_in(path), whole)

    def test_by_a_folder_that_is_replaced_names_it_and_leaves_it_alone(self):
        run = self.start("--set", "train.steps=100000", "--save", self.checkpoint, "--save-every", 20)
        manifest = self.checkpoint / "manifest.json"
        while run.poll() is None and not manifest.exists():
            time.sleep(0.005)
        other = self.folder / "other"
        self.succeeds("--save", other, "--stop-after", 1)
        before = (other / "manifest.json").read_bytes()
        self.checkpoint.rename(self.folder / "moved")
        other.rename(self.checkpoint)
        _, errors = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 4, errors)
        self.assertIn(f"{self.checkpoint} is not the folder any more that was locked", errors)
        self.assertEqual(manifest.read_bytes(), before)

    def test_by_a_full_disk_keeps_the_checkpoint_before(self):
        if os.geteuid() != 0:
            self.skipTest("mounting a small disk needs root")
        disk = self.folder / "disk"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True,
                          check=False).returncode != 0:
            self.skipTest("this system mounts no tmpfs")
        self.addCleanup(subprocess.run, ["umount", disk], check=True)
        self.checkpoint = disk / "checkpoint"
        self.save_three_of_six()
        names = {path.name for path in self.checkpoint.iterdir()}
        message = self.fails(4, ["(ENOSPC)", "hint: free space"], "--save", self.checkpoint, "--resume",
                             self.checkpoint)
        self.assertRegex(message, rf"write of \d+ B at offset \d+ to {self.checkpoint}/data\.[0-9a-f]{{16}} failed")
        self.assertEqual({path.name for path in self.checkpoint.iterdir()}, names)
        self.assertEqual(self.steps_of("--resume", self.checkpoint), self.steps_of()[3:])


class Refused(CheckpointTest):
    def test_corrupt_and_truncated_files_with_code_5(self):
        self.save_three_of_six()
        for name, path in [("data", self.data_file()), ("manifest", self.checkpoint / "manifest.json")]:
            whole = path.read_bytes()
            flipped = bytearray(whole)
            flipped[len(flipped) // 2] ^= 1
            for how, changed in [("flipped", bytes(flipped)), ("truncated", whole[:len(whole) // 2]), ("empty", b"")]:
                with self.subTest(name=name, how=how):
                    path.write_bytes(changed)
                    message = self.fails(5, [path], "--resume", self.checkpoint)
                    if name == "data":
                        self.assertIn("corrupt" if how == "flipped" else "truncated", message)
            path.write_bytes(whole)
        self.data_file().unlink()
        self.fails(5, ["is missing"], "--resume", self.checkpoint)

    def test_folders_of_something_else_with_code_2(self):
        self.fails(2, [self.folder, "'text.txt'"], "--save", self.folder)
        self.fails(2, ["there is none in", self.checkpoint], "--resume", self.checkpoint)
        self.checkpoint.mkdir()
        (self.checkpoint / "manifest.json").write_text("{}")
        self.fails(2, ["not the manifest of a checkpoint"], "--resume", self.checkpoint)
        self.fails(2, ["choose another folder"], "--save", self.checkpoint)

    def test_another_model_with_code_2_and_its_parameters(self):
        self.save_three_of_six()
        self.fails(2, ["is not in the checkpoint"], "--resume", self.checkpoint, "--set", "model.layers=3")
        self.fails(2, ["is not in the session"], "--resume", self.checkpoint, "--set", "model.layers=1")
        self.fails(2, ["float32", "bfloat16"], "--resume", self.checkpoint, "--set", "model.dtype=bfloat16")
        self.fails(2, ["2 heads", "model.heads is 4"], "--resume", self.checkpoint, "--set", "model.heads=4")

    def test_options_that_do_not_go_together_with_code_2(self):
        self.fails(2, ["--save does not go with --unmanaged"], "--unmanaged", "--save", self.checkpoint)
        self.fails(2, ["--resume does not go with --unmanaged"], "--unmanaged", "--resume", self.checkpoint)
        self.fails(2, ["--save-every", "--save FOLDER"], "--save-every", 2)
        self.fails(2, ["found 0"], "--save", self.checkpoint, "--save-every", 0)
        self.assertFalse(self.checkpoint.exists())

    def test_an_empty_folder_name_with_code_2(self):
        for option in ["--save", "--resume"]:
            self.fails(2, [option, "accepted: a folder"], option, "")
        self.fails(2, ["accepted: a folder"], "--save", self.checkpoint, "--resume", "")

    def test_a_save_over_another_checkpoint_with_code_2(self):
        self.save_three_of_six()
        before = {path.name: path.read_bytes() for path in self.checkpoint.iterdir()}
        self.fails(2, ["holds a checkpoint", f"add --resume {self.checkpoint}"], "--save", self.checkpoint)
        other = self.folder / "other"
        self.succeeds("--stop-after", 1, "--save", other)
        self.fails(2, ["holds a checkpoint"], "--save", self.checkpoint, "--resume", other)
        self.assertEqual({path.name: path.read_bytes() for path in self.checkpoint.iterdir()}, before)
        link = self.folder / "link"
        link.symlink_to(self.checkpoint)
        self.succeeds("--save", link, "--resume", self.checkpoint)

    def test_a_pipe_and_a_huge_file_in_the_manifest_s_place(self):
        self.checkpoint.mkdir()
        manifest = self.checkpoint / "manifest.json"
        os.mkfifo(manifest)
        self.fails(4, ["no regular file"], "--resume", self.checkpoint)
        manifest.unlink()
        self.save_three_of_six()
        os.truncate(manifest, 1 << 40)
        self.fails(5, ["more than any manifest"], "--resume", self.checkpoint)

    def test_a_folder_that_cannot_be_made_with_code_4(self):
        self.fails(4, [self.text], "--save", self.text / "checkpoint")


if __name__ == "__main__":
    if not TERRACE:
        sys.exit("set TERRACE_BIN to the terrace program")
    unittest.main()
