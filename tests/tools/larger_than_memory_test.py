"""From outside: a model larger than device and host together is built by its unmodified constructor, and trains to the
bits of plain LibTorch."""

import os
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["TERRACE_LARGER_THAN_MEMORY"]
MIB = 1 << 20
DEVICE, HOST = 190 * MIB, 210 * MIB
SLACK = 64 * MIB


def run(*arguments):
    """Name and value of each line that the program prints, in order."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"exit {done.returncode}: {done.stderr}")
    return [tuple(line.rsplit(" ", 1)) for line in done.stdout.splitlines()]


def value(lines, name):
    return int(dict(lines)[name])


def bits(lines):
    """What has to be the same however memory is managed."""
    return [line for line in lines if line[0] not in ("constructed-peak", "peak")]


def settings(folder, device, host, nvme):
    return [f"device.memory={device}B", f"host.memory={host}B", f"nvme.memory={nvme}B", f'nvme.paths=["{folder}"]']


class LargerThanMemory(unittest.TestCase):
    def test_200_million_parameters_are_built_and_trained_within_400_mib(self):
        with tempfile.TemporaryDirectory() as folder:
            baseline = run(1, 64, *settings(folder, 64 * MIB, 64 * MIB, 256 * MIB))
            managed = run(16, 1024, *settings(folder, DEVICE, HOST, 6144 * MIB))
        unmanaged = run(16, 1024, "unmanaged")
        self.assertGreaterEqual(value(managed, "parameters"), 200_000_000)
        self.assertEqual(bits(managed), bits(unmanaged))
        for peak in ("constructed-peak", "peak"):
            held = value(managed, peak) - value(baseline, peak)
            print(f"{peak}: {held / MIB:.0f} MiB above the baseline of {value(baseline, peak) / MIB:.0f} MiB; "
                  f"unmanaged {(value(unmanaged, peak) - value(baseline, peak)) / MIB:.0f} MiB")
            self.assertLessEqual(held, DEVICE + HOST + SLACK)
        construction = value(managed, "constructed-peak") - value(baseline, "constructed-peak")
        self.assertLessEqual(construction, HOST + SLACK, "construction takes of the host's budget alone")


if __name__ == "__main__":
    unittest.main(verbosity=2)
