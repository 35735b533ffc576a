"""tools/compare_adam says what it lacks, and its figures are what they are said to be."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import types
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/compare_adam")


def load():
    loader = importlib.machinery.SourceFileLoader("compare_adam", SCRIPT)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("compare_adam", loader))
    loader.exec_module(module)
    return module


def run(*arguments, **environment):
    return subprocess.run([sys.executable, "-B", SCRIPT, *arguments], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **environment})


class Tensor(types.SimpleNamespace):
    def numel(self):
        return self.count

    def element_size(self):
        return self.size


class Block:
    """Bytes of a tensor: where they are, and how many."""

    def __init__(self, address, size):
        self.address, self.size = address, size

    def data_ptr(self):
        return self.address

    def __getitem__(self, part):
        assert 0 <= part.start <= part.stop <= self.size
        return Block(self.address + part.start, part.stop - part.start)

    def view(self, _):
        return self


class CompareAdamTest(unittest.TestCase):
    def test_without_its_library_it_says_how_to_build_it(self):
        result = run("--library", "/nonexistent.so")
        self.assertEqual(result.returncode, 1)
        self.assertIn("ninja -C build/release terrace_adam", result.stderr)

    def test_without_torch_it_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "torch.py"), "w", encoding="utf-8") as file:
                file.write("raise ImportError('there is none')\n")
            result = run("--library", SCRIPT, PYTHONPATH=folder)
        self.assertEqual(result.returncode, 1)
        self.assertIn("has no torch", result.stderr)

    def test_sizes_are_read_and_shown_in_binary_units(self):
        module = load()
        self.assertEqual([module.number(text) for text in ("64Ki", "1Mi", "1.5Mi", "7")], [65536, 1 << 20, 3 << 19, 7])
        self.assertEqual([module.shown(count) for count in (65536, 1 << 20, 7)], ["64Ki", "1Mi", "7"])

    def test_a_gradient_is_read_and_everything_else_is_read_and_written(self):
        fp32 = Tensor(count=10, size=4)
        self.assertEqual(load().bytes_moved(fp32, [fp32, fp32, fp32]), 10 * 28)

    def test_states_of_its_own_lie_one_after_the_other_from_multiples_of_2_MiB_on(self):
        boundary = 2 << 20
        short, long = types.SimpleNamespace(itemsize=2), types.SimpleNamespace(itemsize=4)
        torch = types.SimpleNamespace(uint8=None, zeros=lambda size, dtype: Block(boundary // 2 + 64, size))
        first, second, third = load().side_by_side(torch, boundary // 2 - 1, [short, long, short])
        self.assertEqual([tensor.address for tensor in (first, second, third)],
                         [boundary, 2 * boundary, 4 * boundary])
        self.assertEqual([tensor.size for tensor in (first, second, third)], [boundary - 2, 2 * boundary - 4, boundary - 2])

    def test_the_interval_holds_the_median_and_is_narrow_where_values_agree(self):
        module = load()
        found = module.interval([1.0, 1.1, 0.9, 1.05, 0.95] * 6)
        self.assertLessEqual(found["low"], found["median"])
        self.assertLessEqual(found["median"], found["high"])
        self.assertEqual(module.interval([2.0] * 9), {"low": 2.0, "median": 2.0, "high": 2.0})

    def test_how_many_times_faster_it_is_and_its_share_of_memory_are_of_the_same_turns(self):
        module = load()
        takes = {"terrace": 1.0, "traffic": 0.9, "other": 1.5}
        sides = []

        def seconds(side, repetitions):
            sides.append(side.name)
            return takes[side.name]

        module.Traffic = lambda terrace: Side("traffic")
        module.seconds = seconds
        case = module.compare(Side("terrace"), Side("other"), 4)
        self.assertEqual((case["seconds"], case["times_faster"]["median"], case["fraction"]["median"]), (1.0, 1.5, 0.9))
        self.assertAlmostEqual(case["at_most"], 1.5 / 0.9)
        self.assertEqual(sides[1:], ["traffic", "terrace", "other", "other", "terrace", "traffic"] * 2)

    def test_what_a_call_alone_takes_is_measured_on_one_thread_and_shown_with_each_figure(self):
        module = load()
        torch = types.SimpleNamespace(threads=4)
        torch.get_num_threads = lambda: torch.threads
        torch.set_num_threads = lambda count: setattr(torch, "threads", count)
        threads = []

        def seconds(side, repetitions):
            threads.append(torch.threads)
            return 0.0005

        module.seconds = seconds
        self.assertEqual(module.call_seconds(torch, lambda: Side("one element")), 0.0005)
        self.assertEqual((set(threads), torch.threads), ({1}, 4))
        with self.assertRaises(ZeroDivisionError):
            module.call_seconds(torch, lambda: 1 / 0)
        self.assertEqual(torch.threads, 4)
        one = {"low": 1.0, "median": 1.0, "high": 1.0}
        row = module.row_of({"name": "it", "seconds": 0.001, "times_faster": one, "fraction": one, "at_most": 1.0,
                             "bytes_per_parameter": {"terrace": 28, "torch": 28}, "pairs": 30, "target": None,
                             "call_seconds": {"terrace": 6e-6, "torch": 2e-4}}, "torch")
        self.assertIn("a call 0.006 ms, 0.200 ms", row)

    def test_a_target_is_met_missed_or_undecided_by_the_interval(self):
        module = load()
        judged = [module.judge({"low": low, "high": high}, 1.4) for low, high in ((1.38, 1.5), (1.3, 1.39), (1.3, 1.45))]
        self.assertEqual(judged, ["met", "missed", "undecided"])
        self.assertEqual([module.target_of(count, "split") for count in (1000, 1 << 20, 16 << 20)], [None, 1.0, 1.05])
        self.assertEqual(module.target_of(64 << 20, "split_bfloat16"), 1.4)

    def test_what_is_undecided_is_compared_in_up_to_four_times_the_pairs_and_has_missed_then(self):
        module = load()
        turns = iter(range(10**6))
        module.Traffic = lambda terrace: Side("traffic")
        # The other takes as long as Terrace and twice as long by turns: the median lies between for ever.
        module.seconds = lambda side, repetitions: 1.0 if side.name != "other" else 1.0 + next(turns) % 2
        case = module.compare(Side("terrace"), Side("other"), 30, 1.4)
        self.assertEqual((case["pairs"], case["verdict"]), (120, "missed"))


class ProcessorsAwakeTest(unittest.TestCase):
    def test_each_has_a_process_of_idle_priority_for_as_long_as_something_is_measured(self):
        with load().processors_awake() as spinning:
            self.assertEqual(len(spinning), len(os.sched_getaffinity(0)))
            wait_until(lambda: all(os.sched_getscheduler(child) == os.SCHED_IDLE for child in spinning))
            self.assertEqual({tuple(os.sched_getaffinity(child)) for child in spinning},
                             {(processor,) for processor in os.sched_getaffinity(0)})
        self.assertFalse(any(map(is_running, spinning)))

    def test_they_end_with_a_process_that_was_killed(self):
        program = ("import time\n"
                   "from check_compare_adam_test import load\n"
                   "with load().processors_awake() as spinning:\n"
                   "    print(*spinning, flush=True)\n"
                   "    time.sleep(60)\n")
        with subprocess.Popen([sys.executable, "-B", "-c", program], cwd=os.path.dirname(os.path.abspath(__file__)),
                              stdout=subprocess.PIPE, text=True) as measuring:
            spinning = [int(child) for child in measuring.stdout.readline().split()]
            self.assertTrue(spinning)
            measuring.kill()
            wait_until(lambda: not any(map(is_running, spinning)))


def is_running(process):
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # dead, and nobody has asked for it
    except FileNotFoundError:
        return False


def wait_until(holds):
    end = time.monotonic() + 30
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


class Side:
    def __init__(self, name):
        self.name = name

    def step(self):
        pass


if __name__ == "__main__":
    unittest.main()
