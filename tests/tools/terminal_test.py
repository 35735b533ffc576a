"""`terrace train` on a terminal: one line that is written anew and keeps to the width, log lines above it, and an
account of the time at the end; elsewhere plain lines. Runs the program that TERRACE_BIN names."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import unicodedata
import unittest
from pathlib import Path

from tiny_model import ON_NVME, TINY

TERRACE = os.environ.get("TERRACE_BIN", "")
# Where cores are shared, a thread that spins while it waits may hold the core of the one it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def width_of(text):
    return sum(0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1
               for one in text)


def set_columns(terminal, columns):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))


class TerminalTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="terrace-terminal-")
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        self.config = self.write("tiny.toml", TINY + "steps = 8\n")
        self.text = self.write("text.txt", "".join(f"line {i} of a text to learn\n" for i in range(1000)))

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def command(self, *arguments):
        return [str(word) for word in [TERRACE, "train", "--config", self.config, "--data", self.text, *arguments]]

    def environment(self, **variables):
        base = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "LANG", "LC_CTYPE")}
        return {**base, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **variables}

    def on_terminal(self, *arguments, columns=100, meanwhile=lambda run, terminal, shown: None, **variables):
        """Runs `terrace train` on a terminal, calling `meanwhile` with what was shown so far, until it ends. Returns
        the exit code and all of it."""
        terminal, end = pty.openpty()
        self.addCleanup(os.close, terminal)
        set_columns(terminal, columns)
        run = subprocess.Popen(self.command(*arguments), stdin=end, stdout=end, stderr=end, cwd=self.folder,
                               env=self.environment(**variables), start_new_session=True)
        os.close(end)
        shown = b""
        try:
            while True:
                ready, _, _ = select.select([terminal], [], [], 120)
                self.assertTrue(ready, "nothing is shown any more")
                try:
                    shown += os.read(terminal, 65536)
                except OSError:  # the last that had it open has closed it
                    break
                meanwhile(run, terminal, shown.decode("utf-8", "replace"))
            return run.wait(60), shown.decode("utf-8", "replace")
        finally:
            run.kill()
            run.wait()

    def shown_on_terminal(self, *arguments, **options):
        code, shown = self.on_terminal(*arguments, **options)
        self.assertEqual(code, 0, shown)
        return shown

    def live_lines(self, shown):
        """Each line that was written in the place of another, without its colours."""
        lines = re.findall(r"\r\x1b\[K([^\r\n]+)", shown)
        return [ESCAPE.sub("", line) for line in lines if "step " in line or "loss" in line]


class OnATerminal(TerminalTest):
    def test_one_line_is_written_anew_and_the_report_begins_below_it(self):
        shown = self.shown_on_terminal(*ON_NVME, columns=200)
        lines = self.live_lines(shown)
        self.assertGreaterEqual(len(lines), 2)
        for expected in ["step 8/8 ▕██████████▏", "loss ", "tokens/s", "ETA 0.0s", "device ▕", "host ▕", "nvme ▕",
                         "stall "]:
            self.assertIn(expected, lines[-1])
        after = shown[shown.rindex("\r\x1b[K"):]
        self.assertRegex(ESCAPE.sub("", after), r"^\rstep 8/8 .*\r\ntrained 8 of 8 steps")

    def test_it_is_never_wider_than_the_terminal(self):
        for columns in [20, 40, 80, 120]:
            with self.subTest(columns=columns):
                lines = self.live_lines(self.shown_on_terminal(*ON_NVME, columns=columns))
                self.assertTrue(lines)
                self.assertLessEqual(max(width_of(line) for line in lines), columns)
                self.assertIn("step 8/8", lines[-1])

    def test_it_follows_the_width(self):
        resized = []

        def narrow(_, terminal, shown):
            if not resized and "step 1/" in shown:
                set_columns(terminal, 30)
                resized.append(len(shown))

        shown = self.shown_on_terminal("--set", "train.steps=60", meanwhile=narrow)
        self.assertLessEqual(width_of(self.live_lines(shown)[-1]), 30)
        self.assertGreater(width_of(self.live_lines(shown)[0]), 30)

    def test_colours_unless_no_color_is_set(self):
        self.assertRegex(self.shown_on_terminal(), COLOUR)
        self.assertRegex(self.shown_on_terminal(NO_COLOR=""), COLOUR)
        plain = self.shown_on_terminal(NO_COLOR="1")
        self.assertNotRegex(plain, COLOUR)
        self.assertTrue(self.live_lines(plain))

    def test_a_dumb_one_gets_lines_without_escapes(self):
        shown = self.shown_on_terminal(TERM="dumb")
        self.assertNotIn("\x1b", shown)
        self.assertIn("\r\nstep 8/8  loss", shown)

    def test_ascii_only_where_the_locale_says_so(self):
        self.assertIn("step 8/8 [##########]", self.live_lines(self.shown_on_terminal(LC_ALL="C", columns=200))[-1])

    def test_what_is_logged_goes_above_the_line(self):
        checkpoint = self.folder / "checkpoint"

        moved = self.folder / "moved"

        def take_away(_, __, shown):
            if "step 1/" in shown and not moved.exists():
                checkpoint.rename(moved)

        shown = self.shown_on_terminal("--set", "train.steps=40", "--save", checkpoint, "--save-every", 10,
                                       meanwhile=take_away)
        rows = [re.sub(r".*\r\x1b\[K", "", row.rstrip("\r")) for row in shown.split("\n")]
        logged = [ESCAPE.sub("", row) for row in rows if "was made again" in row]
        self.assertEqual(len(logged), 1, shown)
        self.assertRegex(logged[0], r"^[\d:.]+ terrace warning: checkpoint: ")
        self.assertTrue(any("step 40/40" in row for row in rows))

    def test_an_interrupt_leaves_it_in_order(self):
        sent = []

        def interrupt(run, _, shown):
            if not sent and "step 1/" in shown:
                run.send_signal(signal.SIGINT)
                sent.append(True)

        code, shown = self.on_terminal("--set", "train.steps=1000000", meanwhile=interrupt)
        self.assertEqual(code, 130, shown)
        plain = ESCAPE.sub("", shown)
        self.assertRegex(plain, r"\rstep \d+/1000000 [^\r\n]*\r\ninterrupted after \d+ of 1000000 steps")
        self.assertTrue(plain.endswith("\r\n"))
        colours = COLOUR.findall(shown)
        self.assertEqual(colours[-1], "\x1b[0m")
        self.assertNotIn("\x1b[?", shown)  # no mode of the terminal is changed


class Elsewhere(TerminalTest):
    def test_lines_are_plain(self):
        run = subprocess.run(self.command(*ON_NVME), capture_output=True, text=True, encoding="utf-8", check=True,
                             cwd=self.folder, env=self.environment())
        self.assertNotIn("\x1b", run.stdout + run.stderr)
        self.assertNotIn("\r", run.stdout + run.stderr)
        self.assertRegex(run.stderr, r"\nstep 8/8  loss [\d.]+  \d+ tokens/s  ETA 0\.0s  device \d+%  host \d+%  "
                                     r"nvme \d+%  stall \d+%( \S+→\S+| room on \w+| update)?\n$")


class Account(TerminalTest):
    def test_says_where_the_time_went(self):
        run = subprocess.run(self.command(*ON_NVME), capture_output=True, text=True, encoding="utf-8", check=True,
                             cwd=self.folder)
        account = run.stdout[run.stdout.index("the steps' time"):]
        self.assertRegex(account, r"\n  computation +\d+%")
        self.assertRegex(account, r"\nbound by [^\n]+: \d+% of the time was spent [^\n]+\n")

    def test_there_is_none_of_an_unmanaged_run_or_one_without_a_step(self):
        run = subprocess.run(self.command("--unmanaged"), capture_output=True, text=True, encoding="utf-8",
                             check=True, cwd=self.folder)
        self.assertNotIn("bound by", run.stdout)


if __name__ == "__main__":
    if not TERRACE:
        sys.exit("set TERRACE_BIN to the terrace program")
    unittest.main()
